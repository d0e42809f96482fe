"""The callback handler that carries a program through LangChain, and the calls of the chat model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, BaseCallbackHandler, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.runnables import ensure_config

from weft.core.errors import InvalidIdError, ProgramEndedError
from weft.core.process_rows import CallIdentity, ProgramState
from weft.core.program import Position, Program, register_adapter, register_surroundings
from weft.core.program.structure.lineage import Inputs
from weft.core.routing.admission import check_timeout
from weft.integrations.arguments import check_program
from weft.integrations.langchain.messages import AnswerSoFar, input_content
from weft.integrations.langchain.places import OpenRuns
from weft.integrations.langchain.root_runs import RootRuns

_SESSION_KEYS: Final = ("session_id", "conversation_id", "thread_id")  # in the order in which LangSmith reads them
RUN_KWARG: Final = "_weft_run"  # the private argument that carries a `LangChainRun` to the model


def _new_program(name: str, metadata: dict[str, Any] | None) -> Program:
    """The program of a root run, in the session that the run's metadata names."""
    session = next((metadata[key] for key in _SESSION_KEYS if metadata and metadata.get(key)), None)
    try:
        return Program(name, session_id=str(session) if session is not None else None, metadata=metadata)
    except InvalidIdError as error:  # LangChain would drop the error, and the run would have no program.
        program = Program(name, metadata=metadata)
        program.log.warning("the run's session id is not usable, so it gets its own", reason=str(error))
        return program


class ProgramCallbackHandler(BaseCallbackHandler):
    """Carries a program through LangChain: `config={"callbacks": [ProgramCallbackHandler()]}`.

    Args:
        program: The program to which all runs belong; `program.config()` passes it. None: Each root run is a program
            of its own. It has the name of the run, and the session that the run's metadata names (`session_id`,
            `conversation_id` or `thread_id`).
        idle_timeout_s: Where each root run is a program: Seconds without the start or end of a run or call, and without
            a call in flight, after which a program ends as `ProgramState.ABANDONED`. LangChain does not report the end
            of every run that is left. A call that comes later nevertheless goes to a new program of the same name and
            session, and a warning says so. None: no limit.

    Raises:
        ArgumentTypeError: `program` is something else.
        InvalidRequestError: `idle_timeout_s` is not above 0.
    """

    run_inline = True  # The handler runs at once on the caller's thread, so a parent is known before its children.

    def __init__(self, program: Program | None = None, *, idle_timeout_s: float | None = 600.0) -> None:
        if program is not None:
            check_program("ProgramCallbackHandler", program)
        self.program = program
        self._open_runs: OpenRuns = (
            program.reports.framework_state("langchain", OpenRuns) if program is not None else OpenRuns()
        )
        self._root_runs = RootRuns(check_timeout(idle_timeout_s, "idle_timeout_s"), self._forget)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramCallbackHandler:
        return self  # LangChain copies configs, and a copy must carry the same program.

    def start_call(self, run_id: UUID, model: str, given: Inputs) -> tuple[Program, CallIdentity]:
        """Start the call of a model run. The graph shows the name of the run, the model, the agent or the node.

        Args:
            model: The name that the user gave to the model, or "".
            given: The input of the call, for lineage.

        Raises:
            ProgramEndedError: The program has ended, other than by its time-out.
        """
        run = self._open_runs.get(run_id)
        label = (run.name or model or run.owner) if run is not None else model
        program = self.program_of(run_id) or self._open_program(run_id, run_id, "chat", None)
        try:
            return program, program.reports.start_call(run_id, given, label=label)
        except ProgramEndedError:
            if program is self.program or program.state is not ProgramState.ABANDONED:
                raise
        program = self._open_program(run_id, run_id, "chat", None)  # it has timed out at this very moment
        return program, program.reports.start_call(run_id, given, label=label)

    def program_of(self, run_id: UUID | None) -> Program | None:
        """The program of a run. None: The run is not known, and this handler has no program of its own."""
        return self.program if self.program is not None or run_id is None else self._root_runs.program_of(run_id)

    def _forget(self, runs: set[UUID]) -> None:
        for run_id in runs:
            self._open_runs.discard(run_id)

    def _open_program(
        self, run_id: UUID, parent_run_id: UUID | None, name: str, metadata: dict[str, Any] | None
    ) -> Program:
        """The program of a new run: its parent's, or a new program."""
        if self.program is not None:
            return self.program
        return self._root_runs.start(run_id, parent_run_id, functools.partial(_new_program, name, metadata))

    def _start(
        self,
        serialized: dict[str, Any] | None,
        *given: Any,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        is_model: bool = False,
        **_more: Any,
    ) -> Program:
        context_id = self._surrounding_run()
        is_told = parent_run_id is not None
        parent_run_id = parent_run_id or context_id
        program_name = name or (serialized or {}).get("name") or "program"
        program = self._open_program(run_id, parent_run_id, program_name, metadata)
        with self._open_runs.starting:  # a run that another thread starts finds its place in runs that the tree has
            place = self._open_runs.add(
                run_id,
                parent_run_id,
                tags=tags or (),
                metadata=metadata or {},
                name=name or "",
                given=given[0] if given else None,
                is_model=is_model,
                context_id=context_id,
            )
            program.reports.start_run(
                run_id,
                place.parent if is_told or place.parent != context_id else None,  # the program knows more of its place
                place.kind,
                stage=place.stage,
                task=place.task,
                is_certain=place.is_certain,
                runs_code=not is_model,
            )
        return program

    def _surrounding_run(self) -> UUID | None:
        """The run, one that this handler has seen, in which the caller's code runs."""
        run_id = getattr(ensure_config().get("callbacks"), "parent_run_id", None)
        return run_id if self._open_runs.get(run_id) is not None else None

    def _start_model(self, *given: Any, **more: Any) -> None:
        self._start(*given, **more, is_model=True)

    def _start_tool(self, serialized: dict[str, Any] | None, *_input: Any, run_id: UUID, **more: Any) -> None:
        program = self._start(serialized, run_id=run_id, **more)
        program.reports.note_tool(run_id, more.get("name") or (serialized or {}).get("name") or "tool")

    def _end(self, *_args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, None)

    def _error(self, error: BaseException, *, run_id: UUID, **_kwargs: Any) -> None:
        # Compared by name, since LangGraph may not be installed.
        if any(kind.__name__ == "GraphInterrupt" for kind in type(error).__mro__):
            program = self.program_of(run_id)
            if program is not None:
                program.reports.note_human(run_id)
        self.finish(run_id, error)

    def finish(self, run_id: UUID, error: BaseException | None) -> None:
        """End a run, and with it perhaps a program that this handler opened. Ending twice changes nothing."""
        self._open_runs.discard(run_id)
        if self.program is not None:
            self.program.reports.end_run(run_id)
        else:
            self._root_runs.end(run_id, error)

    on_chain_start = _start
    on_llm_start = on_chat_model_start = _start_model
    on_tool_start = on_retriever_start = _start_tool
    on_chain_end = on_tool_end = on_retriever_end = on_llm_end = _end
    on_chain_error = on_tool_error = on_retriever_error = on_llm_error = _error


