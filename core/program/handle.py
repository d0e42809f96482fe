"""A program: one run of an agent entrypoint, and the handle that identifies it.

Identity is passed explicitly, never looked up: `@program` opens a `Program` and passes it to the entrypoint as an
argument. The entrypoint passes it on to a framework as `program.config()`, or to a client bound to it.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any, Final, Protocol

from structlog.stdlib import BoundLogger

from weft.core.errors import ProgramEndedError, ProgramEngineError
from weft.core.ids import CallId, IdSource, ProgramId, SessionId, check_id
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.process_table import Account, Attained, CallIdentity, ProgramInfo, ProgramRow, ProgramState
from weft.core.program.ancestry import Calls
from weft.core.program.graph import CallNode, CallState, Edge, ProgramGraph
from weft.core.program.lineage import NOTHING, Content, Inputs
from weft.core.program.run_tree import ROOT, RunKind, RunTree
from weft.core.program.surroundings import Position, innermost, positions
from weft.core.program.unused import warn_of_no_call

MOST_PARENTS_SENT: Final = 64  # with a call to its engine, the newest; the graph has all of them
_MOST_OUTER: Final = 100  # programs around a program whose ids it keeps, the innermost


class Backend(Protocol):
    """The interface of an engine to programs. The methods return at once and may be called from any thread."""

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session (Autellix §5, `start_session`)."""

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort the program's calls in flight and return its last row, which leaves the table (`end_session`)."""

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """Return the row of a running program, None if there is none."""


# Adapters by framework, e.g. "langchain" -> handler class. An integration registers its adapter when it is imported, so
# that `program.config()` does not import a framework into core.
_adapters: dict[str, Callable[[Program], Any]] = {}


def register_adapter(framework: str, adapter: Callable[[Program], Any]) -> None:
    """Register how a program is passed to a framework.

    Args:
        framework: the framework's name, e.g. "langchain".
        adapter: makes the object that the framework takes, such as a callback handler, from a program.
    """
    _adapters[framework] = adapter


def _nothing() -> None:
    """Does nothing."""


class _SharedState:
    """The state that a program's own handle and the handles of its branches share."""

    def __init__(self, info: ProgramInfo, ids: IdSource) -> None:
        self.info = info
        self.ids = ids
        self.lock = fork_safe(threading.RLock())
        self.tree = RunTree(ids.thread)
        self.graph = ProgramGraph(info.program_id, info.session_id, info.name, info.parent_program_id)
        self.opened_in: Position | None = None  # in another program, while this one runs
        self.outer: tuple[ProgramId, ...] = ()  # the programs around this one, the innermost first
        self.state = ProgramState.IDLE
        self.backend: Backend | None = None
        self.last_row: ProgramRow | None = None
        self.anchors = itertools.count(1)
        self.framework_states: dict[str, Any] = {}
        self.reports = 0  # from integrations and the engine
        self.has_called = False
        self.idle_timeout_s: float | None = None
        self.on_abandoned: Callable[[], None] = _nothing
        self._edges: tuple[Calls, tuple[Edge, ...]] = ((), ())  # of the latest call

    def edges(self, parents: Calls, inexact: Calls) -> tuple[Edge, ...]:
        """The edges of a call. Calls that share a tuple of parents share a tuple of edges."""
        if parents is not self._edges[0]:
            guesses = set(inexact)
            self._edges = parents, tuple(_edge(parent, parent not in guesses) for parent in parents)
        return self._edges[1]


_edge = functools.lru_cache(4096)(Edge)  # a call is a parent of many calls in a wide program


