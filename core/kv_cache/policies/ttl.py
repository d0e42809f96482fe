"""SAGA's time to live by tool, shorter under pressure (§4.2, Algorithm 1, eq. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
)
from weft.core.kv_cache.policies.kv_registry import check_range, register


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
