"""SAGA's workflow-aware LRU (§4.1, eqs. 1-5)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.kv_cache.policies.base import Context, KvPolicy, Memory
from weft.core.kv_cache.policies.registry import check_range, register


@dataclass(frozen=True, slots=True)
class WaLruParameters:
    """The weights of WA-LRU, each from 0 to 1.

    Args:
        recency: the weight a of the idle time.
        reuse: the weight b of the chance that the context is not used again.
        size: the weight c of the context's size.

    Raises:
        KvPolicyError: A weight is out of range.
    """

    recency: float = 0.3
    reuse: float = 0.5
    size: float = 0.2

    def __post_init__(self) -> None:
        for name in ("recency", "reuse", "size"):
            check_range(name, getattr(self, name), 0, 1)


@register("wa-lru", "SAGA: evicts by idle time, by the chance of reuse and by size", WaLruParameters)
class WaLru(KvPolicy):
    """Evicts the context with the largest::

        P_evict = a · idle / idle_max + b · (1 - P_reuse) + c · tokens / tokens_max
        P_reuse = chance · tokens / (tokens + new_tokens)

    `idle_max` and `tokens_max` are the largest values that were seen. The overlap of eq. 5 is that of a chain: tokens
    divided by tokens plus those that the next prompt adds. The chance of eq. 4 is counted by name, because the paper's
    graph of the program is not known here. All idle times grow alike, so the time of the last use stands for the idle
    time.
    """

    changes_with_time = True  # a context's chance falls when its program continues another one

    def __init__(self, recency: float = 0.3, reuse: float = 0.5, size: float = 0.2) -> None:
        self._recency, self._reuse, self._size = recency, reuse, size
        self._most_idle_s = 1e-3
        self._most_tokens = 1

    def worth(self, context: Context, memory: Memory, now_s: float) -> float:
        del memory
        self._most_idle_s = max(self._most_idle_s, now_s - context.used_s)
        self._most_tokens = max(self._most_tokens, context.tokens)
        reuse = context.chance * context.tokens / max(context.tokens + context.new_tokens, 1e-9)
        return (
            self._recency * context.used_s / self._most_idle_s
            - self._reuse * (1 - reuse)
            - self._size * context.tokens / self._most_tokens
        )

    def worth_of_nobody(self, used_s: float, memory: Memory, now_s: float) -> float:
        del memory, now_s
        return self._recency * used_s / self._most_idle_s - self._reuse / 2
