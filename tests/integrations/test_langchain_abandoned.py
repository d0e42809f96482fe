"""Programs of root runs that nobody waits for: whatever LangChain reports of them, they end and leave nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Collection, Hashable
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import AIMessage, HumanMessage, ToolCall
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from observers import EndedPrograms
from polling import until

import weft
from weft.core.accounts import Account
from weft.core.errors import InvalidRequestError
from weft.core.ids import EngineId, ProgramId
from weft.core.process_rows import CallRow, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.program.structure.lineage import NOTHING
from weft.core.testing import FakeClock
from weft.engine.host.backend import Sessions
from weft.engine.host.idle_checks import IdleChecks
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

TIMEOUT_S = 600.0


class Loop:
    """An event loop that never runs: the test calls `check` itself."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Nothing."""


class Backend:
    """A front end without a model, with its real sessions, process table and checks of idle programs."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.table = ProcessTable()
        self.sessions = Sessions()
        self.idle = IdleChecks(Loop(), self.table, self.clock)  # type: ignore[arg-type]  # has all that is used

    def start_session(self, info: ProgramInfo) -> None:
        self.table.open(info, self.clock())
        self.sessions.begin(info)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        self.idle.discard(program_id)
        row = self.table.close(program_id, state, self.clock())
        if row is not None:
            self.sessions.end(row.info)
        return row

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None: ...

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None: ...

    def call_announced(self, program_id: ProgramId) -> None: ...

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        return self.table.get(program_id)

    def begin(self, handler: ProgramCallbackHandler, run_id: UUID) -> tuple[Program, CallRow]:
        """A model run makes its call."""
        program, identity = handler.start_call(run_id, "chat", NOTHING)
        program.reports.bind(self)
        self.idle.watch(program)
        row, _ = self.table.arrive(identity, EngineId("e"), self.clock())
        program.reports.call_arrived(identity.call_id, self.clock())
        return program, row

    def finish(self, program: Program, row: CallRow) -> None:
        """The call has its answer."""
        row.account = Account(1.0)
        self.table.leave(row, self.clock())
        program.reports.call_left(row.identity.call_id, self.clock(), row.account, CallState.FINISHED)
        program.reports.end_call("run", row.identity)

    def call(self, handler: ProgramCallbackHandler, parent: UUID | None) -> Program:
        """A whole model run inside `parent`."""
        run_id = uuid4()
        handler.on_chat_model_start({}, [], run_id=run_id, parent_run_id=parent, name="ChatWeft")  # type: ignore[attr-defined]
        program, row = self.begin(handler, run_id)
        self.finish(program, row)
        handler.on_llm_end(None, run_id=run_id)  # type: ignore[arg-type]
        return program

    def pass_time(self, seconds: float) -> None:
        """The clock advances, and the engine checks as often as it would."""
        for _ in range(4):
            self.clock.advance(seconds / 4)
            self.idle.check()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def handler(backend: Backend) -> ProgramCallbackHandler:
    """A handler on the backend's clock."""
    handler = ProgramCallbackHandler(idle_timeout_s=TIMEOUT_S)
    handler._root_runs._clock = backend.clock
    handler._root_runs._checked_s = 0.0
    return handler


def start(handler: ProgramCallbackHandler, name: str, parent: UUID | None = None, **metadata: Any) -> UUID:
    """A run starts."""
    run_id = uuid4()
    handler.on_chain_start({}, {}, run_id=run_id, parent_run_id=parent, name=name, metadata=metadata)  # type: ignore[attr-defined]
    return run_id


def states(backend: Backend) -> list[str]:
    return [str(row.state) for row in backend.table.ended()]


# -- what LangChain reports


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), ValueError()])
def test_a_root_run_that_fails_ends_its_program_although_a_tool_in_it_is_open(
    backend: Backend, handler: ProgramCallbackHandler, error: BaseException
) -> None:
    """LangChain reports no end of a cancelled tool, so the program must not wait for it."""
    root = start(handler, "agent")
    backend.call(handler, root)
    tool_run = start(handler, "tool", root)
    handler.on_chain_error(error, run_id=root)
    assert states(backend) == ["failed" if isinstance(error, ValueError) else "cancelled"]
    assert (len(backend.table), backend.sessions.snapshot()) == (0, {})
    assert (len(handler._root_runs), len(handler._open_runs)) == (0, 0)
    handler.on_tool_error(error, run_id=tool_run)  # some LangChain version might report it after all


