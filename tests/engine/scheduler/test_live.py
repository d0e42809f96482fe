"""What the scheduler says of its calls and of the KV of its programs, on vLLM's real scheduler, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.core.kv_cache.config import CopySpeed
from weft.core.show import MOST_CALLS, LiveCall, ProgramKv, SchedulerState
from weft.engine.wire.control import TakeState, encode_control
from weft.engine.wire.reports import read_answer

pytestmark = pytest.mark.engine

ATLAS: dict[str, Any] = {"name": "atlas", "bounds_s": [1.5, 100], "beta": 1000}


def state_of(harness: Any) -> SchedulerState:
    state = read_answer(SchedulerState, harness.scheduler(encode_control(TakeState())))
    assert state is not None
    return state


def test_calls_are_listed_with_their_queues(tmp_path: Path) -> None:
    """One call runs, in the second queue since it has used up the first one's time; the other waits in the first."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(tmp_path, ATLAS, slots=1)
    h.add("a", max_tokens=20, program_id="a")
    for _ in range(3):
        h.step()
    h.add("b", max_tokens=20, program_id="b")
    state = state_of(h)
    assert (state.running, state.waiting, state.is_cut) == (1, 1, False)
    assert state.calls == (
        LiveCall(state.calls[0].call_id, "a", 1, True, 3.0, 0.0, 3, 3),
        LiveCall(state.calls[1].call_id, "b", 0, False, 0.0, 0.0, 3, 0, place=1),
    )
    h.clock.advance(2.0)
    assert state_of(h).calls[1].wait_s == 2.0, "the present wait counts"
    assert 0 < state.kv_used < 1


def test_a_policy_with_one_queue_has_no_levels(tmp_path: Path) -> None:
    """A level would say nothing there."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(tmp_path, {"name": "fcfs"})
    h.add("a", program_id="a")
    assert [call.level for call in state_of(h).calls] == [None]


@pytest.mark.parametrize("policy", ["auto", "learned", "fcfs", "atlas", "fair"])
def test_calls_that_wait_have_places(tmp_path: Path, policy: str) -> None:
    """The one that starts next has the first place, under every policy; one that runs has none."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(tmp_path, {"name": policy}, slots=1)
    for name in "abc":
        h.add(name, max_tokens=3, program_id=name, program_name=name)
    h.step()
    places = {call.program_id: call.place for call in state_of(h).calls}
    (first,) = [name for name, place in places.items() if place is None]
    assert sorted(place for place in places.values() if place is not None) == [1, 2]
    order = [first]
    while h.scheduler.has_requests():
        h.step()
        order += [call.program_id for call in state_of(h).calls if call.runs and call.program_id not in order]
    assert [places[name] for name in order] == [None, 1, 2]


def test_the_kv_of_a_running_call_is_its_programs(tmp_path: Path) -> None:
    """Two calls of a program that share a prompt hold its blocks once. A waiting call holds nothing."""
    from scheduler_harness import SchedulerHarness

    h = SchedulerHarness(tmp_path, {"name": "fcfs"}, prefix_caching=True, slots=2)
    prompt = list(range(100, 148))
    h.add("a1", prompt=prompt, program_id="a")
    h.step()
    h.add("a2", prompt=[*prompt, 1], program_id="a")
    h.add("b", program_id="b")
    h.step()
    assert state_of(h).programs == (ProgramKv("a", 5 * 16, 0),), "three blocks in common, and one each"


def test_a_policy_that_orders_contexts_knows_what_lies_between_calls(tmp_path: Path) -> None:
    """The context of a program without a call is on the device or in host memory, until the program ends."""
    from scheduler_harness import SchedulerHarness

    weft = {"name": "fcfs", "kv_policy": "next-use"}
    h = SchedulerHarness(tmp_path, weft, prefix_caching=True, batched_tokens=512, swap_blocks=200, blocks=12, slots=3)
    h.scheduler._swap.choice.observe_copy(CopySpeed(0.0, 1e12, 1e12))
    h.add("a", prompt=list(range(200, 264)), max_tokens=1, program_id="a")
    h.run()
    assert state_of(h).programs == (ProgramKv("a", 64, 0),)
    h.add("b", prompt=list(range(300, 470)), max_tokens=1, program_id="b")
    h.run()
    a = next(each for each in state_of(h).programs if each.program_id == "a")
    assert a.device_tokens < 64
    assert a.host_tokens == 64
    h.scheduler({"type": "programs_ended", "program_ids": ["a", "b"]})
    assert state_of(h).programs == ()


def test_an_answer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more calls than the answer takes it has the earliest, and says that it is cut. The counts are of all."""
    from scheduler_harness import SchedulerHarness

    assert MOST_CALLS == 10_000
    monkeypatch.setattr("weft.engine.scheduler.control_handler.MOST_CALLS", 3)
    h = SchedulerHarness(tmp_path, {"name": "fcfs"}, slots=2)
    for number in range(5):
        h.add(f"r{number}", program_id=f"p{number}")
    h.step()
    state = state_of(h)
    assert (state.running, state.waiting, state.is_cut) == (2, 3, True)
    assert [call.program_id for call in state.calls] == ["p0", "p1", "p2"]