class Program:
    """One run of an agent entrypoint, or a branch of it.

    `@weft.program` makes a program for each call of a function. Without a function, open one in a `with` block::

        with weft.Program(name="nightly") as program:
            model.invoke("...", config=program.config())

    Args:
        name: shown in the process table.
        session_id: the session that the program belongs to. Default: a new session.
        tenant: the user or customer that the program runs for.
        tags: shown in traces and passed to the framework.
        metadata: shown in traces and passed to the framework.
        ids: makes the ids. Default: random ids.

    Attributes:
        program_id: the id of this run.
        session_id: the id of the session.
        name, tenant, tags, metadata: the arguments.
        parent_program_id: the id of the program inside one of whose runs this program was opened, or None.
        log: a structlog logger with the program's name and id and the session's id bound.

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
        self._set_up(_SharedState(info, ids), anchor=ROOT)
        self._enclosing_run()

    def _set_up(self, shared: _SharedState, anchor: Hashable) -> None:
        self._shared = shared
        self._anchor = anchor  # the run that this handle stands for
        self._adapted: dict[str, Any] = {}  # by framework
        self.program_id = shared.info.program_id
        self.session_id = shared.info.session_id
        self.name = shared.info.name
        self.tenant = shared.info.tenant
        self.tags = shared.info.tags
        self.metadata = shared.info.metadata
        self.log: BoundLogger = get_logger().bind(
            program=self.name, program_id=self.program_id, session_id=self.session_id
        )

    # -- passing the program to a framework

    def adapter(self, framework: str) -> Any:
        """Return the object that carries this handle into a framework; the same object each time.

        Raises:
            LookupError: `weft.integrations.<framework>` has not been imported.
        """
        with self._shared.lock:
            if framework not in self._adapted:
                if framework not in _adapters:
                    raise LookupError(f"import weft.integrations.{framework} before passing a program to it")
                self._adapted[framework] = _adapters[framework](self)
            return self._adapted[framework]

    def framework_state(self, framework: str, make: Callable[[], Any]) -> Any:
        """Return what a framework's adapters of all handles of this program share; `make` makes it at first."""
        with self._shared.lock:
            return self._shared.framework_states.setdefault(framework, make())

    @property
    def callbacks(self) -> list[Any]:
        """LangChain callbacks that carry this program, for `config={"callbacks": program.callbacks}`.

        Raises:
            LookupError: `weft.integrations.langchain` has not been imported.
        """
        return [self.adapter("langchain")]

    def config(self, **extra: Any) -> dict[str, Any]:
        """Return a LangChain `RunnableConfig` that carries this program.

        Args:
            **extra: further entries, e.g. `recursion_limit=50`. `callbacks` (a list), `tags` and `metadata` are added
                to the program's own.

        Raises:
            LookupError: `weft.integrations.langchain` has not been imported.
        """
        ids = {"session_id": self.session_id, "program_id": self.program_id}
        return {
            **extra,
            "callbacks": [*self.callbacks, *(extra.get("callbacks") or ())],
            "tags": [*self.tags, *(extra.get("tags") or ())],
            "metadata": {**self.metadata, **(extra.get("metadata") or {}), **ids},
        }

    def branch(self) -> Program:
        """Return a handle for a part of the program that runs concurrently with other parts.

        Use it in `with` or `async with`. The calls under the handle form threads of their own. Calls that the program
        makes after the branch has ended come after the branch's calls. A branch that is opened inside a run of the
        program belongs to the run.
        """
        run = self._enclosing_run()
        with self._shared.lock:
            branch = object.__new__(Program)
            anchor = ("branch", next(self._shared.anchors))
            self._shared.tree.start(anchor, run, self._anchor, RunKind.STAGE)
            branch._set_up(self._shared, anchor)
            return branch

    # -- reports from integrations

    def start_run(
        self,
        run: Hashable,
        parent: Hashable | None,
        kind: RunKind = RunKind.CODE,
        *,
        stage: Hashable = None,
        task: Hashable = None,
        is_certain: bool = True,
    ) -> None:
        """Report that a run of the framework starts.

        Args:
            run: the run's key in the framework, used once.
            parent: the enclosing run. None, or a run that was not reported: the run of this program in which the
                caller's code runs, otherwise the top of this handle.
            kind: how the run was started, if the framework states it.
            stage: for `RunKind.STAGE`: the same value for runs that the framework starts to run concurrently.
            task: for `RunKind.STAGE`: the same value for a run that does again what another one of its stage did.
            is_certain: False: the run is inside `parent`, perhaps not directly.
        """
        if parent is None or not self._shared.tree.knows_run(parent):
            parent = self._enclosing_run()
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.tree.start(run, parent, self._anchor, kind, stage=stage, task=task, is_certain=is_certain)

    def _enclosing_run(self) -> Hashable | None:
        """Return the run of this program in which the caller's code runs; None: there is none, or it is not known.

        If the code runs in another program, that one becomes the parent of this program, unless it has begun already.
        """
        shared, around = self._shared, tuple(positions())
        for position in around:
            if position.program.program_id == self.program_id:
                return position.run
        outer = innermost(around)
        has_begun = shared.backend is not None or len(shared.graph) > 0
        if outer is not None and not has_begun and shared.opened_in is None and not outer.program.is_inside(self):
            shared.opened_in = outer
            shared.outer = (outer.program.program_id, *outer.program.outer)[:_MOST_OUTER]
            shared.info = replace(shared.info, parent_program_id=outer.program.program_id)
            shared.graph.parent_program_id = outer.program.program_id
            outer.program.note_inner()
        return None

    def note_inner(self) -> None:
        """Note that a program runs inside this one, so that this one does not warn that it had no call."""
        self._shared.has_called = True

    @property
    def opened_in(self) -> Position | None:
        """The run of another program in which this one was opened, until this one ends."""
        return self._shared.opened_in

    @property
    def outer(self) -> tuple[ProgramId, ...]:
        """The ids of the programs around this one, the innermost first."""
        return self._shared.outer

    def has_open(self, run: Hashable) -> bool:
        """Whether a run of the program was reported and has not ended."""
        return self._shared.tree.is_open(run)

    def is_inside(self, other: Program) -> bool:
        """Whether this program runs inside another one, directly or not."""
        return other.program_id in self._shared.outer

    def end_run(self, run: Hashable) -> None:
        """Report that a run of the framework ended, with or without success."""
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.tree.end(run)

    def note_tool(self, run: Hashable, name: str) -> None:
        """Report that a run is a tool, or a human's answer ("human"). The graph names it in the interception."""
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.tree.note_tool(run, name)

    def note_tools(self, run: Hashable, names: Iterable[str]) -> None:
        """Report tools that have run inside a run, one after another, without a report while they ran."""
        for name in names:
            tool = object()
            self.start_run(tool, run)
            self.note_tool(tool, name)
            self.end_run(tool)

    def start_call(self, run: Hashable, inputs: Inputs = NOTHING, *, label: str | None = None) -> CallIdentity:
        """Report that a run of the framework calls the LLM, and return the ids of the call.

        The ids name the 64 newest parents at most, because they travel with the call. The graph has all parents.

        Args:
            run: the run. A run that was not reported is at the top of this handle, and ends with the call.
            inputs: the content of the call's messages, or a function that returns it. The function is called only if
                the runs leave the call's parents in doubt.
            label: the call's name in the graph, e.g. the name of the agent.

        Raises:
            ProgramEndedError: the program has ended.
        """
        with self._shared.lock:
            self._shared.reports += 1
            self._check_running()
            self._shared.has_called = True
            call_id = self._shared.ids.call()
            thread_id, parents, inexact, tools = self._shared.tree.start_call(run, call_id, self._anchor, inputs)
            edges = self._shared.edges(parents, inexact)
            self._shared.graph.open(CallNode(call_id, thread_id, edges, label or "", tools))
            self._shared.graph.fold(self._shared.tree.knows)
            return CallIdentity(self.program_id, thread_id, call_id, parents[-MOST_PARENTS_SENT:])

    def end_call(self, run: Hashable, identity: CallIdentity, output: Content = NOTHING) -> None:
        """Report that a call has a result. The next call in the run comes after it.

        Do not report a call that failed, was cancelled or broken off: the next call then has the same parents.

        Args:
            run: the run that made the call.
            identity: the result of `start_call`.
            output: the content of the call's result.
        """
        del run  # the tree knows the run of the call
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.tree.end_call(identity.call_id, output)

    # -- reports from an engine, in seconds of its monotonic clock

    def call_arrived(self, call_id: CallId, now_s: float) -> None:
        """Report that a call reached the engine."""
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.graph.arrive(call_id, now_s)

    def call_left(self, call_id: CallId, now_s: float, account: Account, state: CallState) -> None:
        """Report that a call left the engine, or that the engine refused it, before the caller gets the result."""
        with self._shared.lock:
            self._shared.reports += 1
            self._shared.graph.leave(call_id, now_s, account, state)
            if state in (CallState.FAILED, CallState.CANCELLED):
                self._shared.tree.drop_call(call_id)

    def call_settled(self, call_id: CallId, account: Account) -> None:
        """Report the final account of an aborted call, which exceeds that of its latest output."""
        with self._shared.lock:
            self._shared.graph.settle(call_id, account)

    # -- the end of programs whose end may not be reported

    def end_when_idle(self, timeout_s: float, on_abandoned: Callable[[], None]) -> None:
        """End the program as abandoned once nothing is reported of it, and no call is in flight, for `timeout_s`.

        An engine checks the programs that have made a call on it. A program without a call ends by `abandon` only.

        Args:
            timeout_s: seconds, above 0.
            on_abandoned: called when the program ends that way. It must not use the program.
        """
        with self._shared.lock:
            self._shared.idle_timeout_s = timeout_s
            self._shared.on_abandoned = on_abandoned

    @property
    def idle_timeout_s(self) -> float | None:
        """Seconds without a report after which the program ends; None: never."""
        return self._shared.idle_timeout_s

    @property
    def reports(self) -> int:
        """How many reports of runs and calls the program has got. The number grows while anything happens."""
        return self._shared.reports

    def abandon(self, reports: int) -> bool:
        """End the program as abandoned, unless it has got more than `reports` reports.

        Returns:
            Whether the program ended now.
        """
        with self._shared.lock:
            if self._shared.state is not ProgramState.IDLE or self._shared.reports != reports:
                return False
            self._shared.state = ProgramState.ABANDONED
            self._shared.on_abandoned()  # before a late call can find the program ended
            self._shared.on_abandoned = _nothing
        self._leave_backend(ProgramState.ABANDONED)
        return True

    # -- start, state and end

    def bind(self, backend: Backend) -> None:
        """Start the program's session on the engine of its first call. Later calls must use the same engine.

        Raises:
            ProgramEndedError: the program has ended.
            ProgramEngineError: the program runs on another engine.
        """
        with self._shared.lock:
            self._check_running()
            if self._shared.backend is backend:
                return
            if self._shared.backend is not None:
                raise ProgramEngineError(self.program_id, self.name)
            backend.start_session(self._shared.info)
            self._shared.backend = backend

    def _check_running(self) -> None:
        if self._shared.state is not ProgramState.IDLE:
            raise ProgramEndedError(self.program_id, self.name)

    @property
    def parent_program_id(self) -> ProgramId | None:
        """The id of the program inside one of whose runs this program runs; None: there is none."""
        return self._shared.info.parent_program_id

    @property
    def is_branch(self) -> bool:
        """Whether this handle stands for a branch, not for the whole program."""
        return self._anchor is not ROOT

    @property
    def state(self) -> ProgramState:
        """Idle or active while the program runs, then the state in which it ended."""
        if self._shared.state is not ProgramState.IDLE:  # its row is about to leave the table, or has left
            return self._shared.state
        row = self.row
        return row.state if row is not None else ProgramState.IDLE

    @property
    def row(self) -> ProgramRow | None:
        """The program's row in the process table, after its end the last row. None before the first call."""
        with self._shared.lock:
            if self._shared.backend is None:
                return None
            return self._shared.last_row or self._shared.backend.row(self.program_id)

    @property
    def graph(self) -> ProgramGraph:
        """The calls so far as a graph: threads, forks, joins, interceptions, critical path. Readable after the end."""
        return self._shared.graph

    @property
    def attained(self) -> Attained:
        """Service and wait so far, in seconds."""
        row = self.row  # read once, because the row disappears when the program ends
        return row.attained if row is not None else Attained()

    def end(self, state: ProgramState = ProgramState.FINISHED) -> None:
        """End the program, or this branch of it. Ending twice changes nothing.

        The program's calls in flight are aborted in the engine, and its row leaves the table.
        """
        if self.is_branch:
            self.end_run(self._anchor)
            return
        with self._shared.lock:
            if self._shared.state is not ProgramState.IDLE:
                return
            self._shared.state = state
            self._shared.on_abandoned = _nothing  # it may refer to the program
        self._leave_backend(state)

    def _leave_backend(self, state: ProgramState) -> None:
        self._shared.opened_in = None  # so that a chain of programs, each opened by the one before, is not kept
        backend = self._shared.backend
        if backend is not None:
            self._shared.last_row = backend.end_session(self.program_id, state)
        self.log.debug("program ended", state=str(state))

    def end_with(self, error: BaseException | None) -> None:
        """End the program in the state of an entrypoint that returned (None) or raised `error`."""
        if error is None:
            self.end(ProgramState.FINISHED)
        elif isinstance(error, Exception):
            self.end(ProgramState.FAILED)
        else:  # CancelledError, GeneratorExit or KeyboardInterrupt: the result is not wanted any more
            self.end(ProgramState.CANCELLED)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_block(error)

    async def __aenter__(self) -> Program:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave_block(error)

    def _leave_block(self, error: BaseException | None) -> None:
        self.end_with(error)
        if error is None and not self.is_branch and not self._shared.has_called:
            warn_of_no_call(self.name, self.log)

    # -- what terminals and notebooks show

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        del console, options
        row = self.row
        if row is not None:
            yield row
            yield ""
        yield self.graph

    def __str__(self) -> str:
        row = self.row
        return f"{row}\n\n{self.graph}" if row is not None else str(self.graph)

    def _repr_html_(self) -> str:
        row = self.row
        return (row._repr_html_() if row is not None else "") + self.graph.to_svg()

    def __repr__(self) -> str:
        return f"<weft.Program {self.name!r} {self.program_id}{' branch' if self.is_branch else ''} {self.state}>"