def test_a_run_that_outlives_its_root_run_keeps_the_program(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """Code may start a task that goes on when the root run has returned. Its calls belong to the program."""
    root = start(handler, "agent")
    task = start(handler, "task", root)
    handler.on_chain_end({}, run_id=root)
    program = backend.call(handler, task)
    assert len(backend.table) == 1
    handler.on_chain_end({}, run_id=task)
    assert str(program.state) == "finished"


def test_the_last_run_says_how_its_program_ended(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """LangChain reports the normal end of a sync stream that is left. Only the model run, which ends last, tells."""
    root = start(handler, "stream")
    backend.call(handler, root)
    last = start(handler, "model", root)
    handler.on_chain_end({}, run_id=root)
    handler.on_chain_error(GeneratorExit(), run_id=last)
    assert states(backend) == ["cancelled"]


# -- the time-out


def test_a_program_that_nothing_is_reported_of_ends_as_abandoned(
    backend: Backend, handler: ProgramCallbackHandler
) -> None:
    """It keeps its row as long as anything happens in it. Then the row moves to those that have ended."""
    root = start(handler, "agent")
    backend.call(handler, root)
    for _ in range(5):
        backend.pass_time(0.9 * TIMEOUT_S)
        run_id = start(handler, "tool", root)
    assert len(backend.table) == 1
    backend.pass_time(2 * TIMEOUT_S)
    (row,) = backend.table.ended()
    assert (row.info.name, str(row.state), row.calls) == ("agent", "abandoned", 1)
    assert (backend.sessions.snapshot(), len(backend.idle)) == ({}, 0)
    assert (len(handler._root_runs), len(handler._open_runs)) == (0, 0)
    handler.on_tool_end("late", run_id=run_id)
    handler.on_chain_end({}, run_id=root)
    assert handler._root_runs._abandoned == {}


def test_a_call_in_flight_keeps_its_program(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """A call may take longer than the time-out, because it has limits of its own."""
    root = start(handler, "agent")
    program, row = backend.begin(handler, root)
    backend.pass_time(100 * TIMEOUT_S)
    assert str(program.state) == "active"
    backend.finish(program, row)
    backend.pass_time(0.9 * TIMEOUT_S)
    assert str(program.state) == "idle"
    backend.pass_time(TIMEOUT_S)
    assert str(program.state) == "abandoned"


def test_a_program_that_ended_as_the_engine_began_to_watch_it_is_not_kept(
    backend: Backend, handler: ProgramCallbackHandler
) -> None:
    """Another thread may end a program between the parts of its first call."""
    program = backend.call(handler, start(handler, "agent"))
    program.end()
    backend.idle.watch(program)
    assert len(backend.idle) == 1
    backend.pass_time(TIMEOUT_S)
    assert len(backend.idle) == 0
    assert str(program.state) == "finished"


def test_without_a_time_out_a_program_waits_for_ever(backend: Backend) -> None:
    """`idle_timeout_s=None` is for agents that wait for people."""
    handler = ProgramCallbackHandler(idle_timeout_s=None)
    program = backend.call(handler, start(handler, "agent"))
    backend.pass_time(1e9)
    assert str(program.state) == "idle"


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), "soon", True])
def test_a_time_out_that_makes_no_sense_is_refused(seconds: Any) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidRequestError, match="idle_timeout_s must be a number of seconds above 0"):
        ProgramCallbackHandler(idle_timeout_s=seconds)


def test_programs_without_a_call_end_when_other_root_runs_start(
    backend: Backend, handler: ProgramCallbackHandler
) -> None:
    """No engine knows them, so only the handler can forget them."""
    for _ in range(100):
        start(handler, "agent")
    for _ in range(6):
        backend.clock.advance(TIMEOUT_S / 2)
        last = start(handler, "agent")
    assert len(handler._root_runs) < 5
    assert handler._root_runs.program_of(last) is not None


# -- a call after the time-out


def test_a_late_call_goes_on_in_a_new_program_of_the_same_session(
    backend: Backend, handler: ProgramCallbackHandler, caplog: pytest.LogCaptureFixture
) -> None:
    """A person answers after twenty minutes. One warning names the parameter, and the run ends its new program."""
    root = start(handler, "agent", user="u1")
    first = backend.call(handler, root)
    tool_run = start(handler, "ask a person", root)
    backend.pass_time(2 * TIMEOUT_S)
    assert str(first.state) == "abandoned"
    second = backend.call(handler, tool_run)
    assert backend.call(handler, root) is second, "all runs of the root run go on there"
    assert second.program_id != first.program_id
    assert (second.name, second.session_id, second.metadata) == (first.name, first.session_id, first.metadata)
    assert caplog.text.count("idle_timeout_s") >= 1
    assert len([record for record in caplog.records if "timed out" in record.getMessage()]) == 1
    handler.on_tool_end("yes", run_id=tool_run)
    handler.on_chain_end({}, run_id=root)
    assert states(backend) == ["finished", "abandoned"]
    assert (len(handler._root_runs), handler._root_runs._abandoned) == (0, {})


