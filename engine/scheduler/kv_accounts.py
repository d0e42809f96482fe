"""Accounts of the KV cache: what calls found where, and what they compute though their program had computed it."""

from __future__ import annotations

from collections.abc import Hashable

from weft.core.kv_cache.contexts import ComputedBefore
from weft.core.kv_cache.stats import KvStats
from weft.engine.kv_cache.order import KvOrder
from weft.engine.kv_cache.store import HostStore
from weft.engine.scheduler.ledger import Entry
from weft.engine.vllm_compat.names import Request


class KvAccounts:
    """Counts tokens for each call, and for the engine.

    Args:
        block_tokens: The tokens of a block that has a hash.
        swap: Host memory, of slots with a block each; None: there is none.
        policy: The name of the KV policy, for the figures.
    """

    def __init__(self, block_tokens: int, swap: HostStore | None, policy: str) -> None:
        self._policy = policy
        self._block_tokens = block_tokens
        self._slot_bytes = round(swap.choice.token_bytes * swap.block_tokens) if swap is not None else 0
        self._swap = swap
        self._before = ComputedBefore()
        self._found_tokens = self._fetched_tokens = self._recomputed_tokens = 0

    def call_began(self, request: Request, entry: Entry, program: Hashable, found_tokens: int) -> None:
        """A call starts to run, or runs again, with so many of its tokens in the KV cache."""
        loaded = self._swap.loaded_tokens(request.request_id) if self._swap is not None else 0
        if request.num_preemptions > 0:
            lost = entry.lost_tokens
            entry.ledger.swapped_tokens += loaded
        else:
            # vLLM computes the last token of a prompt again in any case, and with it its block.
            most = (request.num_prompt_tokens - 1) // self._block_tokens
            lost = min(self._before.blocks(program, request.block_hashes), most) * self._block_tokens
            entry.known_tokens = lost
            entry.ledger.fetched_tokens += loaded
        again = max(0, lost - found_tokens)
        entry.ledger.recomputed_tokens += again
        self._recomputed_tokens += again
        self._fetched_tokens += loaded
        self._found_tokens += max(0, found_tokens - loaded)

    def call_left(self, request: Request, program: Hashable) -> None:
        """A call has ended, with what it has computed."""
        blocks = request.num_computed_tokens // self._block_tokens
        self._before.add(program, request.block_hashes[:blocks])

    def forget(self, program: Hashable) -> None:
        """No call of a program will come."""
        self._before.forget(program)

    def stats(self, order: KvOrder) -> KvStats:
        """What `engine.kv_stats` shows."""
        ahead_tokens = spilled_tokens = used = slots = 0
        if self._swap is not None:
            swap, ahead_tokens = self._swap.stats(), self._swap.counts.fetched_tokens
            spilled_tokens, used, slots = self._swap.counts.spilled_tokens, swap.used, swap.slots
        return KvStats(
            policy=self._policy,
            found_tokens=self._found_tokens,
            fetched_tokens=self._fetched_tokens + ahead_tokens,
            recomputed_tokens=self._recomputed_tokens,
            spilled_tokens=spilled_tokens,
            held_blocks=order.held_blocks,
            programs_held=order.programs_held,
            host_used_bytes=used * self._slot_bytes,
            host_capacity_bytes=slots * self._slot_bytes,
            tools=order.tools(),
        )
