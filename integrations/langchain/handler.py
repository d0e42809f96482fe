"""The callback handler that carries a program through LangChain, and the calls that the chat model opens under it."""

from __future__ import annotations

import functools
import threading
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackHandler, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage

from weft.core.errors import InvalidIdError
from weft.core.process_table import CallIdentity
from weft.core.program import Program, register_adapter
from weft.core.program.lineage import Given
from weft.core.program.run_tree import RunKind
from weft.integrations.langchain.messages import Answer, said

_SESSION_KEYS: Final = ("session_id", "conversation_id", "thread_id")  # as LangSmith reads them
RUN_KWARG: Final = "_weft_run"  # private argument that carries a `Run` to the model


class _Seen:
    """A run under way, as far as the runs inside it need to know."""

    __slots__ = ("is_each", "is_task", "label", "namespace", "steps")

    def __init__(self, metadata: dict[str, Any], name: str, above: _Seen | None) -> None:
        self.namespace = metadata.get("langgraph_checkpoint_ns")
        # A node or @task of LangGraph: the first run of its namespace. What is tagged as its step is what it calls.
        self.is_task = self.namespace is not None and (above is None or above.namespace != self.namespace)
        self.is_each = name.startswith("RunnableEach<")  # `.map()`
        self.label = name or metadata.get("lc_agent_name") or metadata.get("langgraph_node") or ""
        self.steps: set[str] = set()


def _place(tags: list[str] | None, above: _Seen | None) -> tuple[RunKind, str | None]:
    """Who started a run, and its stage: LangChain and LangGraph tag the runs that they start themselves."""
    for tag in tags or ():
        if tag.startswith("graph:step:"):
            return RunKind.STAGE, tag
        if tag.startswith("map:key:"):
            return RunKind.STAGE, "map"
        if tag.startswith("seq:step:"):
            # A step that shows twice has no run of its own, and its code made both.
            if above is None or above.is_task or tag in above.steps:
                return RunKind.CODE, None
            above.steps.add(tag)
            return RunKind.STEP, None
    return (RunKind.STAGE, "each") if above is not None and above.is_each else (RunKind.CODE, None)


class ProgramCallbackHandler(BaseCallbackHandler):
    """Carries a program through LangChain: `config={"callbacks": [ProgramCallbackHandler()]}`.

    Args:
        program: the program that all runs under it belong to, as `program.config()` sets it. None: each root run is a
            program of its own, named as the run, in the session that its metadata names (`session_id`,
            `conversation_id` or `thread_id`).
    """

    run_inline = True  # on the caller's thread and at once, so that parents are known before their children

    def __init__(self, program: Program | None = None) -> None:
        self.program = program
        self._lock = threading.Lock()
        self._programs: dict[UUID, Program] = {}  # of the runs under way, where each root is its own program
        self._seen: dict[UUID, _Seen] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramCallbackHandler:
        return self  # LangChain copies configs; the copy still carries the same program

    def start_call(self, run_id: UUID, given: Given) -> tuple[Program, CallIdentity]:
        """Name the call that a model run makes.

        Raises:
            ProgramEndedError: the program has ended.
        """
        program = self._program_of(run_id) or self._open(run_id, None, "chat", None)
        seen = self._seen.get(run_id)
        return program, program.start_call(run_id, given, label=seen.label if seen is not None else None)

    def _program_of(self, run_id: UUID | None) -> Program | None:
        if self.program is not None:
            return self.program
        with self._lock:
            return self._programs.get(run_id) if run_id is not None else None

    def _open(self, run_id: UUID, parent_run_id: UUID | None, name: str, metadata: dict[str, Any] | None) -> Program:
        program = self._program_of(parent_run_id)
        if program is None:
            session = next((metadata[key] for key in _SESSION_KEYS if metadata and metadata.get(key)), None)
            try:
                program = Program(name, session_id=str(session) if session is not None else None, metadata=metadata)
            except InvalidIdError as error:  # LangChain would swallow it, and the run would have no program
                program = Program(name, metadata=metadata)
                program.log.warning("the run's session id is not usable, so it gets its own", reason=str(error))
        if self.program is None:
            with self._lock:
                self._programs[run_id] = program
        return program

    def _start(
        self,
        serialized: dict[str, Any] | None,
        *_input: Any,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        **_more: Any,
    ) -> Program:
        above = self._seen.get(parent_run_id) if parent_run_id is not None else None
        self._seen[run_id] = _Seen(metadata or {}, name or "", above)
        named = name or (serialized or {}).get("name") or "program"
        program = self._open(run_id, parent_run_id, named, metadata)
        program.start_run(run_id, parent_run_id, *_place(tags, above))
        return program

    def _start_tool(self, serialized: dict[str, Any] | None, *_input: Any, run_id: UUID, **more: Any) -> None:
        program = self._start(serialized, run_id=run_id, **more)
        program.note_tool(run_id, more.get("name") or (serialized or {}).get("name") or "tool")

    def _end(self, *_args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, None)

    def _error(self, error: BaseException, *, run_id: UUID, **_kwargs: Any) -> None:
        if any(kind.__name__ == "GraphInterrupt" for kind in type(error).__mro__):  # LangGraph need not be installed
            program = self._program_of(run_id)
            if program is not None:
                program.note_tool(run_id, "human")
        self.finish(run_id, error)

    def finish(self, run_id: UUID, error: BaseException | None) -> None:
        """A run ended; the last run of a program that was opened here ends the program. Finishing twice is harmless."""
        self._seen.pop(run_id, None)
        program = self._program_of(run_id)
        if program is None:
            return
        program.end_run(run_id)
        if self.program is None:
            with self._lock:
                self._programs.pop(run_id, None)
                ends = program not in self._programs.values()
            if ends:
                program.end_with(error)

    on_chain_start = on_llm_start = on_chat_model_start = _start
    on_tool_start = on_retriever_start = _start_tool
    on_chain_end = on_tool_end = on_retriever_end = on_llm_end = _end
    on_chain_error = on_tool_error = on_retriever_error = on_llm_error = _error


register_adapter("langchain", ProgramCallbackHandler)


class Run(NamedTuple):
    """Which run a model call is, handed from the public methods to the private ones."""

    handler: ProgramCallbackHandler
    run_id: UUID


class ModelCall:
    """One call of the model: opened when entered, and accounted to a program whatever happens inside."""

    def __init__(self, name: str, run: Run | None, messages: list[BaseMessage]) -> None:
        self._run = run
        self.answer = Answer()
        if run is not None:
            self.program, self.identity = run.handler.start_call(run.run_id, functools.partial(said, messages))
            self._key: Any = run.run_id
        else:  # no handler anywhere: the call is a program of its own
            self.program = Program(name)
            self._key = "call"
            self.identity = self.program.start_call(self._key, label=name)

    def __enter__(self) -> ModelCall:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.program.end_call(self._key, self.identity, self.answer.content(self._key))
        if self._run is None:
            self.program.end_with(error)
        elif error is not None and not isinstance(error, Exception):
            self._run.handler.finish(self._run.run_id, error)  # LangChain reports no end of a cancelled model run


def find_handler(*sources: Any) -> ProgramCallbackHandler | None:
    """Our handler among callbacks, which are a list, a manager or None."""
    for source in sources:
        handlers = source.handlers if hasattr(source, "handlers") else source
        for handler in handlers or ():
            if isinstance(handler, ProgramCallbackHandler):
                return handler
    return None


def run_of(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> Run | None:
    handler = find_handler(run_manager)
    return Run(handler, run_manager.run_id) if run_manager is not None and handler is not None else None