def test_a_model_run_that_had_started_keeps_its_call(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """The program may time out between the start of a model run and its call, for example in a rate limiter."""
    root = start(handler, "agent")
    backend.call(handler, root)
    run_id = uuid4()
    handler.on_chat_model_start({}, [], run_id=run_id, parent_run_id=root, name="ChatWeft")  # type: ignore[attr-defined]
    backend.pass_time(2 * TIMEOUT_S)
    program, row = backend.begin(handler, run_id)
    assert program.name == "agent"
    backend.finish(program, row)


def test_a_call_at_the_very_moment_of_the_time_out_is_not_lost(
    backend: Backend, handler: ProgramCallbackHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler has found the program, the program times out, and only then the call starts."""
    root = start(handler, "agent")
    first = backend.call(handler, root)
    found, leave, late = handler.program_of, backend.end_session, list[Program]()

    def end_session(program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """The program has ended, and its row is still in the table."""
        with monkeypatch.context() as patch:
            patch.setattr(handler, "program_of", lambda run_id: first if run_id == root else found(run_id))
            program, row = backend.begin(handler, root)
        backend.finish(program, row)
        late.append(program)
        return leave(program_id, state)

    monkeypatch.setattr(backend, "end_session", end_session)
    backend.pass_time(2 * TIMEOUT_S)
    assert [program.name for program in late] == ["agent"]
    assert first not in late
    assert str(first.state) == "abandoned"


def test_a_program_that_ended_otherwise_takes_no_late_call(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """After a root run that failed, a run that goes on is a program of its own, as without a root run."""
    root = start(handler, "agent")
    backend.call(handler, root)
    handler.on_chain_error(ValueError(), run_id=root)
    assert backend.call(handler, root).name == "ChatWeft"


def test_what_is_kept_of_abandoned_programs_is_bounded(backend: Backend, handler: ProgramCallbackHandler) -> None:
    """The latest 1,000 runs can go on; older ones would begin a program of their own."""
    for _ in range(600):
        root = start(handler, "agent")
        backend.call(handler, root)
        tool_run = start(handler, "tool", root)
    backend.pass_time(2 * TIMEOUT_S)
    assert set(states(backend)) == {"abandoned"}
    assert len(handler._root_runs._abandoned) == 1000
    assert backend.call(handler, tool_run).name == "agent"


# -- everything at random


class Abandonment(RuleBasedStateMachine):
    """Root runs, runs, calls and ends in any order, of which any number may be missing."""

    runs: Bundle[UUID] = Bundle("runs")
    calls: Bundle[tuple[Program, CallRow]] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.backend = Backend()
        self.handler = ProgramCallbackHandler(idle_timeout_s=TIMEOUT_S)
        self.handler._root_runs._clock = self.backend.clock
        self.handler._root_runs._checked_s = 0.0
        self.open_calls: dict[str, Program] = {}
        self.active_s: dict[Program, float] = {}

    @rule(target=runs)
    def root(self) -> UUID:
        return start(self.handler, "root")

    @rule(target=runs, parent=runs)
    def child(self, parent: UUID) -> UUID:
        return start(self.handler, "child", parent)

    @rule(target=calls, run=runs)
    def begin(self, run: UUID) -> tuple[Program, CallRow]:
        program, row = self.backend.begin(self.handler, run)  # no call is ever refused
        self.open_calls[row.identity.call_id] = program
        self.active_s[program] = self.backend.clock()
        return program, row

    @rule(call=consumes(calls))
    def finish(self, call: tuple[Program, CallRow]) -> None:
        program, row = call
        self.backend.finish(program, row)
        self.open_calls.pop(row.identity.call_id)
        self.active_s[program] = self.backend.clock()

    @rule(run=consumes(runs), error=st.sampled_from([None, ValueError(), GeneratorExit()]))
    def end(self, run: UUID, error: BaseException | None) -> None:
        if error is None:
            self.handler.on_chain_end({}, run_id=run)
        else:
            self.handler.on_chain_error(error, run_id=run)

    @rule(parts=st.integers(1, 12))
    def pass_time(self, parts: int) -> None:
        for _ in range(parts):
            self.backend.clock.advance(TIMEOUT_S / 5)
            self.backend.idle.check()

    @invariant()
    def only_idle_programs_are_abandoned(self) -> None:
        self.backend.table.check_integrity()
        for program, active_s in self.active_s.items():
            if program.state is ProgramState.ABANDONED:
                row = program.row
                assert row is not None
                assert row.end_s - active_s >= TIMEOUT_S
                assert program not in self.open_calls.values()
        rows = {row.info.session_id for row in self.backend.table}
        assert self.backend.sessions.snapshot().keys() == rows

    def teardown(self) -> None:
        """Every answer comes; no run reports its end. After some time nothing is left."""
        for call_id, program in self.open_calls.items():
            row = program.row.active.get(call_id) if program.row is not None else None  # type: ignore[call-overload]
            if row is not None:
                self.backend.finish(program, row)
        for _ in range(4):
            self.backend.pass_time(TIMEOUT_S)
            last = start(self.handler, "root")
            self.handler.on_chain_end({}, run_id=last)
        assert (len(self.backend.table), self.backend.sessions.snapshot(), len(self.backend.idle)) == (0, {}, 0)
        roots = self.handler._root_runs
        assert (len(roots), len(self.handler._open_runs), len(roots._idle)) == (0, 0, 0)
        assert all(each.open_runs for each in roots._abandoned.values())


TestAbandonment = Abandonment.TestCase
TestAbandonment.settings = settings(max_examples=60, stateful_step_count=40)


# -- real streams on a real engine


def agent_with_a_slow_tool(model: ChatWeft, in_tool: list[str]) -> Any:
    """A graph that calls the model and then a tool that never returns, and that notes its calls."""

    @tool
    async def slow(question: str) -> str:
        """Never answers."""
        in_tool.append(question)
        await asyncio.Event().wait()
        return question

    async def ask(state: MessagesState) -> dict[str, Any]:
        answer = await model.ainvoke(state["messages"])
        call = ToolCall(name="slow", args={"question": answer.text}, id="1")
        return {"messages": [AIMessage("", tool_calls=[call])]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([slow]))
    return graph.add_edge(START, "ask").add_edge("ask", "tools").compile()


@pytest.mark.engine
@pytest.mark.anyio
@pytest.mark.parametrize("how", ["cancelled", "closed", "collected", "kept"])
async def test_a_hundred_clients_leave_during_a_tool(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """A server cancels the task, closes the stream, or drops it. None leaves a row, a session or an entry of the
    handler. Streams that are kept, but not read, end by the time-out."""
    ended, clients = EndedPrograms(engine), 100 if how != "kept" else 10
    handler = ProgramCallbackHandler(idle_timeout_s=TIMEOUT_S)
    in_tool: list[str] = []
    agent = agent_with_a_slow_tool(model.model_copy(update={"max_tokens": 2}), in_tool)

    def stream() -> Any:
        question = {"messages": [HumanMessage("Hello")]}
        return agent.astream(question, {"callbacks": [handler]}, stream_mode="updates")

    streams = [stream() for _ in range(clients)]
    await asyncio.gather(*map(anext, streams))
    assert (len(engine.table), len(engine.sessions)) == (clients, clients)
    if how in ("cancelled", "closed"):
        readers = [asyncio.ensure_future(anext(each)) for each in streams]
        await until(lambda: len(in_tool) == clients)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        if how == "closed":
            await asyncio.gather(*(each.aclose() for each in streams))
    elif how == "collected":
        streams.clear()
        gc.collect()
    else:
        clock = FakeClock(engine.now_s())
        engine.programs.idle._clock = clock
        try:
            for _ in range(2):
                await asyncio.wrap_future(engine._loop.submit(check(engine)))
                clock.advance(TIMEOUT_S)
            await asyncio.wrap_future(engine._loop.submit(check(engine)))
        finally:
            engine.programs.idle._clock = engine._options.clock
    await until(lambda: len(engine.table) == 0)
    assert engine.sessions == {}
    assert (len(handler._root_runs), len(handler._open_runs), len(engine.programs.idle)) == (0, 0, 0)
    assert {str(row.state) for row in ended.rows} == {"abandoned" if how == "kept" else "cancelled"}
    assert len(ended.rows) == clients
    await asyncio.gather(*(each.aclose() for each in streams))


async def check(engine: weft.Engine) -> None:
    engine.programs.idle.check()
