"""SAGA's retention: a time to live by tool, WA-LRU for contexts that are not held, and both as a whole (§4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from weft.core.errors import KvPolicyError
from weft.core.kv_cache.policies.decisions import (
    LEAVE,
    MOST_HOLD_S,
    MOST_SOON_S,
    Action,
    Context,
    Decision,
    KvPolicy,
    Memory,
    check_range,
    register,
)


@register("ttl", "SAGA: contexts are held for a quantile of their tool's time, shorter under pressure")
@dataclass(frozen=True)
class Ttl(KvPolicy):
    """Holds a context from the end of its call for::

        m   = clamp((used - low) / (high - low), 0, 1)
        TTL = min(Q(tool) · (1 - 0.5 · m), most_s)

    From `high` on nothing is held. After its time a context is left and not dropped, because on vLLM dropping it gains
    nothing. Q is the quantile of the tool's latest times; the paper takes it from a moving average, which has no
    quantiles. Only running and held contexts count as used, because a prefix cache is always full. While the next call
    waits, its context is held until the call has found it.

    Args:
        quantile: the share of the tools that should return in time, from 0.01 to 0.999.
        low: the used share of the KV cache (`Memory.used_share`) from which on the time is shortened.
        high: the used share from which on nothing is held.
        most_s: the longest time in seconds.

    Raises:
        KvPolicyError: A value is out of range, or `low` is not below `high`.
    """

    decides: ClassVar[bool] = True

    quantile: float = 0.95
    low: float = 0.7
    high: float = 0.9
    most_s: float = MOST_HOLD_S

    def __post_init__(self) -> None:
        check_range("quantile", self.quantile, 0.01, 0.999)
        check_range("low", self.low, 0, 1)
        check_range("high", self.high, 0, 1)
        check_range("most_s", self.most_s, 0, 86400)
        if self.low >= self.high:
            raise KvPolicyError(f"low is {self.low}, and high is {self.high}; give a lower low.")

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        if memory.used_share >= self.high or self.most_s == 0:
            return LEAVE
        if context.called_s is not None:
            return Decision(Action.KEEP, now_s + self.most_s)
        if context.soon_s is not None and context.is_announced(now_s):
            return Decision(Action.KEEP, context.soon_s + min(MOST_SOON_S, self.most_s))
        pressure = max(0.0, (memory.used_share - self.low) / (self.high - self.low))
        time_s = min(context.pause.quantile_s(self.quantile) * (1 - 0.5 * pressure), self.most_s)
        until_s = now_s - context.elapsed_s(now_s) + time_s
        return Decision(Action.KEEP, until_s) if until_s > now_s else LEAVE


_LEAST_S: Final = 1e-3  # of the longest idle time, which idle times are divided by


@register("wa-lru", "SAGA: evicts by idle time, by the chance of reuse and by size")
@dataclass(frozen=True)
class WaLru(KvPolicy):
    """Evicts the context with the largest::

        P_evict = a · idle / idle_max + b · (1 - P_reuse) + c · tokens / tokens_max
        P_reuse = chance · tokens / (tokens + new_tokens)

    `idle_max` and `tokens_max` are the largest values of the contexts that are cached now, so they change with the
    clock, and all contexts are ranked at one instant. The overlap of eq. 5 is that of a chain: tokens divided by tokens
    plus those that the next prompt adds. The chance of eq. 4 is counted by name and age, because that of the program's
    execution graph gains nothing. Blocks of nobody count as reused with a chance of one half, and as of no size.

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


@register("saga", "SAGA as a whole: ttl, then wa-lru; with host memory what is not held is spilled")
@dataclass(frozen=True)
class Saga(Ttl, WaLru):
    """Holds contexts as `ttl` does, and evicts those that it does not hold in the order of `wa-lru`.

    SAGA fetches ahead without saying from where. Here it is from host memory, if the engine has it: a context that is
    not held is spilled if copying it back is faster than computing it. The parameters are those of both policies.
    """

    def __post_init__(self) -> None:
        Ttl.__post_init__(self)
        WaLru.__post_init__(self)

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        decision = super().decide(context, memory, now_s)
        if decision.action is Action.LEAVE and memory.copy_token_s < memory.prefill_token_s:
            return Decision(Action.SPILL)
        return decision
