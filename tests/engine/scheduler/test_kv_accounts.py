"""What calls find of their programs' KV with host memory, on vLLM's real scheduler, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.kv_cache.config import CopySpeed
from weft.core.kv_cache.stats import KvStats
from weft.engine.wire.reports import read_answer

pytestmark = pytest.mark.engine


def test_what_host_memory_gives_back_is_fetched_and_not_computed_again(tmp_path: Path) -> None:
    """While a tool runs, another program fills the device. The next call's context is found or fetched. The engine's
    figures agree with the call's account."""
    from scheduler_harness import SchedulerHarness

    weft = {"name": "fcfs", "kv_policy": "next-use"}
    h = SchedulerHarness(tmp_path, weft, prefix_caching=True, batched_tokens=512, swap_blocks=200, blocks=12, slots=3)
    h.scheduler._swap.choice.observe_copy(CopySpeed(0.0, 1e12, 1e12))
    agent = [101, *range(200, 263)]
    for name, prompt in (("a", agent), ("b", [102, *range(200, 369)]), ("a", [*agent, 7, 8, 9])):
        h.add(f"{name}{len(prompt)}", prompt=prompt, max_tokens=1, program_id=name)
        h.run()
    account = h.accounts["a67"]
    assert account["recomputed_tokens"] == 0
    stats = read_answer(KvStats, h.scheduler({"type": "take_kv_stats"}))
    assert stats is not None
    assert stats.found_tokens + account["fetched_tokens"] == 64
    assert stats.fetched_tokens >= account["fetched_tokens"], "some may have been fetched ahead of the call"
    assert stats.spilled_tokens > 0
    assert 0 < stats.host_used_bytes <= stats.host_capacity_bytes
