"""SAGA's workflow-aware LRU (§4.1, eqs. 1-5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from weft.core.kv_cache.policies.decisions import Context, KvPolicy, Memory
from weft.core.kv_cache.policies.kv_registry import check_range, register

_LEAST_S: Final = 1e-3  # of the longest idle time, which idle times are divided by


@register("wa-lru", "SAGA: evicts by idle time, by the chance of reuse and by size")
@dataclass(frozen=True)
class WaLru(KvPolicy):
    """Evicts the context with the largest::

        P_evict = a · idle / idle_max + b · (1 - P_reuse) + c · tokens / tokens_max
        P_reuse = chance · tokens / (tokens + new_tokens)

    `idle_max` and `tokens_max` are the largest values of the contexts that are cached now, so they change with the
    clock, and all contexts are ranked at one instant. The overlap of eq. 5 is that of a chain: tokens divided by tokens
    plus those that the next prompt adds. The chance of eq. 4 is counted by name, because the paper's graph of the
    program is not known here. Blocks of nobody count as reused with a chance of one half, and as of no size.

    Args:
        recency: the weight a of the idle time, from 0 to 1.
        reuse: the weight b of the chance that the context is not used again, from 0 to 1.
        size: the weight c of the context's size, from 0 to 1.

    Raises:
        KvPolicyError: A weight is out of range.
    """

    compares_with_all: ClassVar[bool] = True

    recency: float = 0.3
    reuse: float = 0.5
    size: float = 0.2

    def __post_init__(self) -> None:
        for name in ("recency", "reuse", "size"):
            check_range(name, getattr(self, name), 0, 1)

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        """The negative of P_evict."""
        tokens = context.cached_tokens
        reuse = context.chance * tokens / max(tokens + context.new_tokens, 1e-9)
        size = tokens / max(1, memory.largest_tokens)
        return -(self._idle(context.used_s, memory, now_s) + self.reuse * (1 - reuse) + self.size * size)

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        return -(self._idle(used_s, memory, now_s) + self.reuse / 2)

    def _idle(self, used_s: float, memory: Memory, now_s: float) -> float:
        """The weighted idle time, as a share of the longest one of a context."""
        return self.recency * (now_s - used_s) / max(now_s - memory.oldest_s, _LEAST_S)
