"""The Perfetto trace keeps the rules of the JSON trace event format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from perfetto_rules import check
from timeline_parts import run, think_and_sum

from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.program.graph import CallNode, ProgramGraph
from weft.core.show import timeline
from weft.core.show.perfetto import perfetto
from weft.core.show.program_timeline import ToolRun


def test_a_program_is_a_process_with_its_threads() -> None:
    """The critical path and the tools have threads of their own, above those of the calls."""
    trace = perfetto([(timeline(think_and_sum()), 0.0)])
    check(trace)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == ["critical path", "tools", "thread 1", "thread 2"]
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert (1, "label of compute", 4_000_000, 8_000_000) in slices
    assert (2, "web", 4_000_000, 1_000_000) in slices
    assert (1000, "wait", 0, 1_000_000) in slices
    assert (1000, "service", 1_000_000, 3_000_000) in slices


def test_programs_begin_when_they_arrived() -> None:
    """Each is a process, and its start shifts its slices."""
    trace = perfetto([(timeline(think_and_sum()), 0.0), (timeline(think_and_sum()), 2.5)])
    check(trace)
    starts = [e["ts"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert min(starts) == 2_500_000


def test_a_preempted_call_says_when_it_stopped() -> None:
    """An instant event is at the beginning of each wait after the first."""
    graph = ProgramGraph(ProgramId("p"), SessionId("s"), "p")
    run(graph, "a", (0.0, 9.0), account=Account(4.0, 4.0, 2, waits=((0.0, 1.0), (3.0, 2.0), (6.0, 1.0))))
    trace = perfetto([(timeline(graph), 0.0)])
    check(trace)
    assert [e["ts"] for e in trace["traceEvents"] if e["ph"] == "i"] == [3_000_000, 6_000_000]


def test_a_sum_that_is_drawn_first_says_so() -> None:
    """A note stands with a call whose waits are not known."""
    graph = ProgramGraph(ProgramId("p"), SessionId("s"), "p")
    run(graph, "a", (0.0, 9.0), account=Account(4.0, 4.0, 2))
    (call,) = (e for e in perfetto([(timeline(graph), 0.0)])["traceEvents"] if e.get("cat", "").startswith("call"))
    assert "only the sums are known" in call["args"]["note"]


times = st.floats(0, 1e5, allow_nan=False)


@given(st.lists(st.tuples(times, times, times, times, st.booleans(), st.sampled_from("abc")), max_size=8), times)
def test_any_program_makes_a_valid_trace(
    calls: list[tuple[float, float, float, float, bool, str]], offset_s: float
) -> None:
    """Calls overlap, end at once, wait and are served longer than they took, or have not ended."""
    graph = ProgramGraph(ProgramId("p"), SessionId("s"), "p\ud800<b>")
    for number, (start_s, took_s, service_s, wait_s, has_ended, thread) in enumerate(sorted(calls)):
        parents = " ".join(f"c{other}" for other in range(max(0, number - 2), number))
        waits = ((0.0, wait_s / 2), (took_s / 2, wait_s / 2))
        account = Account(service_s, wait_s, 1, waits=waits)
        if has_ended:
            run(graph, f"c{number}", (start_s, start_s + took_s), parents, thread, account)
        else:
            graph.open(CallNode(CallId(f"c{number}"), ThreadId(thread)))
            graph.arrive(CallId(f"c{number}"), start_s)
    now_s = max((start_s + took_s for start_s, took_s, *_ in calls), default=0.0)
    tools = [ToolRun("web", start_s, end_s) for start_s, end_s in [(now_s, None), (0.0, math.nextafter(1.0, 2.0))]]
    check(perfetto([(timeline(graph, start_s=0.0, now_s=now_s, tools=tools), offset_s)]))