register_adapter("langchain", ProgramCallbackHandler)


class LangChainRun(NamedTuple):
    """The run of a model call, passed from the model's public methods to its private ones."""

    handler: ProgramCallbackHandler
    run_id: UUID


class ModelCall:
    """A model call. It is named when it is made, and its program counts it however the `with` block ends.

    Args:
        name: The name that the user gave to the model, or "".
        run: The run of the call. None: The call is a program of its own.

    Raises:
        ProgramEndedError: The program has ended.
    """

    def __init__(self, name: str, run: LangChainRun | None, messages: list[BaseMessage]) -> None:
        self._run = run
        self.answer = AnswerSoFar()
        if run is not None:
            self.program, self.identity = run.handler.start_call(
                run.run_id, name, functools.partial(input_content, messages)
            )
            self._key: Any = run.run_id
        else:
            self.program = Program(name or "chat")
            self._key = "call"
            self.identity = self.program.reports.start_call(self._key, label=name)

    def __enter__(self) -> ModelCall:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.program.reports.end_call(self._key, self.identity, self.answer.content(self._key))
        if self._run is None:
            self.program.reports.end_with(error)
        elif error is not None and not isinstance(error, Exception):
            self._run.handler.finish(self._run.run_id, error)  # LangChain does not report the end of a cancelled run.


def find_handler(*sources: Any) -> ProgramCallbackHandler | None:
    """Find the handler of the innermost program in callbacks, each of which is a list, a manager or None.

    LangChain merges the callbacks that it is given with those of the surrounding run. Where no program is inside the
    other, callbacks that are given come after the surrounding ones, and a model's own callbacks come first. A program
    that has ended leaves its calls to the program around it: a worker that it has started still carries it.
    """
    found: tuple[ProgramCallbackHandler, Program | None] | None = None
    for source in reversed(sources):
        for handler, program in _carried(source):
            if found is None or program is None or found[1] is None or not _goes_first(found[1], program):
                found = handler, program
    return found[0] if found is not None else None


def _goes_first(program: Program, other: Program) -> bool:
    """Whether a program takes a call before another one: it is inside the other, or the other has ended inside it."""
    if program.reports.is_inside(other.reports):
        return not program.state.has_ended
    return other.reports.is_inside(program.reports) and other.state.has_ended


def _carried(callbacks: Any) -> Iterator[tuple[ProgramCallbackHandler, Program | None]]:
    """Yield Weft's handlers in callbacks with their programs there; a handler that is new there has none."""
    run_id = getattr(callbacks, "run_id", None) or getattr(callbacks, "parent_run_id", None)
    handlers = getattr(callbacks, "handlers", callbacks) or ()
    inherited = getattr(callbacks, "inheritable_handlers", handlers)
    for handler in sorted(handlers, key=inherited.__contains__):
        if isinstance(handler, ProgramCallbackHandler):
            yield handler, handler.program_of(run_id)


def _surroundings() -> list[Position]:
    """The run of LangChain in which the caller's code runs, for each program that its callbacks carry."""
    manager = ensure_config().get("callbacks")
    run_id = getattr(manager, "parent_run_id", None)
    programs = [program for _, program in _carried(manager) if program is not None]
    return [Position(program.reports, run_id) for program in programs if run_id is not None]


register_surroundings("langchain", _surroundings)


def run_of(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> LangChainRun | None:
    """The run of a run manager, if Weft's handler is among its callbacks."""
    handler = find_handler(run_manager)
    return LangChainRun(handler, run_manager.run_id) if run_manager is not None and handler is not None else None
