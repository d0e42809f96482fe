"""Branches of a program, and the graph of its calls."""

from __future__ import annotations

import pytest

from weft.core.accounts import Account, Attained
from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity, ProgramState
from weft.core.program import Program
from weft.core.program.graph import CallState, Edge, ProgramGraph
from weft.core.program.structure.lineage import Content
from weft.core.program.structure.runs import RunKind
from weft.core.testing import FakeClock, RecordingBackend

# -- branches


def test_branches_fork_threads_and_the_next_call_joins_them(backend: RecordingBackend) -> None:
    """The first calls of branches have the same parent and different threads; the next call comes after all."""
    with Program() as program:
        before = backend.call(program)
        with program.branch() as left, program.branch() as right:
            l1, r1 = backend.call(left), backend.call(right)
            l2, r2 = backend.call(left), backend.call(right)
        after = backend.call(program)
    assert l1.parents == r1.parents == (before.call_id,)
    assert (l2.parents, r2.parents) == ((l1.call_id,), (r1.call_id,))
    assert set(after.parents) == {l2.call_id, r2.call_id}
    assert before.thread_id == l1.thread_id == l2.thread_id == after.thread_id
    assert r1.thread_id == r2.thread_id != l1.thread_id
    assert {call.program_id for call in backend.calls} == {program.program_id}


def test_the_longest_of_parallel_branches_is_the_critical_path(backend: RecordingBackend) -> None:
    """Of concurrent branches, the longest counts for the critical path, and all count for the total."""
    with Program() as program:
        with program.branch() as left, program.branch() as right:
            for run in ("left", "right"):
                program.reports.start_run(run, None)
            calls = [backend.begin(left, "left"), backend.begin(right, "right")]
            backend.finish(left, "left", calls[0], Account(service_s=3.0))
            backend.finish(right, "right", calls[1], Account(service_s=5.0))
        assert program.attained == Attained(service_s=5.0, total_service_s=8.0)


@pytest.mark.parametrize("error", [None, ValueError("boom")])
def test_a_branch_does_not_end_its_program(backend: RecordingBackend, error: Exception | None) -> None:
    """After any end of a branch, the program continues, and its next call comes after the branch's calls."""
    program = Program()

    def part() -> None:
        with program.branch() as branch:
            assert branch.is_branch
            assert not program.is_branch
            backend.call(branch)
            if error is not None:
                raise error

    if error is None:
        part()
    else:
        with pytest.raises(ValueError, match="boom"):
            part()
    assert program.state is ProgramState.IDLE
    assert backend.call(program).parents == (backend.calls[0].call_id,)
    assert backend.ended == []


def test_a_branch_is_the_same_program(backend: RecordingBackend) -> None:
    """A branch has the program's ids, options and row, and has ended when the program has ended."""
    program = Program("answer", session_id="s", tenant="t", tags=["a"], metadata={"k": 1})
    branch = program.branch()
    for name in ("program_id", "session_id", "name", "tenant", "tags", "metadata"):
        assert getattr(branch, name) == getattr(program, name)
    backend.call(branch, service_s=1.0)
    assert branch.row is program.row
    program.end()
    assert branch.state is ProgramState.FINISHED


def test_branches_of_branches(backend: RecordingBackend) -> None:
    """A branch inside a branch joins the outer branch."""
    with Program() as program:
        first = backend.call(program)
        with program.branch() as outer:
            o1 = backend.call(outer)
            with outer.branch() as inner:
                i1 = backend.call(inner)
            o2 = backend.call(outer)
        last = backend.call(program)
    chain = [first, o1, i1, o2, last]
    assert [call.parents for call in chain] == [(), *((call.call_id,) for call in chain[:-1])]


def test_unreported_runs_are_inside_their_handle(backend: RecordingBackend) -> None:
    """A call or run whose enclosing run is unknown is inside the branch whose handle reports it."""
    program = Program()
    first = backend.call(program)
    with program.branch() as branch:
        inside = backend.call(branch, parent="never reported")
        call = backend.begin(branch, "not started")
        backend.finish(branch, "not started", call, Account())
        branch.reports.end_run("not started")
        assert call.identity.parents == (inside.call_id,)
        outside = backend.call(program)
        assert outside.parents == (first.call_id,)
    assert set(backend.call(program).parents) == {call.identity.call_id, outside.call_id}


def test_runs_of_a_framework_nest(backend: RecordingBackend) -> None:
    """A call after a run of a framework comes after the last call inside the run."""
    program = Program()
    program.reports.start_run("chain", None)
    first, second = (backend.call(program, parent="chain") for _ in range(2))
    program.reports.end_run("chain")
    third = backend.call(program)
    assert (second.parents, third.parents) == ((first.call_id,), (second.call_id,))


# -- the graph


class Engine:
    """Makes the reports of an engine to a program; each call takes a given time."""

    def __init__(self) -> None:
        self.clock = FakeClock()

    def call(
        self, program: Program, run: str, inputs: Content, seconds: float, label: str | None = None
    ) -> CallIdentity:
        """Make a whole call, whose output is a message with the id of the run."""
        identity = program.reports.start_call(run, inputs, label=label)
        program.reports.call_arrived(identity.call_id, self.clock())
        self.clock.advance(seconds)
        program.reports.call_left(identity.call_id, self.clock(), Account(service_s=seconds), CallState.FINISHED)
        program.reports.end_call(run, identity, Content(ids=(run,)))
        program.reports.end_run(run)
        return identity


