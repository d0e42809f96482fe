"""A KV policy in an engine that has host memory: what the device gives away is kept there, and comes back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from weft.core.kv_cache.policies import Memory
from weft.core.kv_cache.retention import RunningCall
from weft.core.kv_cache.tiered import TieredRetention
from weft.engine.kv_cache.order import CallKv, NextStep
from weft.engine.kv_cache.soft_hold import SoftHold
from weft.engine.kv_cache.spills import Spills
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import BlockPool, Request


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
        self._spills = Spills(store, retention, pool, self._block_of, self._forget_all)
        self._before: dict[Hashable, Sequence[Hashable]] = {}  # by program: the blocks of its last call

    def call_began(self, request: Request, program: Hashable, name: str, found_tokens: int, now_s: float) -> None:
        if request.request_id not in self._running:
            self._count(request, program, found_tokens)
        super().call_began(request, program, name, found_tokens, now_s)

    def program_ended(self, program: Hashable, now_s: float) -> None:
        self._before.pop(program, None)
        super().program_ended(program, now_s)

    def before_step(self, step: NextStep, now_s: float) -> None:
        """Order the device's blocks, and copy some to host memory."""
        self._store.now_s = now_s
        self._tiered.host_changed(now_s)
        super().before_step(step, now_s)
        self._spills.before_step()

    def reset(self, now_s: float) -> None:
        super().reset(now_s)
        self._spills.reset()

    @property
    def wants_step(self) -> bool:
        return self._spills.wants_step

    def _grow(self, running: RunningCall, call: CallKv, now_s: float) -> list[Hashable]:
        chain = super()._grow(running, call, now_s)
        numbers = set(call.block_ids)
        found = ((key, self._cached[key].block) for key in chain)
        self._spills.watch((key, block) for key, block in found if block.block_id in numbers)
        self._before[call.program] = chain
        return chain

    def _memory(self) -> Memory:
        return super()._memory()._replace(copy_token_s=self._store.copy_token_s)

    def _count(self, request: Request, program: Hashable, found_tokens: int) -> None:
        """What a call found, and what it computes although an earlier call of its program had computed it."""
        counts, loaded = self._store.counts, self._store.loaded_tokens(request.request_id)
        counts.found_tokens += found_tokens - loaded
        common = 0
        for before, key in zip(self._before.get(program, ()), request.block_hashes, strict=False):
            if before != key:
                break
            common += self._block_tokens
        counts.recomputed_tokens += max(0, min(common, request.num_tokens - 1) - found_tokens)
