"""KV policies: what happens to a program's KV between two calls, and what is evicted first.

To add a KV policy, write its module with `@register(...)` and import its class here.
"""

from __future__ import annotations

from typing import Final

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
from weft.core.kv_cache.policies.kv_registry import (
    KvPolicyConfig,
    check_kv_policy,
    register,
    registration,
    registrations,
)
from weft.core.kv_cache.policies.least_waste import LeastWaste
from weft.core.kv_cache.policies.next_use import NextUse
from weft.core.kv_cache.policies.saga import Saga
from weft.core.kv_cache.policies.stock import EndedFirst, Lru
from weft.core.kv_cache.policies.ttl import Ttl
from weft.core.kv_cache.policies.wa_lru import WaLru

KV_POLICIES: Final = tuple(each.name for each in registrations())

__all__ = [
    "KV_POLICIES",
    "LEAVE",
    "MOST_HOLD_S",
    "MOST_SOON_S",
    "Action",
    "Context",
    "Decision",
    "EndedFirst",
    "KvPolicy",
    "KvPolicyConfig",
    "LeastWaste",
    "Lru",
    "Memory",
    "NextUse",
    "Saga",
    "Ttl",
    "WaLru",
    "check_kv_policy",
    "register",
    "registration",
    "registrations",
]
