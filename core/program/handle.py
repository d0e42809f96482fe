"""A program: one run of an agent entrypoint, and the handle that identifies it.

Identity is passed explicitly, never looked up: `@program` opens a `Program` and passes it to the entrypoint as an
argument. The entrypoint passes it on to a framework as `program.config()`, or to a client bound to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, TypedDict, cast
from uuid import UUID

from structlog.stdlib import BoundLogger

from weft.core.accounts import Attained
from weft.core.errors import ProgramEngineError
from weft.core.ids import IdSource, ProgramId, SessionId, check_id, plain_name
from weft.core.log import get_logger
from weft.core.prediction import read_static_graph
from weft.core.process_rows import ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import ProgramGraph
from weft.core.program.reports import ReportedProgram
from weft.core.program.run_tree import ROOT
from weft.core.program.runs import RunKind
from weft.core.program.state import Backend, SharedState, nothing
from weft.core.program.surroundings import positions
from weft.core.program.tasks import running_task
from weft.core.program.unused import warn_of_no_call
from weft.core.routing.admission import check_timeout

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


class RunConfig(TypedDict, total=False):
    """LangChain's `RunnableConfig`, as type checkers compare it: by the names and types of its entries."""

    tags: list[str]
    metadata: dict[str, Any]
    callbacks: Any
    run_name: str
    max_concurrency: int | None
    recursion_limit: int
    configurable: dict[str, Any]
    run_id: UUID | None


class Program(ReportedProgram):
    """One run of an agent entrypoint, or a branch of it.

    `@weft.program` makes a program for each call of a function. Without a function, open one in a `with` block::

        with weft.Program(name="nightly") as program:
            model.invoke("...", config=program.config())

    Args:
        name: shown in the process table.
        session_id: the session that the program belongs to. Default: a new session.
        tenant: the user or customer that the program runs for.
        timeout_s: seconds that the program may take from its first call on. Then its calls are aborted and raise
            `DeadlineError`. Default: that of the engine.
        deadline_s: seconds from its first call on after which the program should have ended. Policies such as `fair`
            try to keep it. Nothing is aborted.
        tags: shown in traces and passed to the framework.
        metadata: shown in traces and passed to the framework.
        graph: the steps that the program may take, for forecasts before 30 programs of its name have ended: a compiled
            LangGraph graph, or the `DiGraph` of an AutoGen GraphFlow. Its nodes are matched with the labels of calls.
        ids: makes the ids. Default: random ids.

    Attributes:
        program_id: the id of this run.
        session_id: the id of the session.
        name, tenant, timeout_s, deadline_s, tags, metadata: the arguments.
        parent_program_id: the id of the program inside one of whose runs this program was opened, or None.
        log: a structlog logger with the program's name and id and the session's id bound.

    Raises:
        InvalidIdError: `session_id` or `tenant` cannot travel with a request.
        InvalidRequestError: `timeout_s` or `deadline_s` is not a finite number above 0.
        ArgumentTypeError: `graph` is no such graph, or has more than 255 nodes.
    """

    def __init__(
        self,
        name: str = "program",
        *,
        session_id: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, Any] | None = None,
        graph: Any = None,
        ids: IdSource | None = None,
    ) -> None:
        ids = ids or IdSource()
        info = ProgramInfo(
            program_id=ids.program(),
            session_id=SessionId(check_id(session_id, "session_id")) if session_id is not None else ids.session(),
            name=plain_name(name),
            tenant=check_id(tenant, "tenant") if tenant is not None else None,
            timeout_s=check_timeout(timeout_s, "timeout_s"),
            deadline_s=check_timeout(deadline_s, "deadline_s"),
            tags=tuple(map(plain_name, (tags,) if isinstance(tags, str) else tags)),
            metadata=MappingProxyType(dict(metadata or {})),
            graph=read_static_graph(graph) if graph is not None else None,
            scope=ids.scope,
        )
        self._set_up(SharedState(info, ids), (ROOT,), ROOT)
        self._enclosing_run()

    def _set_up(self, shared: SharedState, anchors: tuple[Hashable, ...], own_anchor: Hashable) -> None:
        self._shared = shared
        self._anchors = anchors
        self._own_anchor = own_anchor
        self._thread = threading.current_thread()
        self._adapted: dict[str, Any] = {}  # by framework
        self.program_id = shared.info.program_id
        self.session_id = shared.info.session_id
        self.name = shared.info.name
        self.tenant = shared.info.tenant
        self.timeout_s = shared.info.timeout_s
        self.deadline_s = shared.info.deadline_s
        self.tags = shared.info.tags
        self.metadata = shared.info.metadata
        shown = shared.info.shown
        self.log: BoundLogger = get_logger().bind(
            program=self.name, program_id=shown(self.program_id), session_id=shown(self.session_id)
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

    def passed_on(self) -> Program:
        """Return the handle for code that may run elsewhere, such as a worker that gets it by a queue.

        Inside a run of this handle it is a handle that remembers the run: calls that are made elsewhere with it are in
        the run. Calls that are made in a run, such as the next one, are in that one.
        """
        run = self._run_around(positions())
        with self._shared.lock:
            if run is None or run == self._anchor or not self._shared.tree.is_inside(run, self._anchor):
                return self
        handle = object.__new__(Program)
        handle._set_up(self._shared, (run, *self._anchors), self._own_anchor)
        return handle

    def framework_state(self, framework: str, make: Callable[[], Any]) -> Any:
        """Return what a framework's adapters of all handles of this program share; `make` makes it at first."""
        with self._shared.lock:
            return self._shared.framework_states.setdefault(framework, make())

    @property
    def callbacks(self) -> list[Any]:
        """LangChain callbacks that carry this program, for `config={"callbacks": program.callbacks}`.

        They remember the run in which they are made, for code that is given them elsewhere, such as a worker.

        Raises:
            LookupError: `weft.integrations.langchain` has not been imported.
        """
        return [self.passed_on().adapter("langchain")]

    def config(self, **extra: Any) -> RunConfig:
        """Return a LangChain `RunnableConfig` that carries this program.

        Args:
            **extra: further entries, e.g. `recursion_limit=50`. `callbacks` (a list), `tags` and `metadata` are added
                to the program's own.

        Raises:
            LookupError: `weft.integrations.langchain` has not been imported.
        """
        ids = {"session_id": self.session_id, "program_id": self.program_id}
        config: dict[str, Any] = {
            **extra,
            "callbacks": [*self.callbacks, *(extra.get("callbacks") or ())],
            "tags": [*self.tags, *(extra.get("tags") or ())],
            "metadata": {**self.metadata, **(extra.get("metadata") or {}), **ids},
        }
        return cast("RunConfig", config)

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
            place = self._place(run)
            self._shared.tree.start(
                anchor,
                place.parent,
                place.anchor,
                RunKind.BRANCH,
                is_certain=place.is_certain,
                is_late=place.is_late,
                task_around=running_task(),
            )
            branch._set_up(self._shared, (anchor, *self._anchors), anchor)
            return branch

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

    @property
    def parent_program_id(self) -> ProgramId | None:
        """The id of the program inside one of whose runs this program runs; None: there is none."""
        return self._shared.info.parent_program_id

    @property
    def is_branch(self) -> bool:
        """Whether this handle stands for a branch, not for the whole program."""
        return self._own_anchor is not ROOT

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
            self.end_run(self._own_anchor)
            return
        with self._shared.lock:
            if self._shared.state is not ProgramState.IDLE:
                return
            self._shared.state = state
            self._shared.on_abandoned = nothing  # it may refer to the program
        self._leave_backend(state)

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
