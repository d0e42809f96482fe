"""The callback handler that carries a program through LangChain, and the calls that the chat model opens under it."""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackHandler, CallbackManagerForLLMRun

from weft.core.errors import InvalidIdError
from weft.core.process_table import CallIdentity
from weft.core.program import Program, register_adapter

_SESSION_KEYS: Final = ("session_id", "conversation_id", "thread_id")  # as LangSmith reads them
RUN_KWARG: Final = "_weft_run"  # private argument that carries a `Run` to the model


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

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramCallbackHandler:
        return self  # LangChain copies configs; the copy still carries the same program

    def start_call(self, run_id: UUID) -> tuple[Program, CallIdentity]:
        """Name the call that a model run makes.

        Raises:
            ProgramEndedError: the program has ended.
        """
        program = self._program_of(run_id) or self._open(run_id, None, "chat", None)
        return program, program.start_call(run_id)

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

    def _start(self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        serialized = args[0] or {}
        name = kwargs.get("name") or serialized.get("name") or "program"
        self._open(run_id, parent_run_id, name, kwargs.get("metadata")).start_run(run_id, parent_run_id)

    def _end(self, *_args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, None)

    def _error(self, *args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, args[0])

    def finish(self, run_id: UUID, error: BaseException | None) -> None:
        """A run ended; the last run of a program that was opened here ends the program. Finishing twice is harmless."""
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

    on_chain_start = on_tool_start = on_retriever_start = on_llm_start = on_chat_model_start = _start
    on_chain_end = on_tool_end = on_retriever_end = on_llm_end = _end
    on_chain_error = on_tool_error = on_retriever_error = on_llm_error = _error


register_adapter("langchain", ProgramCallbackHandler)


class Run(NamedTuple):
    """Which run a model call is, handed from the public methods to the private ones."""

    handler: ProgramCallbackHandler
    run_id: UUID


class ModelCall:
    """One call of the model: opened when entered, and accounted to a program whatever happens inside."""

    def __init__(self, name: str, run: Run | None) -> None:
        self._run = run
        if run is not None:
            self.program, self.identity = run.handler.start_call(run.run_id)
            self._key: Any = run.run_id
        else:  # no handler anywhere: the call is a program of its own
            self.program = Program(name)
            self._key = "call"
            self.identity = self.program.start_call(self._key)

    def __enter__(self) -> ModelCall:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.program.end_call(self._key, self.identity)
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
