"""Eviction by the expected time to the next use, and by what losing a token costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft.core.kv_cache.policies.decisions import LEAVE, Action, Context, Decision, KvPolicy, Memory, register

_LEAST_S: Final = 1e-3  # a call that waits may start at once
_SPILL: Final = Decision(Action.SPILL)


@register("next-use", "evicts what is expected to be used last, by its cost for each token")
class NextUse(KvPolicy):
    """Evicts the block of the least::

        chance · cost / (time to the next use)

    It follows Bélády's rule with expected times: the rest of a tool's time given how long it has run already. The cost
    is that of one token, because eviction is by block: the time to compute the token again, or to copy it if host
    memory has it. WA-LRU takes no expected time into account. It also counts size against a context, although more
    tokens cost more to compute again.
    """

    decides = True
    changes_with_time = True

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        """Spill a context if copying it back is faster than computing it. Without host memory, leave it."""
        return _SPILL if memory.copy_token_s < memory.prefill_token_s else LEAVE

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        cost_s = min(memory.copy_token_s, memory.prefill_token_s) if context.on_host else memory.prefill_token_s
        return context.chance * cost_s / max(context.expected_s(memory, now_s), _LEAST_S)

    def worth_together(self, worths: Iterable[float]) -> float:
        """The sum, because blocks that several contexts share are used sooner."""
        return sum(worths)

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        return memory.prefill_token_s / 2 / max(now_s - used_s, _LEAST_S)  # expected: unused for as long again
