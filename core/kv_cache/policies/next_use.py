"""Eviction by the expected time to the next use, times cost over size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft.core.kv_cache.policies.base import LEAVE, Action, Context, Decision, KvPolicy, Memory
from weft.core.kv_cache.policies.registry import register

_LEAST_S: Final = 1e-3  # a call that waits may start at once


@register("next-use", "evicts what is expected to be used last, by its cost for each token")
class NextUse(KvPolicy):
    """Evicts the block of the least::

        chance · cost / (time to the next use)

    As Bélády's rule does, but with expected times: the tool's time given how long it has run already. The cost is that
    of a token, since eviction is by block: to compute it again, or to copy it if host memory has it too. WA-LRU has no
    time in it, and counts size against a context although more tokens cost more to compute again.
    """

    decides = True
    changes_with_time = True

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        """Spill what is copied back faster than it is computed; without host memory leave it."""
        del context, now_s
        return Decision(Action.SPILL) if memory.copy_token_s < memory.prefill_token_s else LEAVE

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        cost_s = min(memory.copy_token_s, memory.prefill_token_s) if context.on_host else memory.prefill_token_s
        return context.chance * cost_s / max(context.expected_s(memory, now_s), _LEAST_S)

    def worth_together(self, worths: Iterable[float]) -> float:
        """The sum: what several may use is used the sooner."""
        return sum(worths)

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        return memory.prefill_token_s / 2 / max(now_s - used_s, _LEAST_S)  # it stays unused for as long again
