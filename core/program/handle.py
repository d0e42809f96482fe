"""A program: one run of an agent entrypoint, from its start to its end, and the handle that names it.

Identity is handed over, never looked up: `@program` opens a `Program` and passes it to the entrypoint as an argument;
the entrypoint hands it on to a framework as `program.config()` or to a client bound to it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from structlog.stdlib import BoundLogger

from weft.core.errors import ProgramEndedError, ProgramEngineError
from weft.core.ids import CallId, IdSource, ProgramId, SessionId, check_id
from weft.core.log import get_logger
from weft.core.process_table import Account, Attained, CallIdentity, ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.program.lineage import NOTHING, Content, Given
from weft.core.program.run_tree import ROOT, RunKind, RunTree


class Backend(Protocol):
    """What a program needs of an engine. Both operations return at once and may be called from any thread."""

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session (Autellix §5, `start_session`)."""

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort the program's calls in flight and take its row out of the table (`end_session`)."""

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """The program's live row."""


# Adapters by framework, e.g. "langchain" -> handler class. An integration enters its own when it is imported, so that
# `program.config()` needs no import from core up to a framework.
_adapters: dict[str, Callable[[Program], Any]] = {}


def register_adapter(framework: str, adapter: Callable[[Program], Any]) -> None:
    """Say how a program is handed to a framework: `adapter(program)` makes the object that the framework takes."""
    _adapters[framework] = adapter


class _Run:
    """What the handles of one program (itself and its branches) share."""

    def __init__(self, info: ProgramInfo, ids: IdSource) -> None:
        self.info = info
        self.ids = ids
        self.lock = threading.RLock()
        self.tree = RunTree(ids.thread)
        self.graph = ProgramGraph(info.program_id, info.session_id, info.name)
        self.state = ProgramState.IDLE
        self.backend: Backend | None = None
        self.last_row: ProgramRow | None = None
        self.anchors = itertools.count(1)


