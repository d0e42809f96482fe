"""Swap or recompute: the number of tokens from which on a swap takes less time."""

from __future__ import annotations

import pytest

from weft.core.kv_cache.config import CopySpeed, SwapChoice


def test_the_threshold_is_where_both_take_as_long() -> None:
    """A copy takes 1 ms each way and 1 µs a token for both ways; prefill takes 11 µs a token: they meet at 200."""
    choice = SwapChoice("auto", token_bytes=1000.0)
    assert choice.min_tokens == 0
    choice.observe_copy(CopySpeed(0.001, 2e9, 2e9))
    assert choice.min_tokens == 0
    choice.observe_step(127, 99.0)  # too few tokens to tell
    assert choice.prefill_tokens_per_s is None
    for step_s in (0.0055, 0.011, 1.1):
        choice.observe_step(1000, step_s)
    assert choice.min_tokens == pytest.approx(200)
    choice.observe_copy(CopySpeed(0.001, 1e7, 1e7))  # slower than computing
    assert choice.min_tokens == float("inf")
    assert SwapChoice(7, 1000.0).min_tokens == 7


def test_the_slower_worker_counts() -> None:
    """All workers copy their shards at the same time."""
    assert CopySpeed(1.0, 5.0, 9.0).slowest(CopySpeed(2.0, 7.0, 8.0)) == CopySpeed(2.0, 5.0, 8.0)
