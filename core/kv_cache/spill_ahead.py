"""When contexts are copied to host memory before the KV cache needs their room, and how much of them at once."""

from __future__ import annotations

from typing import Final

from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.prediction import KnownTime

_STEP_BYTES: Final = 32 << 20  # that one step waits for, a few milliseconds
_BESIDE_BYTES: Final = 256 << 20  # as much as a step computes of a prompt: less would fall behind
MOST_LEFT: Final = 64  # contexts of ended programs that are yet to be copied; the device soon evicts older ones
_AMPLE: Final = 0.25  # of the KV cache: while so much is of use to nobody, nothing is copied ahead of need


def most_bytes(*, beside: bool) -> int:
    """The most that one step copies out ahead of need: where copies run beside the steps, or where a step waits."""
    return _BESIDE_BYTES if beside else _STEP_BYTES


def copies_prompt(policy: KvPolicy, tokens: int, memory: Memory, now_s: float) -> bool:
    """Whether a running call's prompt of so many tokens is copied out beside the steps as soon as it is computed. The
    step after a call's end may evict what it leaves, and would have to wait for all of its copy.

    The caller gives the copy no room of a context that an open program may need: while the call runs, it is of no use.
    """
    context = Context(None, "", now_s, KnownTime(0.0), tokens)
    return policy.decide(context, memory, now_s).action is Action.SPILL


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
