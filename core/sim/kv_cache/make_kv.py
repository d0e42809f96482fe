"""Which KV cache a simulated replica has."""

from __future__ import annotations

import math

from weft.core.sim.kv_cache.cache import KvCache
from weft.core.sim.kv_cache.host import HostMemory
from weft.core.sim.kv_cache.offloading import OffloadingKvCache
from weft.core.sim.kv_cache.policy_cache import PolicyKvCache
from weft.core.sim.kv_cache.tiered_cache import TieredKvCache
from weft.core.sim.result import Counts
from weft.core.sim.settings import SimSettings
from weft.core.sim.step_time import StepTime


def make_kv(settings: SimSettings, counts: Counts) -> KvCache:
    """Make the KV cache of a replica. It has a KV policy if the settings have one and anything can be evicted."""
    capacity, config = settings.kv_capacity, settings.kv_policy
    if config is None or not settings.shares_prefixes or capacity == math.inf:
        return KvCache(capacity, keep=settings.shares_prefixes, block_tokens=settings.block_tokens)
    policy = config.make()
    if not settings.host_kv_tokens:
        return PolicyKvCache(settings, policy)
    host = HostMemory(settings.host_kv_tokens, ended_first=policy.evicts_ended_first)
    if policy.follows_use:
        return OffloadingKvCache(settings, policy, host, counts)
    # If copies take no time, policies see the default: an engine has measured some.
    return TieredKvCache(settings, policy, host, settings.timing.copy_token_s or StepTime().copy_token_s, counts)