def test_the_graph_of_a_program() -> None:
    """The graph has the calls with labels, parents, times and accounts, and the names of the tools in between."""
    engine = Engine()
    with Program("answer") as program:
        think = engine.call(program, "think", Content(), 1.0, label="planner")
        program.reports.start_run("search", None)
        program.reports.note_tool("search", "web")
        engine.clock.advance(0.5)
        program.reports.end_run("search")
        answer = engine.call(program, "answer", Content(ids=("think",)), 2.0)
        live = program.graph
    graph = program.graph
    assert graph is live, "the graph is still there after the end"
    first, second = graph.calls
    assert (first.call_id, first.thread_id, first.label) == (think.call_id, think.thread_id, "planner")
    assert (second.label, second.tools, second.parents) == ("", ("web",), (Edge(think.call_id, True),))
    assert (second.arrival_s, second.completion_s, second.state) == (1.5, 3.5, CallState.FINISHED)
    assert [(gap.duration_s, gap.tools) for gap in graph.interceptions] == [(0.5, ("web",))]
    assert graph.critical_path() == (3.0, (think.call_id, answer.call_id))
    assert (graph.program_id, graph.session_id, graph.name) == (program.program_id, program.session_id, "answer")
    assert ProgramGraph.from_json(graph.to_json()).calls == graph.calls


def test_a_long_program_folds_all_but_what_a_call_may_still_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a branch that is still open stays, however old it is, because the next one of the branch follows it."""
    monkeypatch.setattr("weft.core.program.graph.dag.KEEP_CALLS", 2500)
    engine, program = Engine(), Program()
    with program.branch() as slow:
        first = engine.call(slow, "first", Content(), 1.0)
        for number in range(2600):
            engine.call(program, f"run {number}", Content(), 1.0)
        second = engine.call(slow, "second", Content(), 1.0)
    assert second.parents == (first.call_id,)
    assert program.graph[second.call_id].parents == (Edge(first.call_id, True),)
    assert len(program.graph) + program.graph.folded.calls == 2602
    assert program.graph.folded.calls > 900


def test_guesses_are_marked_in_the_graph() -> None:
    """The edges of a call after two concurrent calls at the top are guesses, unless its input proves them."""
    for inputs, exact in ((Content(), False), (Content(ids=("x", "y")), True)):
        engine, program = Engine(), Program()
        calls = {run: program.reports.start_call(run) for run in ("x", "y")}
        for run, identity in calls.items():
            program.reports.end_call(run, identity, Content(ids=(run,)))
        join = engine.call(program, "join", inputs, 1.0)
        assert set(join.parents) == {identity.call_id for identity in calls.values()}
        assert {edge.exact for edge in program.graph[join.call_id].parents} == {exact}


def test_edges_from_branches_are_exact() -> None:
    """The call after branches comes after all of them, even if its input has the result of only one."""
    engine, program = Engine(), Program()
    with program.branch() as left, program.branch() as right:
        calls = [engine.call(branch, f"{branch is left}", Content(), 1.0) for branch in (left, right)]
    join = engine.call(program, "join", Content(ids=("True",)), 1.0)
    assert program.graph[join.call_id].parents == tuple(Edge(call.call_id, True) for call in calls)


def test_the_inputs_of_a_call_may_be_a_function() -> None:
    """The function is called only if the runs leave the parents in doubt."""
    engine, program = Engine(), Program()
    read: list[str] = []

    def inputs() -> Content:
        read.append("inputs")
        return Content(ids=("x",))

    program.reports.start_call("alone", inputs)
    assert read == []
    engine.call(program, "x", Content(), 1.0)
    program.reports.start_call("in doubt", inputs)
    assert read == ["inputs"]


@pytest.mark.parametrize("state", [CallState.FAILED, CallState.CANCELLED])
def test_a_call_that_failed_or_was_cancelled(state: CallState) -> None:
    """A retry of a call that failed, or that a time-out cancelled, has its parents and continues its thread."""
    engine, program = Engine(), Program()
    failed = program.reports.start_call("run", label="failed")
    program.reports.call_arrived(failed.call_id, 0.0)
    program.reports.call_left(failed.call_id, 1.0, Account(service_s=0.5), state)
    program.reports.call_settled(failed.call_id, Account(service_s=0.75))
    retry = engine.call(program, "retry", Content(), 1.0)
    assert retry.parents == ()
    assert len(program.graph.threads) == 1
    assert program.graph.calls[0].state is state
    assert program.graph.calls[0].service_s == 0.75
    assert [edge.exact for edge in program.graph[engine.call(program, "next", Content(), 1.0).call_id].parents] == [
        True
    ]


def test_a_call_may_leave_after_its_program_has_ended() -> None:
    """An aborted call leaves the engine after the end of its program, and the graph still gets its account."""
    program = Program()
    identity = program.reports.start_call("run")
    program.reports.call_arrived(identity.call_id, 0.0)
    program.end(ProgramState.CANCELLED)
    program.reports.call_left(identity.call_id, 1.0, Account(service_s=1.0), CallState.CANCELLED)
    assert program.graph[identity.call_id].state is CallState.CANCELLED
    assert program.graph.critical_path().calls == (identity.call_id,)
    program.reports.call_left(CallId("unknown"), 1.0, Account(), CallState.CANCELLED)


def test_frameworks_may_state_the_kind_of_a_run() -> None:
    """The next call comes after all runs that a framework starts concurrently, without guesses."""
    engine, program = Engine(), Program()
    for run in ("x", "y"):
        program.reports.start_run(run, None, RunKind.STAGE)
    calls = [engine.call(program, run, Content(), 1.0) for run in ("x", "y")]
    join = engine.call(program, "join", Content(), 1.0)
    assert program.graph[join.call_id].parents == tuple(Edge(call.call_id, True) for call in calls)
