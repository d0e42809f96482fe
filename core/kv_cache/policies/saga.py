"""SAGA's retention as a whole: a time to live by tool, and WA-LRU for contexts that are not held (§4)."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.kv_cache.policies.decisions import Action, Context, Decision, Memory
from weft.core.kv_cache.policies.kv_registry import register
from weft.core.kv_cache.policies.ttl import Ttl
from weft.core.kv_cache.policies.wa_lru import WaLru


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