class Program:
    """One run of an agent entrypoint, or a branch of it.

    Made by `@weft.program`; make one yourself to open a program where no function can be decorated::

        with weft.Program(name="nightly") as program:
            model.invoke("...", config=program.config())

    Attributes:
        program_id: unique to this run.
        session_id: the session it belongs to: given, or its own.
        name, tenant, tags, metadata: as given.
        log: a structlog logger with the program's and the session's id bound.

    Raises:
        InvalidIdError: `session_id` or `tenant` cannot travel with a request.
    """

    def __init__(
        self,
        name: str = "program",
        *,
        session_id: str | None = None,
        tenant: str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        ids: IdSource | None = None,
    ) -> None:
        ids = ids or IdSource()
        info = ProgramInfo(
            program_id=ids.program(),
            session_id=SessionId(check_id(session_id, "session_id")) if session_id is not None else ids.session(),
            name=name,
            tenant=check_id(tenant, "tenant") if tenant is not None else None,
            tags=(tags,) if isinstance(tags, str) else tuple(tags),
            metadata=MappingProxyType(dict(metadata or {})),
        )
        self._set_up(_Run(info, ids), anchor=ROOT)

    def _set_up(self, run: _Run, anchor: Hashable) -> None:
        self._run = run
        self._anchor = anchor
        self._handed: dict[str, Any] = {}
        self.program_id = run.info.program_id
        self.session_id = run.info.session_id
        self.name = run.info.name
        self.tenant = run.info.tenant
        self.tags = run.info.tags
        self.metadata = run.info.metadata
        self.log: BoundLogger = get_logger().bind(
            program=self.name, program_id=self.program_id, session_id=self.session_id
        )

    # -- handing the program to a framework

    def adapter(self, framework: str) -> Any:
        """The object that carries this handle into a framework, one per handle.

        Raises:
            LookupError: `weft.integrations.<framework>` has not been imported.
        """
        with self._run.lock:
            if framework not in self._handed:
                if framework not in _adapters:
                    raise LookupError(f"import weft.integrations.{framework} before handing a program to it")
                self._handed[framework] = _adapters[framework](self)
            return self._handed[framework]

    @property
    def callbacks(self) -> list[Any]:
        """LangChain callbacks that carry this program, for `config={"callbacks": program.callbacks}`."""
        return [self.adapter("langchain")]

    def config(self, **extra: Any) -> dict[str, Any]:
        """A LangChain `RunnableConfig` that carries this program.

        Args:
            **extra: further entries, e.g. `recursion_limit=50`; `callbacks` (a list), `tags` and `metadata` are joined
                with the program's own.
        """
        ids = {"session_id": self.session_id, "program_id": self.program_id}
        return {
            **extra,
            "callbacks": [*self.callbacks, *(extra.get("callbacks") or ())],
            "tags": [*self.tags, *(extra.get("tags") or ())],
            "metadata": {**self.metadata, **(extra.get("metadata") or {}), **ids},
        }

    def branch(self) -> Program:
        """A handle for a part that runs beside others, used as `with` or `async with`; its calls form threads of their
        own, and what the program does after it comes after them."""
        with self._run.lock:
            branch = object.__new__(Program)
            anchor = ("branch", next(self._run.anchors))
            self._run.tree.start(anchor, None, self._anchor, RunKind.STAGE)
            branch._set_up(self._run, anchor)
            return branch

    # -- what integrations report

    def start_run(
        self, run: Hashable, parent: Hashable | None, place: RunKind = RunKind.CODE, stage: Hashable = None
    ) -> None:
        """A run of the framework started inside another (None: at this handle's top).

        Args:
            run: any key of the framework's, used once.
            parent: the run around it.
            place: who started it, where the framework says so.
            stage: for `RunKind.STAGE`: the same for runs that the framework starts side by side.
        """
        with self._run.lock:
            self._run.tree.start(run, parent, self._anchor, place, stage)

    def end_run(self, run: Hashable) -> None:
        """A run of the framework ended, well or not."""
        with self._run.lock:
            self._run.tree.end(run)

    def note_tool(self, run: Hashable, name: str) -> None:
        """A run is a tool's, or a human's ("human"): the graph says so of the interception that it is part of."""
        with self._run.lock:
            self._run.tree.note_tool(run, name)

    def note_tools(self, run: Hashable, names: Iterable[str]) -> None:
        """Inside a run, tools ran one after another that nobody reported while they did."""
        for name in names:
            tool = object()
            self.start_run(tool, run)
            self.note_tool(tool, name)
            self.end_run(tool)

    def start_call(self, run: Hashable, given: Given = NOTHING, *, label: str | None = None) -> CallIdentity:
        """A run of the framework calls the LLM: name the call.

        Args:
            run: the run. One that was not reported is at this handle's top, and ends with the call.
            given: what the call is given, or a function that tells, which is called only if the runs leave something
                open.
            label: what the graph calls it, e.g. the name of the agent.

        Raises:
            ProgramEndedError: the program has ended.
        """
        with self._run.lock:
            self._check_running()
            call_id = self._run.ids.call()
            thread_id, parents, inexact, tools = self._run.tree.start_call(run, call_id, self._anchor, given)
            guesses = set(inexact)
            edges = tuple(Edge(parent, parent not in guesses) for parent in parents)
            self._run.graph.open(CallNode(call_id, thread_id, edges, label or "", tools))
            return CallIdentity(self.program_id, thread_id, call_id, parents)

    def end_call(self, run: Hashable, identity: CallIdentity, gave: Content = NOTHING) -> None:
        """A call gave its result: what follows in the run comes after it.

        A call that failed, was cancelled or broken off gives none: what follows stands where it stood.
        """
        del run  # the call knows
        with self._run.lock:
            self._run.tree.end_call(identity.call_id, gave)

    # -- what an engine reports, in seconds of its clock

    def call_arrived(self, call_id: CallId, now_s: float) -> None:
        """A call reached the engine."""
        with self._run.lock:
            self._run.graph.arrive(call_id, now_s)

    def call_left(self, call_id: CallId, now_s: float, account: Account, state: CallState) -> None:
        """A call left the engine, or was refused by it, before its caller hears of it."""
        with self._run.lock:
            self._run.graph.leave(call_id, now_s, account, state)
            if state is CallState.FAILED:
                self._run.tree.fail_call(call_id)
            elif state is CallState.CANCELLED:
                self._run.tree.drop_call(call_id)

    def call_settled(self, call_id: CallId, account: Account) -> None:
        """A call that was aborted turned out to have cost more."""
        with self._run.lock:
            self._run.graph.settle(call_id, account)

    # -- life

    def bind(self, backend: Backend) -> None:
        """Begin the program's session on the engine of its first call; later calls check that it is the same engine.

        Raises:
            ProgramEndedError: the program has ended.
            ProgramEngineError: it runs on another engine.
        """
        with self._run.lock:
            self._check_running()
            if self._run.backend is backend:
                return
            if self._run.backend is not None:
                raise ProgramEngineError(self.program_id, self.name)
            backend.start_session(self._run.info)
            self._run.backend = backend

    def _check_running(self) -> None:
        if self._run.state is not ProgramState.IDLE:
            raise ProgramEndedError(self.program_id, self.name)

    @property
    def is_branch(self) -> bool:
        return self._anchor is not ROOT

    @property
    def state(self) -> ProgramState:
        """Idle or active while it runs, then how it ended."""
        row = self.row
        return row.state if row is not None else self._run.state

    @property
    def row(self) -> ProgramRow | None:
        """The program's row in the process table, after its end the last one. None before its first call."""
        with self._run.lock:
            if self._run.backend is None:
                return None
            return self._run.last_row or self._run.backend.row(self.program_id)

    @property
    def graph(self) -> ProgramGraph:
        """The calls so far as a graph: threads, forks, joins, interceptions, critical path; also after the end."""
        return self._run.graph

    @property
    def attained(self) -> Attained:
        """Service and wait so far, in seconds."""
        row = self.row  # read once: it may go while the program ends
        return row.attained if row is not None else Attained()

    def end(self, state: ProgramState = ProgramState.FINISHED) -> None:
        """End the program, or this branch of it. Ending twice changes nothing.

        The program's calls in flight are aborted in the engine, and its row leaves the table.
        """
        if self.is_branch:
            self.end_run(self._anchor)
            return
        with self._run.lock:
            if self._run.state is not ProgramState.IDLE:
                return
            self._run.state = state
            backend = self._run.backend
        if backend is not None:
            self._run.last_row = backend.end_session(self.program_id, state)
        self.log.debug("program ended", state=str(state))

    def end_with(self, error: BaseException | None) -> None:
        """End as an entrypoint does that returned (None) or let `error` out."""
        if error is None:
            self.end(ProgramState.FINISHED)
        elif isinstance(error, Exception):
            self.end(ProgramState.FAILED)
        else:  # CancelledError, GeneratorExit, KeyboardInterrupt: nobody waits for the result any more
            self.end(ProgramState.CANCELLED)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_with(error)

    async def __aenter__(self) -> Program:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_with(error)

    def __repr__(self) -> str:
        return f"<weft.Program {self.name!r} {self.program_id}{' branch' if self.is_branch else ''} {self.state}>"
