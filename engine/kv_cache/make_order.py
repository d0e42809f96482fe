"""Which object carries out a KV policy on vLLM's blocks."""

from __future__ import annotations

from weft.core.kv_cache.policies import KvPolicy, Memory
from weft.core.kv_cache.retention import Retention
from weft.core.kv_cache.tiered import TieredRetention
from weft.core.policies.steps.costs import StepCosts
from weft.engine.kv_cache.ended_first import EndedFirst
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.soft_hold import SoftHold
from weft.engine.kv_cache.store import HostStore
from weft.engine.kv_cache.tiered_hold import TieredHold
from weft.engine.vllm_compat.names import BlockPool


def make_order(policy: KvPolicy, pool: BlockPool, block_tokens: int, store: HostStore | None = None) -> KvOrder:
    """What carries out a KV policy on vLLM's blocks, of a model with one kind of attention.

    Where vLLM computes hashes of parts of blocks, it keeps its order.

    Args:
        policy: A policy of its own.
        pool: vLLM's blocks.
        block_tokens: The tokens of a block.
        store: Host memory. Without a policy that orders open programs' contexts it keeps preempted calls only.
    """
    if policy.follows_use:
        return EndedFirst(pool) if policy.evicts_ended_first else KvOrder()
    if pool.hash_block_size != block_tokens:
        return KvOrder()
    memory = Memory(0.0, 0, StepCosts().prefill_token_s)
    if store is None:
        return SoftHold(pool, Retention(policy, block_tokens, memory))
    store.use_policy(policy)
    return TieredHold(pool, TieredRetention(policy, block_tokens, memory, store.tier), store)
