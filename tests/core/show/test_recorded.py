"""Timelines of recordings are those of the programs that were recorded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from timeline_parts import think_and_sum

from weft.core.errors import TraceError
from weft.core.show import timeline
from weft.core.show.recorded import recorded
from weft.core.trace.format import dump, from_graph, parse
from weft.core.trace.workloads import generate, poisson


def test_a_recording_has_the_timeline_of_its_program() -> None:
    """Lanes, bars, waits, services, gaps and the critical path; the ids of threads are numbers."""
    graph = think_and_sum()
    live = timeline(graph)
    made = recorded(parse(dump(from_graph(graph)), "here"))
    assert {call.call_id: replace(call, lane=0) for call in made.calls} == {
        call.call_id: replace(call, lane=0) for call in live.calls
    }
    assert set(made.gaps) == set(live.gaps)
    assert (made.critical_path, made.length_s, made.tools) == (live.critical_path, live.length_s, live.tools)
    assert {lane.thread_id for lane in made.lanes} == {"0", "1"}


def test_a_trace_without_times_says_so() -> None:
    """A generated trace, or one of an older Weft, has lengths only."""
    (program,) = generate("chat", 1, poisson(random.Random(0), 1.0), random.Random(0))
    with pytest.raises(TraceError, match="not when they ran"):
        recorded(program)
