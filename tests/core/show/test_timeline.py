"""The timeline of a program: its lanes, bars, tools and critical path, made from its graph."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_parts import run, think_and_sum

from weft.core.accounts import MOST_WAITS, Account
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, CallState, ProgramGraph
from weft.core.show import Gap, Lane, Path, Span, TimelineTool, timeline
from weft.core.show import program_timeline as make
from weft.core.show.program_timeline import Live, ToolRun, rows


def empty() -> ProgramGraph:
    return ProgramGraph(ProgramId("prog-1"), SessionId("sess-1"), "answer")


def test_a_thread_is_a_lane_and_times_count_from_the_start() -> None:
    """Lanes are in the order of their first calls, and the clock of the engine does not show."""
    made = timeline(think_and_sum(), start_s=99.0, end_s=117.0)
    assert made.lanes == (Lane("t0", 1), Lane("t1", 1))
    assert [(call.call_id, call.lane, call.start_s, call.end_s) for call in made.calls] == [
        ("think", 0, 1.0, 5.0),
        ("search", 0, 6.0, 10.0),
        ("compute", 1, 5.0, 13.0),
        ("sum", 0, 13.0, 17.0),
    ]
    assert (made.length_s, made.is_open, made.calls[0].replica) == (18.0, False, "engine-1")


def test_the_critical_path_is_that_of_the_graph() -> None:
    """Its calls are marked; its service and its wait are their sums."""
    graph = think_and_sum()
    made = timeline(graph)
    assert made.critical_path == Path(12.0, 4.0, graph.critical_path().calls)
    assert [call.call_id for call in made.calls if call.is_critical] == ["think", "compute", "sum"]


def test_a_wait_comes_before_the_service() -> None:
    """A call that was never stopped has waited at first; what is left of its bar is neither."""
    graph = empty()
    run(graph, "a", (0.0, 10.0), account=Account(5.0, 3.0))
    (call,) = timeline(graph).calls
    assert (call.waits, call.services, call.is_placed) == ((Span(0.0, 3.0),), (Span(3.0, 8.0),), True)


def test_waits_are_where_the_scheduler_says() -> None:
    """Service fills the time between them, up to its sum."""
    graph = empty()
    waits = ((0.0, 1.0), (3.0, 2.0), (6.0, 1.0))
    run(graph, "a", (0.0, 10.0), account=Account(5.0, 4.0, preemptions=2, waits=waits))
    (call,) = timeline(graph).calls
    assert call.waits == (Span(0.0, 1.0), Span(3.0, 5.0), Span(6.0, 7.0))
    assert call.services == (Span(1.0, 3.0), Span(5.0, 6.0), Span(7.0, 9.0))
    assert call.is_placed


def test_a_call_that_moved_says_where_it_was() -> None:
    """It ended on one replica, and another had it first. The file of the graph has both."""
    graph = empty()
    graph.open(CallNode(CallId("a"), ThreadId("t0")))
    graph.arrive(CallId("a"), 0.0)
    engines = (EngineId("engine-2"), (EngineId("engine-0"), EngineId("engine-1")))
    graph.leave(CallId("a"), 1.0, Account(), CallState.FINISHED, engine_id=engines[0], earlier_engine_ids=engines[1])
    for each in (graph, ProgramGraph.from_json(graph.to_json())):
        (call,) = timeline(each).calls
        assert (call.replica, call.earlier_replicas) == engines


@pytest.mark.parametrize("waits", [(), ((0.0, 1.0), (3.0, 1.0))])
def test_a_call_says_whether_all_of_its_waits_are_placed(waits: tuple[tuple[float, float], ...]) -> None:
    """A preempted call of which only sums, or only some waits, are known is not."""
    graph = empty()
    run(graph, "a", (0.0, 10.0), account=Account(5.0, 4.0, preemptions=2, waits=waits))
    assert not timeline(graph).calls[0].is_placed


@given(
    st.floats(0, 20),
    st.floats(0, 20),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), max_size=MOST_WAITS),
    st.floats(0, 10),
)
def test_pieces_of_a_call_lie_in_its_bar_and_apart(
    service_s: float, wait_s: float, waits: list[tuple[float, float]], took_s: float
) -> None:
    """Whatever a scheduler reports, with a clock of its own."""
    graph = empty()
    run(graph, "a", (5.0, 5.0 + took_s), account=Account(service_s, wait_s, 1, waits=tuple(waits)))
    (call,) = timeline(graph, start_s=5.0).calls
    assert call.end_s is not None
    pieces = sorted((*call.waits, *call.services))
    assert all(0 <= piece.start_s < piece.end_s <= call.end_s for piece in pieces)
    assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(pieces))


def test_a_call_in_flight_has_no_end_yet() -> None:
    """Its bar reaches until now, with the account of its latest output and the replica that it is on."""
    graph = empty()
    graph.open(CallNode(CallId("a"), ThreadId("t0")))
    graph.arrive(CallId("a"), 10.0)
    live = {CallId("a"): Live(Account(1.0, 2.0, output_tokens=7), EngineId("engine-2"))}
    made = timeline(graph, now_s=14.0, live=live)
    (call,) = made.calls
    assert (call.end_s, call.state, call.replica, call.output_tokens) == (None, "running", "engine-2", 7)
    assert (call.waits, call.services) == ((Span(0.0, 2.0),), (Span(2.0, 3.0),))
    assert (made.length_s, made.is_open) == (4.0, True)


def test_calls_of_a_thread_that_overlap_have_rows() -> None:
    """No bar hides another."""
    graph = empty()
    for name, span in {"a": (0.0, 4.0), "b": (1.0, 2.0), "c": (2.0, 3.0), "d": (4.0, 5.0)}.items():
        run(graph, name, span)
    made = timeline(graph)
    assert [call.row for call in made.calls] == [0, 1, 1, 0]
    assert made.lanes == (Lane("t0", 2),)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5))))
def test_spans_of_a_row_do_not_overlap(pairs: list[tuple[int, int]]) -> None:
    """And no row is empty."""
    spans = sorted((start_s, start_s + length_s) for start_s, length_s in pairs)
    found = rows(spans)
    for row in set(found):
        members = [span for span, number in zip(spans, found, strict=True) if number == row]
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(members))
    assert set(found) == set(range(len(set(found))))


def test_tools_have_rows_and_gaps_are_between_calls() -> None:
    """Runs that overlap are in different rows. A run without an end still runs."""
    runs = [ToolRun("web", 104.0, 105.0), ToolRun("sql", 104.5, 106.0), ToolRun("web", 105.0)]
    made = timeline(think_and_sum(), tools=runs)
    assert made.tools == (
        TimelineTool("web", 0, 4.0, 5.0),
        TimelineTool("sql", 1, 4.5, 6.0),
        TimelineTool("web", 0, 5.0, None),
    )
    assert made.gaps == (Gap("search", 4.0, 5.0, ("web",)),)


def test_tools_that_only_the_graph_names_run_between_calls() -> None:
    """A framework that reports no runs of tools has named them with the call that follows."""
    assert timeline(think_and_sum()).tools == (TimelineTool("web", 0, 4.0, 5.0),)


def test_a_pause_without_a_tool_and_a_tool_without_a_pause_are_no_bars() -> None:
    """Nobody has said what filled the pause, and a tool that took no time has no length."""
    graph = empty()
    run(graph, "a", (0.0, 1.0))
    run(graph, "b", (3.0, 4.0), "a")
    run(graph, "c", (4.0, 5.0), "b", tools=("web",))
    assert timeline(graph).tools == ()


def test_a_timeline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the newest calls and tools, says how many are left out, and cuts names."""
    monkeypatch.setattr(make, "MOST_CALLS", 2)
    monkeypatch.setattr(make, "MOST_TOOLS", 1)
    graph = think_and_sum()
    graph.open(CallNode(CallId("refused"), ThreadId("t0"), label="x"))
    made = timeline(graph, tools=[ToolRun("t" * 1000, 1.0, 2.0), ToolRun("u" * 1000, 2.0, 3.0)], tools_forgotten=3)
    assert [call.call_id for call in made.calls] == ["compute", "sum"]
    assert (made.calls_left_out, made.tools_left_out) == (3, 4)
    assert [tool.name for tool in made.tools] == ["u" * make.MOST_LETTERS]


def test_the_document_is_json() -> None:
    """With its format and version, and spans as pairs."""
    data = json.loads(json.dumps(timeline(think_and_sum()).to_dict()))
    assert (data["format"], data["version"], data["program_id"]) == ("weft.timeline", 1, "prog-1")
    assert data["calls"][0]["waits"] == [[0.0, 1.0]]
    assert json.dumps(timeline(empty()).to_dict())


def test_the_scope_of_a_client_is_left_out_of_ids() -> None:
    """A server puts it before all ids that clients choose; no client gets to see it."""
    graph = ProgramGraph(ProgramId("key/prog"), SessionId("key/sess"), "answer", ProgramId("key/outer"))
    run(graph, "key/a", (0.0, 1.0), thread="key/t")
    run(graph, "key/b", (2.0, 3.0), "key/a", thread="key/t")
    assert "key/" not in json.dumps(timeline(graph, scope="key/").to_dict()).replace("label of key/", "")
