"""Host memory between the calls of programs, on vLLM's real scheduler and KV cache manager, without a model.

The worker reads the whole context of each token from the KV cache, so a block with wrong content changes the output.
"""

from __future__ import annotations

import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from host_programs import KEEPING, Make, call, end, harness, play, prompt_of, start_tool

pytestmark = pytest.mark.engine


@pytest.fixture(params=[0.0, 1e6], ids=["clock at 0", "clock at 1e6"])
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes a harness with host memory, whose clock starts at 0 or shows that the machine has run for days; vLLM is
    imported only when it is called."""
    return partial(harness, tmp_path, start_s=request.param)


@pytest.mark.parametrize("policy", KEEPING)
def test_what_the_device_loses_between_two_calls_is_loaded(make: Make, policy: str) -> None:
    """While a tool runs, another program fills the device. The next call loads its context instead of computing it."""
    h = make(policy)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 170), "b")
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    counts = h.scheduler._swap.counts
    assert 0 < counts.loaded_tokens <= 64
    assert counts.spilled_tokens >= counts.loaded_tokens
    assert h.accounts["a2"]["recomputed_tokens"] == 0


@pytest.mark.parametrize("policy", KEEPING)
def test_without_host_memory_it_is_computed_again(make: Make, policy: str) -> None:
    """The same calls find nothing: the comparison for the test above."""
    from scheduler_harness import SchedulerHarness

    h = make(policy)
    h = SchedulerHarness(
        Path(h.folder), {"name": "fcfs", "kv_policy": policy}, prefix_caching=True, batched_tokens=512, blocks=12
    )
    call(h, "a1", prompt_of(1, 64), "a")
    call(h, "b1", prompt_of(2, 170), "b")
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") < 64


def lose_a_context(make: Make, learned: dict[str, float] | None = None, **options: Any) -> Any:
    """A harness whose host memory alone has the context of program "a", of 64 tokens, and whose device is free."""
    h = make(**options)
    for tool, pause_s in (learned or {}).items():
        for _ in range(30):
            h.scheduler._kv_order.retention.tool_times.observe(tool, pause_s)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 170), "b")
    end(h, "b")
    return h


def test_an_idle_engine_fetches_what_its_programs_need_next(make: Make) -> None:
    """The call finds all of its context on the device, though it was lost, and loads nothing itself."""
    h = lose_a_context(make)
    h.settle()
    assert h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 11, "a fetch holds no block for long"
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    counts = h.scheduler._swap.counts
    assert counts.loaded_tokens == 0
    assert 0 < counts.fetched_tokens <= 64


def test_room_that_others_leave_is_used_at_once(make: Make) -> None:
    """The others' last call and their program end right after a look at what can be fetched. The idle engine does not
    wait for the next event, which may be the call itself."""
    h = make()
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    h.add("b1", prompt=prompt_of(2, 160), max_tokens=9, program_id="b")
    h.step()
    h.step()
    h.step_s = 0.001
    h.run()
    end(h, "b")
    h.settle()
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64
    assert h.scheduler._swap.counts.loaded_tokens == 0


def test_a_context_comes_back_just_before_its_tool_returns(make: Make) -> None:
    """The tool takes 20 s, as is known. The copy comes in the last seconds, while another call computes."""
    h = lose_a_context(make, learned={"search": 20.0})
    h.add("c1", prompt=prompt_of(3, 20), max_tokens=60, program_id="c")
    h.step_s = 0.5
    fetched = []
    for _ in range(44):
        h.step()
        fetched.append(h.scheduler._swap.counts.fetched_tokens)
    assert fetched[24] == 0
    assert fetched[-1] > 0
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 64


def test_a_copy_that_is_planned_while_the_last_step_runs_is_made(make: Make) -> None:
    """The last call ends in that step. vLLM steps again, since the workers do not have the plan yet."""
    h = make()
    h.step_s = 0.02
    h.add("a1", prompt=prompt_of(1, 144), max_tokens=1, program_id="a")
    h.add("b1", prompt=prompt_of(2, 20), max_tokens=2, program_id="b")
    h.step()
    end(h, "b")
    h.step()
    swap = h.scheduler._swap
    assert not h.scheduler.has_unfinished_requests()
    assert swap.awaits_report, "the plan that copies the context of the first call is not sent yet"
    h.settle()
    assert (swap.awaits_report, swap.stats().used) == (False, 9)


@pytest.mark.parametrize("contexts", [2, 9])
def test_nothing_is_copied_while_much_of_the_device_is_of_use_to_nobody(make: Make, contexts: int) -> None:
    """Contexts are copied ahead of need once less than a fourth of the device is left. Before, copies are of no use."""
    h = make(blocks=40)
    for number in range(contexts):
        call(h, f"call{number}", prompt_of(number, 64), f"p{number}")
        start_tool(h, f"p{number}", "search")
    h.settle()
    assert (h.scheduler._swap.stats().used > 0) == (contexts == 9)
    assert h.scheduler._kv_order.retention.tree.needed == 4 * contexts


def test_a_plan_with_nothing_to_copy_travels_as_a_name(make: Make) -> None:
    """Most steps copy nothing. What travels to the workers then is no structure, and they get their own constant."""
    h = make()
    h.add("a1", prompt=prompt_of(1, 20), max_tokens=2, program_id="a")
    plan = h.scheduler.schedule().kv_connector_metadata
    message = pickle.dumps(plan)
    assert pickle.loads(message) is plan  # noqa: S301 - made here
    assert len(message) < 80


def test_a_fetch_keeps_no_call_waiting(make: Make) -> None:
    """A call arrives that needs every block. It starts in the next step, whatever is being fetched."""
    h = lose_a_context(make)
    h.step()
    h.add("big", prompt=prompt_of(5, 170), max_tokens=2, program_id="big")
    h.step()
    assert "big" in {request.request_id for request in h.scheduler.running}
    h.run()


def test_a_fetch_that_fails_is_not_found(make: Make) -> None:
    """No block that was not copied is found by its hash: the call computes its context again."""
    h = lose_a_context(make)
    h.worker.fails = lambda: True
    h.settle()
    h.worker.fails = lambda: False
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") < 64
    assert h.worker.failures > 0


def test_a_reset_lets_go_of_what_is_being_fetched(make: Make) -> None:
    """vLLM empties its prefix cache only if no block is in use."""
    h = lose_a_context(make, in_flight=2)
    h.step()
    assert h.scheduler.reset_prefix_cache()
    h.settle()
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") == 0


@pytest.mark.parametrize("other", [{}, {"cache_salt": "y"}, {"adapter": "z"}], ids=["none", "salt", "adapter"])
def test_a_copy_is_found_under_its_own_salt_and_adapter_only(make: Make, other: dict[str, str]) -> None:
    """vLLM's hashes of blocks include both. The same program and the same tokens make no difference."""
    h = make()
    prompt, salted = prompt_of(1, 64), {"cache_salt": "x"}
    call(h, "a1", prompt, "a", **salted)
    call(h, "b1", prompt_of(2, 170), "b")
    end(h, "b")
    h.settle()
    assert call(h, "a2", [*prompt, 7, 8, 9], "a", **other) == 0
    call(h, "b2", prompt_of(3, 170), "b")
    assert call(h, "a3", [*prompt, 7, 8, 9], "a", **salted) == 64


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", KEEPING)
def test_no_token_changes_however_small_the_memories_are(make: Make, policy: str, in_flight: int) -> None:
    """With every rule on, under a scheduler that preempts, all calls yield what they yield alone. Most contexts are
    evicted between two calls, and host memory is too small for all of them. Contexts are loaded and fetched ahead, and
    preempted calls are swapped."""
    done: Counter[str] = Counter()
    for seed in range(2):
        swap = play(make, seed, kv_policy=policy, weft_policy="atlas", in_flight=in_flight).scheduler._swap
        stats, counts = swap.stats(), swap.counts
        done.update(loaded=counts.loaded_tokens, fetched=counts.fetched_tokens)
        done.update(swapped=stats.swaps_in, evicted=stats.evicted)
    assert len(+done) == 4, done


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_token_changes_where_copies_fail(make: Make, in_flight: int) -> None:
    """Each tenth copy of a block fails, out or in. What was not copied is computed again."""
    failures = 0
    for seed in range(3):  # tests/fuzz plays more
        h = play(make, seed, weft_policy="atlas", in_flight=in_flight, fails=0.1)
        failures += h.worker.failures
    assert failures > 10


@pytest.mark.parametrize("in_flight", [1, 2])
def test_nothing_survives_a_reset_of_the_prefix_cache(make: Make, in_flight: int) -> None:
    """vLLM resets it when the weights change. No copy in host memory outlives that, and no call fails."""
    for seed in range(3):  # tests/fuzz plays more
        play(make, seed, in_flight=in_flight, resets=True)
