"""What a client of a server can do to the programs of others, by the ids and figures that it sends."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
ATLAS = {"name": "atlas", "bounds_s": [2.0, 8.0], "beta": 8.0}
MEGABYTE = "x" * 1_000_000


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness with one slot. vLLM is not imported before that."""
    from scheduler_harness import SchedulerHarness

    return lambda *, trust: SchedulerHarness(tmp_path, {**ATLAS, "trust_clients": trust}, slots=1)


def steps_until_served(h: Any, **attack: Any) -> int:
    """The steps that the program "victim" waits for a call, while a new program arrives in each step.

    Args:
        attack: What a request of another client carries before, besides the program's id.
    """
    h.add("first", program_id="victim", max_tokens=2)
    h.run()
    h.add("attack", max_tokens=1, **{"program_id": "victim", **attack})
    h.run()
    h.add("next", program_id="victim", max_tokens=1)
    for step in range(1, 200):
        h.add(f"other-{step}", program_id=f"other-{step}", max_tokens=1)
        if "next" in h.step():
            return step
    return 200


def test_a_figure_of_a_client_without_trust_starves_no_program(make: Make) -> None:
    """A request in the name of another client's program costs that program its real service, whatever it claims."""
    undisturbed = steps_until_served(make(trust=False))
    assert undisturbed < 50
    times = ("service_s", "total_service_s", "wait_s", "time_left_s", "program_time_left_s", "waited_s")
    for name in (*times, "program_calls"):
        assert steps_until_served(make(trust=False), **{name: 10**12}) == undisturbed


def test_a_figure_of_a_trusted_client_counts(make: Make) -> None:
    """A front end of Weft's knows what the program has attained elsewhere. What it says is bounded."""
    h = make(trust=True)
    assert steps_until_served(h, service_s=10**12) == 200
    h.add("again", program_id="victim", service_s=2**63, wait_s=1e300)
    attained = h.scheduler._entries["again"].call.program.attained
    assert max(attained.service_s, attained.total_service_s, attained.total_wait_s) < 2 * 10**8


def test_a_session_is_no_program(make: Make) -> None:
    """A request whose session has the name of a program does not belong to that program, so it charges it nothing."""
    h = make(trust=False)
    h.add("a", program_id="victim", max_tokens=3)
    h.add("b", session_id="victim", max_tokens=3)
    program, session = (h.scheduler._entries[name].call.program for name in "ab")
    assert program is not session
    h.run()
    h.add("c", session_id="victim")
    assert h.scheduler._entries["c"].call.program is session


def test_long_strings_are_not_kept(make: Make) -> None:
    """The scheduler remembers programs after their calls, so it takes no id, name or tenant longer than 256."""
    h = make(trust=False)
    h.add("warm-up", program_id="p", session_id="s")
    h.run()
    tracemalloc.start()
    try:
        for number in range(20):
            name = f"{number}{MEGABYTE}"
            texts = dict.fromkeys(("program_id", "thread_id", "call_id", "program_name", "tenant"), name)
            h.add(f"call-{number}", session_id=name, parents=[name], max_tokens=1, **texts)
            h.run()
        kept, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2_000_000  # of 140 MB


def test_ignored_figures_are_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler cannot answer the client, so the operator's log says what it ignores and how to change that."""

    def said() -> list[str]:
        return [record.message for record in caplog.records if record.name == "weft"]

    h = make(trust=False)
    h.add("a", program_id="p", program_end=1)
    assert not said()
    for name in "bc":
        h.add(name, program_id="p", service_s=1.0, wait_s=2.0)
    (message,) = said()
    assert "service_s, wait_s" in message
    assert '"trust_clients": true' in message
    make(trust=True).add("a", program_id="p", service_s=1.0)
    assert len(said()) == 1
