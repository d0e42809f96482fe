"""A KV policy in an engine that has host memory: what the device gives away is kept there, and comes back."""

from __future__ import annotations

import math
from collections.abc import Hashable

from weft.core.kv_cache.policies import KvPolicy, Memory
from weft.core.kv_cache.retention import Retention, RunningCall
from weft.core.kv_cache.tiered import TieredRetention
from weft.core.policies.steps import StepCosts
from weft.engine.kv_cache.ahead import Fetches, Spills
from weft.engine.kv_cache.order import CallKv, EndedFirstOrder, KvOrder, NextStep
from weft.engine.kv_cache.soft_hold import SoftHold
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import BlockPool, KVCacheBlock, Request


class TieredHold(SoftHold):
    """A soft hold with host memory behind it.

    Args:
        pool: vLLM's blocks, of a model with one kind of attention.
        retention: What the policy says, of the store's host memory too.
        store: Host memory.
    """

    def __init__(self, pool: BlockPool, retention: TieredRetention, store: HostStore) -> None:
        super().__init__(pool, retention)
        self._tiered = retention
        self._store = store
        self.host_tokens = store.capacity_tokens
        self._spills = Spills(store, retention, pool, self._block_of, self._forget_all)
        self._fetches = Fetches(
            store,
            retention,
            pool,
            block_of=self._block_of,
            note=self._note,
            spare=self._note_spare,
            make_room=self._move,
        )

    def before_step(self, step: NextStep, now_s: float) -> None:
        """Order the device's blocks, and copy some to host memory and back."""
        self._store.now_s = now_s
        if self._is_idle(step):
            self._prepared_s = -math.inf  # such a step delays nobody
        super().before_step(step, now_s)
        self._fetches.let_go_if_short(self._most_blocks)

    def while_step_runs(self, step: NextStep, now_s: float) -> None:
        self._store.now_s = now_s
        super().while_step_runs(step, now_s)

    def _prepare(self, step: NextStep, now_s: float) -> None:
        self._spills.forget_reused()
        if self._tiered.host_changed():
            self._order_changed()
        super()._prepare(step, now_s)
        if self._spills.plan(self._most_blocks):
            self._order_changed()
        if self._fetches.plan(self._most_blocks, self._running.values(), is_idle=self._is_idle(step)):
            self._has_changed = True  # it took blocks from the front

    def _is_idle(self, step: NextStep) -> bool:
        return not self._running and next(step.queue(), None) is None

    def loads_beside(self, request: Request, found_tokens: int, spared_blocks: int, now_s: float) -> bool:
        self._store.now_s = now_s
        first, last = found_tokens // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        spared_blocks += -(-request.num_tokens // self._block_tokens) - last  # it takes the others now or soon
        waits = self._fetches.load(request.request_id, request.block_hashes[:last], first, spared_blocks)
        self._has_changed = self._has_changed or waits  # it took blocks from the front
        return waits

    @property
    def calls_loading(self) -> int:
        return self._fetches.calls_waiting

    def is_loading(self, request_id: str) -> bool:
        return self._fetches.is_awaited_by(request_id)

    def call_began(
        self, request: Request, program: Hashable, name: str, found_tokens: int, now_s: float, *, level: int = 0
    ) -> None:
        super().call_began(request, program, name, found_tokens, now_s, level=level)
        self._fetches.call_began(request.request_id)

    def call_left(self, call: CallKv, now_s: float) -> None:
        super().call_left(call, now_s)
        self._fetches.call_left(call.request.request_id)
        self._fetches.looks = True  # there is more room

    def call_preempted(self, call: CallKv, now_s: float) -> None:
        super().call_preempted(call, now_s)
        self._fetches.looks = True

    def program_ended(self, program: Hashable, now_s: float) -> None:
        self._tiered.keeps_ended = self._store.copies_beside
        super().program_ended(program, now_s)
        self._fetches.looks = True

    def let_go(self) -> None:
        self._fetches.let_go()

    def reset(self, now_s: float) -> None:
        super().reset(now_s)
        self._spills.reset()

    @property
    def wants_step(self) -> bool:
        return self._spills.wants_step or self._fetches.wants_step

    def tokens_of(self, program: Hashable) -> tuple[int, int] | None:
        return self.retention.tree.tokens_of(program), self._tiered.host.tree.tokens_of(program)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._fetches.check_integrity()

    def _context_changed(self, program: Hashable) -> None:
        super()._context_changed(program)
        self._fetches.looks = True

    def _grow(self, running: RunningCall, call: CallKv, now_s: float) -> list[Hashable]:
        chain = super()._grow(running, call, now_s)
        numbers = set(call.block_ids)
        found = [(key, self._cached[key].block) for key in chain]
        self._spills.watch([(key, block) for key, block in found if block.block_id in numbers])
        return chain

    def _note_spare(self, key: Hashable, block: KVCacheBlock) -> None:
        """Nobody is known to need what a block holds, unless a call that ran since has left it."""
        at = self._cached.get(key)
        if at is None or at.block is not block:
            self._spare[block.block_id] = block.block_hash

    def _memory(self) -> Memory:
        return super()._memory()._replace(copy_token_s=self._store.copy_token_s)


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
        return EndedFirstOrder(pool) if policy.evicts_ended_first else KvOrder()
    if pool.hash_block_size != block_tokens:
        return KvOrder()
    memory = Memory(0.0, 0, StepCosts().prefill_token_s)
    if store is None:
        return SoftHold(pool, Retention(policy, block_tokens, memory))
    store.use_policy(policy)
    return TieredHold(pool, TieredRetention(policy, block_tokens, memory, store.tier), store)
