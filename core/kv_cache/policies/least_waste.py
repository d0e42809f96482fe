"""Astraea's least waste: keep, leave or spill, whichever wastes the least memory and time (§4.4, eqs. 5-8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from weft.core.kv_cache.policies.decisions import (
    LEAVE,
    MOST_HOLD_S,
    Action,
    Context,
    Decision,
    KvPolicy,
    Memory,
    check_range,
    register,
)


class Waste(NamedTuple):
    """What each choice wastes, in tokens times seconds. (The bytes of a token would cancel.)"""

    keep: float
    leave: float
    spill: float


def waste(context: Context, memory: Memory, now_s: float) -> Waste:
    """Equations 5 to 7, with C the context's tokens and B those of the running calls::

        keep  = T · C            T: the time until the next call runs
        leave = t_p · C · (B + C)   t_p: to compute a token
        spill = 2 · t_c · C · B     t_c: to copy a token one way

    The paper calls B the tokens that "could be batched if memory were freed". That is a gain and not a cost. Here B is
    the memory that idles meanwhile, that of the running calls, as in InferCept. The context's own memory is in use
    while it is computed again, so C is added. The paper decides once. Here the decision is made again in each epoch, so
    T is the time that remains given the time that has passed. A copy counts only as far as steps wait for it.
    """
    tokens, running = context.tokens, memory.running_tokens
    return Waste(
        keep=context.expected_s(memory, now_s) * tokens,
        leave=memory.prefill_token_s * tokens * (running + tokens),
        spill=2 * memory.copy_token_s * tokens * running if memory.copy_token_s < math.inf else math.inf,
    )


@register("least-waste", "Astraea: keep, leave or spill, whichever wastes the least memory")
@dataclass(frozen=True)
class LeastWaste(KvPolicy):
    """Keeps every context up to the watermark, and above it takes the choice of least waste. Ties go to keeping.

    A context is held until keeping it has wasted as much as the best other choice.

    Args:
        watermark: the share of the KV cache in use or held, from 0 to 1, up to which every context is kept.

    Raises:
        KvPolicyError: It is out of range.
    """

    decides: ClassVar[bool] = True

    watermark: float = 0.9  # the paper gives none

    def __post_init__(self) -> None:
        check_range("watermark", self.watermark, 0, 1)

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        if memory.used_share <= self.watermark:
            return Decision(Action.KEEP, now_s + MOST_HOLD_S)
        keep, leave, spill = waste(context, memory, now_s)
        other = min(leave, spill)
        if keep <= other:
            worthwhile_s = other / context.tokens if context.tokens else 0.0
            return Decision(Action.KEEP, now_s + min(worthwhile_s, MOST_HOLD_S))
        return LEAVE if leave <= spill else Decision(Action.SPILL)
