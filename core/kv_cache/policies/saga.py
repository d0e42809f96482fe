"""SAGA's retention as a whole: a time to live by tool, and WA-LRU for contexts that are not held (§4)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.kv_cache.policies.decisions import MOST_HOLD_S, Action, Context, Decision, Memory
from weft.core.kv_cache.policies.kv_registry import register
from weft.core.kv_cache.policies.ttl import Ttl, TtlParameters
from weft.core.kv_cache.policies.wa_lru import WaLru, WaLruParameters


@dataclass(frozen=True, slots=True)
class SagaParameters:
    """The parameters of the time to live (`TtlParameters`) and of WA-LRU (`WaLruParameters`).

    Raises:
        KvPolicyError: A value is out of range.
    """

    quantile: float = 0.95
    low: float = 0.7
    high: float = 0.9
    most_s: float = MOST_HOLD_S
    recency: float = 0.3
    reuse: float = 0.5
    size: float = 0.2

    def __post_init__(self) -> None:
        TtlParameters(self.quantile, self.low, self.high, self.most_s)
        WaLruParameters(self.recency, self.reuse, self.size)


@register("saga", "SAGA as a whole: ttl, then wa-lru; with host memory what is not held is spilled", SagaParameters)
class Saga(Ttl, WaLru):
    """Holds contexts as `ttl` does, and evicts those that it does not hold in the order of `wa-lru`.

    SAGA fetches ahead without saying from where. Here it is from host memory, if the engine has it: a context that is
    not held is spilled if copying it back is faster than computing it.
    """

    def __init__(
        self,
        *,
        quantile: float = 0.95,
        low: float = 0.7,
        high: float = 0.9,
        most_s: float = MOST_HOLD_S,
        recency: float = 0.3,
        reuse: float = 0.5,
        size: float = 0.2,
    ) -> None:
        Ttl.__init__(self, quantile, low, high, most_s)
        WaLru.__init__(self, recency, reuse, size)

    def decide(self, context: Context, memory: Memory, now_s: float) -> Decision:
        decision = super().decide(context, memory, now_s)
        if decision.action is Action.LEAVE and memory.copy_token_s < memory.prefill_token_s:
            return Decision(Action.SPILL)
        return decision
