"""A program: one run of an agent entrypoint, and the handle that identifies it.

Identity is passed explicitly, never looked up: `@program` opens a `Program` and passes it to the entrypoint as an
argument. The entrypoint passes it on to a framework as `program.config()`, or to a client bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, TypedDict, cast
from uuid import UUID

from structlog.stdlib import BoundLogger

from weft.core.accounts import Attained
from weft.core.ids import IdSource, ProgramId, SessionId, check_id, plain_name
from weft.core.prediction import read_static_graph
from weft.core.process_rows import ProgramInfo, ProgramRow, ProgramState
from weft.core.program.graph import ProgramGraph
from weft.core.program.reports import Reports
from weft.core.program.state import SharedState
from weft.core.program.structure.run_tree import ROOT
from weft.core.routing.admission import check_timeout

# Adapters by framework, e.g. "langchain" -> handler class. An integration registers its adapter when it is imported, so
# that `program.config()` does not import a framework into core.
_adapters: dict[str, Callable[[Program], Any]] = {}
_MOST_NAMES: Final = 1000  # after which no further name is warned of

_warned: Final[set[str]] = set()


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


class Program:
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
        reports: what integrations and engines report of the program: runs, calls, tools.

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
        self._set_up(Reports(SharedState(info, ids), (ROOT,), ROOT))
        self.reports.enclosing_run()

    def _set_up(self, reports: Reports) -> None:
        info = reports.shared.info
        self.reports = reports
        self._shared = reports.shared
        self.program_id = info.program_id
        self.session_id = info.session_id
        self.name = info.name
        self.tenant = info.tenant
        self.timeout_s = info.timeout_s
        self.deadline_s = info.deadline_s
        self.tags = info.tags
        self.metadata = info.metadata
        self.log = reports.log

    @classmethod
    def _with(cls, reports: Reports) -> Program:
        """The handle that reports in this way."""
        handle = object.__new__(cls)
        handle._set_up(reports)
        return handle

    # -- passing the program to a framework

    @property
    def callbacks(self) -> list[Any]:
        """LangChain callbacks that carry this program, for `config={"callbacks": program.callbacks}`.

        They remember the run in which they are made, for code that is given them elsewhere, such as a worker.

        Raises:
            LookupError: `weft.integrations.langchain` has not been imported.
        """
        return [adapter(passed_on(self), "langchain")]

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

    def attach(self) -> AbstractContextManager[None]:
        """Let OpenTelemetry's spans that start in a `with` block, and those below them, be runs of the program.

        The global TracerProvider must have a `WeftSpanProcessor`. A task or thread that begins in the block and
        outlives it keeps the block in its context, as it keeps its current span.

        Raises:
            LookupError: `weft.integrations.otel` has not been imported.
        """
        block: AbstractContextManager[None] = adapter(self, "otel")()
        return block

    def branch(self) -> Program:
        """Return a handle for a part of the program that runs concurrently with other parts.

        Use it in `with` or `async with`. The calls under the handle form threads of their own. Calls that the program
        makes after the branch has ended come after the branch's calls. A branch that is opened inside a run of the
        program belongs to the run.
        """
        return self._with(self.reports.branch())

    def expect_call(self) -> None:
        """Announce the program's next call, which comes within seconds, so that the engine keeps its context or fetches
        it. A program that says so and makes no call costs other programs memory for half a minute.
        """
        backend = self._shared.backend
        if backend is not None:
            backend.call_announced(self.program_id)

    # -- start, state and end

    @property
    def parent_program_id(self) -> ProgramId | None:
        """The id of the program inside one of whose runs this program runs, if there is one."""
        return self._shared.info.parent_program_id

    @property
    def is_branch(self) -> bool:
        """Whether this handle stands for a branch, not for the whole program."""
        return self.reports.is_branch

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
        self.reports.end(state)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave_block(error)

    async def __aenter__(self) -> Program:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave_block(error)

    def _leave_block(self, error: BaseException | None) -> None:
        self.reports.end_with(error)
        if error is None and not self.is_branch and not self._shared.has_called:
            _warn_of_no_call(self.name, self.log)

    # -- what terminals and notebooks show

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
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


def adapter(program: Program, framework: str) -> Any:
    """Return the object that carries a handle into a framework, the same each time. Raises LookupError if
    `weft.integrations.<framework>` has not been imported."""
    with program.reports.shared.lock:
        if framework not in program.reports.adapted:
            if framework not in _adapters:
                raise LookupError(f"import weft.integrations.{framework} before passing a program to it")
            program.reports.adapted[framework] = _adapters[framework](program)
        return program.reports.adapted[framework]


def passed_on(program: Program) -> Program:
    """Return the handle for code that may run elsewhere, such as a worker that gets it by a queue.

    Inside a run of this handle it is a handle that remembers the run: calls that are made elsewhere with it are in
    the run. Calls that are made in a run, such as the next one, are in that one.
    """
    reports = program.reports.passed_on()
    return program if reports is None else Program._with(reports)  # noqa: SLF001  of this module


def _warn_of_no_call(name: str, log: BoundLogger) -> None:
    """Warn that a program ended without a call, once for each name."""
    if name in _warned or len(_warned) >= _MOST_NAMES:
        return
    _warned.add(name)
    log.warning(
        "the program ended without a call, so nothing was scheduled as part of it. Pass the program on to its models: "
        "config=program.config() with LangChain and LangGraph, client.bind(program) or bind_team(team, program) with "
        "AutoGen, openai_client(engine, program) with OpenAI's SDK. This is said once for each name of a program"
    )
