"""Whether vLLM leaves prompts out of a step, so that running calls decode without them."""

from __future__ import annotations

from weft.engine.vllm_compat.names import AsyncScheduler


def holds_prompts(scheduler: AsyncScheduler, throttle_prefills: bool) -> bool:
    """Whether the next step admits no prompt that has more than one token to compute, and continues none.

    Args:
        throttle_prefills: What `schedule` gets from vLLM: with data parallelism, whether other ranks compute no prompt.
    """
    if not throttle_prefills and not _holds_by_itself(scheduler):
        return False
    return not scheduler.prefill_capacity_bound and any(not request.is_prefill_chunk for request in scheduler.running)


def _holds_by_itself(scheduler: AsyncScheduler) -> bool:
    """From vLLM 0.33 on, `--prefill-schedule-interval` acts without data parallelism, too."""
    interval: int = getattr(scheduler, "local_prefill_interval", 1)
    return interval > 1 and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval
