"""When contexts are copied to host memory before the KV cache needs their room, and how much of them at once."""

from __future__ import annotations

from typing import Final

STEP_BYTES: Final = 32 << 20  # that one step copies out ahead of need, which takes a few milliseconds
MOST_LEFT: Final = 64  # contexts of ended programs that are yet to be copied; the device soon evicts older ones
_AMPLE: Final = 0.25  # of the KV cache: while so much is of use to nobody, nothing is copied ahead of need


def is_short(of_nobody: float, step: float, capacity: float) -> bool:
    """Whether copies ahead of need are of use. All sizes are in the same unit, tokens or blocks.

    Args:
        of_nobody: What is free, and in no context of an open program.
        step: The most that the next step can take.
        capacity: The KV cache.
    """
    return of_nobody < ample(step, capacity)


def ample(step: float, capacity: float) -> float:
    """How much is of use to nobody if copies ahead of need are of no use."""
    return max(2 * step, _AMPLE * capacity)
