"""On vLLM's real scheduler: fetches that become void before they are sent, and fetches of contexts with one prefix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from host_programs import Make, call, end, harness, prompt_of, start_tool

from weft.core.errors import SwapError
from weft.engine.kv_cache.slot_plans import SwapBatch, SwapPlan

pytestmark = pytest.mark.engine


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness with host memory; vLLM is imported only when it is called."""
    return partial(harness, tmp_path)


def fetch_is_planned(make: Make) -> Any:
    """A harness that has planned a fetch for its next step, while a call runs."""
    h = make(blocks=24, in_flight=2)
    for _ in range(30):
        h.scheduler._kv_order.retention.tool_times.observe("search", 5.0)
    call(h, "a1", prompt_of(1, 64), "a")
    start_tool(h, "a", "search")
    call(h, "b1", prompt_of(2, 340), "b")
    end(h, "b")
    h.add("c1", prompt=prompt_of(3, 20), max_tokens=120, program_id="c")
    h.step_s = 0.03  # so fast that a step is prepared while the one before runs
    for _ in range(100):
        if h.scheduler._swap.to_fetch:
            return h
        h.step()
    raise AssertionError("no fetch was planned")


def lose_memory(h: Any) -> None:
    from weft.engine.kv_cache.connector import WorkerReport
    from weft.engine.vllm_compat.names import KVConnectorOutput

    report = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(has_memory=False))
    h.scheduler.connector.update_connector_output(report)


def reset_all(h: Any) -> None:
    h.drain()
    h.scheduler.reset_prefix_cache(reset_running_requests=True)


VOIDING: dict[str, Callable[[Any], Any]] = {
    "reset with running calls": reset_all,
    "reset that fails because calls run": lambda h: h.scheduler.reset_prefix_cache(),
    "reset of host memory": lambda h: h.scheduler.reset_connector_cache(),
    "memory lost": lose_memory,
    "other policy": lambda h: h.scheduler._swap.use_policy(h.scheduler._config.kv_policy.make()),
}


@pytest.mark.parametrize("how", VOIDING)
def test_a_reset_of_any_kind_drops_what_is_planned(make: Make, how: str) -> None:
    """The fetch is not sent, its blocks are free at once, and the call that runs has its tokens."""
    h = fetch_is_planned(make)
    pool = h.scheduler.kv_cache_manager.block_pool
    VOIDING[how](h)
    assert h.scheduler._swap.to_fetch == set()
    assert h.scheduler._swap.stats().used == 0
    running = sum(len(h.scheduler.kv_cache_manager.get_block_ids(each.request_id)[0]) for each in h.scheduler.running)
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1 - running
    if how != "other policy":  # the scheduler replaces its own tables too
        h.run()
        h.settle()
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1


@pytest.mark.parametrize("how", ["reset of host memory", "memory lost"])
def test_a_fetch_that_is_under_way_in_a_reset_is_never_found(make: Make, how: str) -> None:
    """The workers have the plan. What they copy is not made known, and the blocks are not held for ever."""
    h = fetch_is_planned(make)
    h.step()
    pool = h.scheduler.kv_cache_manager.block_pool
    assert h.scheduler._kv_order._fetches._under_way
    VOIDING[how](h)
    h.run()
    h.settle()
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1
    assert call(h, "a2", [*prompt_of(1, 64), 7, 8, 9], "a") < 64


def test_a_step_that_needs_the_blocks_of_a_planned_fetch_does_not_write_them_twice(make: Make) -> None:
    """A call arrives that takes nearly the whole device. The fetch is withdrawn from the plan of that very step."""
    h = fetch_is_planned(make)
    free = h.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() + len(h.scheduler._swap.to_fetch)
    h.add("big", prompt=prompt_of(5, 16 * (free - 2)), max_tokens=2, program_id="big")
    output = h.scheduler.schedule()
    plan = output.kv_connector_metadata.plan
    assert "big" in output.num_scheduled_tokens
    assert plan.fetch.slots == []


def test_contexts_with_a_common_prefix_fetch_it_once(make: Make) -> None:
    """Two agents of one kind wait for their tools. Each slot is read once, and both find their whole contexts."""
    h = make(blocks=24)
    common = prompt_of(1, 64)
    prompts = {name: [*common, *prompt_of(number, 32)] for number, name in enumerate("ab", start=7)}
    for name, prompt in prompts.items():
        call(h, f"{name}1", prompt, name)
        start_tool(h, name, "search")
    call(h, "c1", prompt_of(2, 350), "c")
    end(h, "c")
    plans: list[SwapPlan] = []
    swap = h.worker.swap
    h.worker.swap = lambda plan: (plans.append(plan), swap(plan))[1]
    h.settle()
    (fetch,) = [plan.fetch for plan in plans if plan.fetch.slots]
    assert len(set(fetch.slots)) == len(fetch.slots) > 6, "more than the six blocks of one of them"
    for name, prompt in prompts.items():
        assert call(h, f"{name}2", [*prompt, 7, 8, 9], name) == 96
    assert h.scheduler._swap.counts.loaded_tokens == 0


@pytest.mark.parametrize(
    "plan",
    [
        SwapPlan(fetch=SwapBatch([1, 2], [3, 3]), number=1),
        SwapPlan(fetch=SwapBatch([1, 1], [3, 4]), number=1),
        SwapPlan(loads=[SwapBatch([1], [3])], fetch=SwapBatch([1], [4]), number=1),
        SwapPlan(out=SwapBatch([1, 2], [3, 3]), number=1),
        SwapPlan(out=SwapBatch([1, 1], [3, 4]), number=1),
        SwapPlan(out=SwapBatch([12], [3]), number=1),
        SwapPlan(fetch=SwapBatch([1], [200]), number=1),
    ],
    ids=["slot read twice", "block twice", "load and fetch", "slot written twice", "out twice", "no block", "no slot"],
)
def test_the_stand_in_for_the_workers_refuses_what_the_kernel_refuses(make: Make, plan: SwapPlan) -> None:
    """A worker that takes any plan would hide plans that fail on every engine."""
    with pytest.raises((SwapError, ValueError)):
        make().worker.swap(plan)
