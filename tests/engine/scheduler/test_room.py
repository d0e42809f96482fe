"""Preemption for KV blocks: calls need, and give back, only blocks that no other running call references."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.core.policies import Call
from weft.engine.scheduler.batch import StepRoom

if TYPE_CHECKING:
    from scheduler_harness import SchedulerHarness

pytestmark = pytest.mark.engine

ATLAS = {"name": "atlas", "bounds_s": [2.0, 8.0, 64.0], "beta": 8.0}
SYSTEM = list(range(100, 260))  # a system prompt of ten blocks


def harness(folder: Path, **options: Any) -> SchedulerHarness:
    from scheduler_harness import SchedulerHarness

    return SchedulerHarness(
        folder, ATLAS, **{"slots": 8, "blocks": 31, "prefix_caching": True, "batched_tokens": 1024, **options}
    )


def test_newcomers_that_share_a_prompt_preempt_no_call(tmp_path: Path) -> None:
    """Six newcomers find the ten blocks of their system prompt with a running call, so each needs one block only.

    Counted with the whole prompt, each of them preempted the running call, which was readmitted in the same step.
    """
    h = harness(tmp_path)
    h.add("long", prompt=SYSTEM + list(range(300, 440)), max_tokens=30, program_id="long", service_s=50.0)
    h.step()
    for number in range(6):
        h.add(f"new-{number}", prompt=[*SYSTEM, number], max_tokens=30, program_id=f"p{number}")
        assert f"new-{number}" in h.step()
    h.run()
    assert h.accounts["long"]["preemptions"] == 0


def test_newcomers_that_bring_a_prompt_together_need_it_once(tmp_path: Path) -> None:
    """The second of two newcomers finds the blocks of the first, which start in the same step."""
    h = harness(tmp_path)
    h.add("long", prompt=list(range(300, 590)), max_tokens=4, program_id="long", service_s=50.0)  # 19 of 30 blocks
    h.step()
    for name in ("a", "b"):
        h.add(name, prompt=[*SYSTEM[:128], ord(name)], max_tokens=4, program_id=name)  # 9 blocks, 8 of them shared
    assert h.step() == {"long", "a", "b"}
    h.run()
    assert h.accounts["long"]["preemptions"] == 0


def test_a_call_is_not_preempted_for_blocks_that_others_keep(tmp_path: Path) -> None:
    """A victim gives back what it alone references. If that is too little for the newcomer, the victim runs on."""
    h = harness(tmp_path)
    for name, service_s in (("older", 20.0), ("newer", 100.0)):  # 10 blocks together, and 3 of its own each
        h.add(name, prompt=[*SYSTEM, *[ord(name[0])] * 33], max_tokens=12, program_id=name, service_s=service_s)
    h.step()
    h.add("wide", prompt=list(range(600, 980)), max_tokens=2, program_id="wide", service_s=30.0)  # 24 blocks
    for _ in range(6):
        assert h.step() == {"older", "newer"}
    h.run()
    assert [h.accounts[name]["preemptions"] for name in ("older", "newer", "wide")] == [0, 0, 0]


def test_a_free_cached_block_is_taken_from_the_free_ones(tmp_path: Path) -> None:
    """A prefix that only the cache holds does not come for nothing, because its blocks can no longer be evicted."""
    h = harness(tmp_path)
    h.add("gone", prompt=[*SYSTEM, 1], max_tokens=1, program_id="gone")
    h.run()
    h.add("long", prompt=list(range(300, 600)), max_tokens=30, program_id="long", service_s=50.0)  # 19 of 30 blocks
    h.step()
    h.add("again", prompt=[*SYSTEM, *range(700, 750)], max_tokens=2, program_id="again")  # 14 blocks
    assert h.step() == {"again"}
    assert h.scheduler.requests["long"].num_preemptions == 1
    h.run()


calls = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it arrives
        st.integers(0, 2),  # which of three system prompts
        st.integers(0, 160),  # how much of it, in tokens
        st.integers(1, 120),  # tokens of its own
        st.integers(1, 40),  # output tokens
        st.sampled_from([0.0, 3.0, 20.0, 100.0]),  # service that its program has attained
    ),
    min_size=2,
    max_size=14,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(calls, st.integers(14, 40), st.integers(2, 6), st.booleans(), st.sampled_from([0, 40]))
def test_a_preempted_call_stays_out_of_the_step(
    arrivals: list[tuple[int, int, int, int, int, float]], blocks: int, slots: int, overlapping: bool, swap_blocks: int
) -> None:
    """A call that the policy preempts is not admitted again in the same step: its place went to a call of better rank.

    vLLM admits exactly the calls for which room was made, unless a victim's blocks are still being written to.
    """
    from scheduler_harness import expected_output

    with tempfile.TemporaryDirectory() as folder:
        h = harness(Path(folder), blocks=blocks + 1, slots=slots, in_flight=1 + overlapping, swap_blocks=swap_blocks)
        forced: set[str] = set()
        scheduler, force_out = h.scheduler, h.scheduler.force_out

        def note(request: Any) -> None:
            forced.add(request.request_id)
            force_out(request)

        scheduler.force_out = note  # type: ignore[method-assign]

        def step() -> None:
            forced.clear()
            waiting = {call.key for call in scheduler.weft_policy.waiting}
            scheduled = h.step()
            assert not forced & scheduled
            if forced and not (overlapping and swap_blocks):
                assert waiting & scheduled, "a call was preempted for nothing"

        prompts: dict[str, tuple[list[int], int]] = {}
        for steps, system, shared, own, output_tokens, service_s in arrivals:
            for _ in range(steps):
                step()
            name = f"call-{len(prompts)}"
            own = min(own, 16 * blocks - output_tokens - 1)  # noqa: PLW2901  a call fits into the KV cache
            prompt = [10 + system] * min(shared, 16 * blocks - output_tokens - own) + [600 + len(prompts)] * own
            prompts[name] = prompt, output_tokens
            h.add(name, prompt=prompt, max_tokens=output_tokens, program_id=name, service_s=service_s)
        for _ in range(3000):
            if not scheduler.has_unfinished_requests() and not h._pending:
                break
            step()
        assert {name: h.tokens[name] for name in prompts} == {
            name: expected_output(prompt, count) for name, (prompt, count) in prompts.items()
        }


def test_the_room_of_a_call_is_what_vllm_allocates(tmp_path: Path) -> None:
    """For calls that start one after another, the room counts the free blocks as vLLM's block pool does."""
    h = harness(tmp_path, blocks=41)
    h.add("first", prompt=[*SYSTEM, *range(300, 350)], max_tokens=9, program_id="first")
    h.step()
    scheduler = h.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    for number, prompt in enumerate(([*SYSTEM, 1], [*SYSTEM, *range(700, 740)], [*range(700, 800)], [5])):
        name = f"c{number}"
        h.add(name, prompt=prompt, max_tokens=9, program_id=name)
        free = pool.get_num_free_blocks()
        running = [(request, scheduler._entries[request.request_id].call) for request in scheduler.running]
        room = StepRoom(scheduler.kv_cache_manager, scheduler.requests, running, 1024)
        call: Call = scheduler._entries[name].call
        room.offer(call)
        assert room.fits()
        needed = room._needed + sum(room._growth.values())
        h.step()
        assert free - pool.get_num_free_blocks() == needed, name
