"""Host memory as the scheduler sees it: what preempted calls and open programs have there.

The store deals in numbers only; the memory is the workers'.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from weft.core.kv_cache.config import SwapChoice
from weft.core.kv_cache.policies import Context
from weft.core.kv_cache.stats import SwapStats
from weft.core.prediction import KnownTime
from weft.engine.kv_cache.slot_plans import SlotPlans, SwapBatch


@dataclass(slots=True)
class _SavedCall:
    """The host copy of the first `tokens` tokens of a call that was preempted."""

    context: Context
    tokens: int = 0
    chain: list[Hashable] = field(default_factory=list)  # the keys of its blocks


class HostStore(SlotPlans):
    """One pool of slots for preempted calls and for the contexts of open programs.

    A full block is found by vLLM's hash of it, so what has a copy is not copied again for others. Other blocks,
    such as the last one of a preempted call, are found by their call only. Nothing waits for free slots: what is worth
    less makes way, or the KV is computed again.

    Args:
        slots: KV blocks that the host memory holds.
        block_tokens: Tokens of a block.
        choice: From how many tokens on a call is swapped.
    """

    def __init__(self, slots: int, block_tokens: int, choice: SwapChoice) -> None:
        super().__init__(slots, block_tokens, choice)
        self._saved: dict[str, _SavedCall] = {}  # by request
        self._loaded: dict[str, int] = {}  # by request: tokens that its latest start loaded
        self._brought: dict[str, int] = {}  # by request: tokens that came while it waited for them
        self._swaps_out = self._swaps_in = 0
        self._too_short = self._too_full = 0

    # -- preempted calls

    def save(self, key: str, blocks: Sequence[int], tokens: int, hashes: Sequence[Hashable]) -> bool:
        """A call is preempted: plan to copy out its KV, if it is worth a swap.

        Args:
            key: The call's request.
            blocks: The call's KV blocks, in order.
            tokens: Tokens whose KV the blocks hold.
            hashes: vLLM's hashes of the call's full blocks, from the first on; there may be fewer than full blocks.

        Returns:
            Whether the KV of all tokens is in host memory now or will be after the step.
        """
        if self._is_lost:
            return False
        saved = self._saved.get(key)
        if saved is not None and self._tokens_at(saved, 0) >= tokens:
            self._need(saved, needed=True)
            return True
        if tokens < max(1, self.choice.min_tokens):
            self._too_short += 1
            return False
        if saved is None:
            context = Context(("call", key), "", self.now_s, KnownTime(0.0))
            saved = self._saved[key] = _SavedCall(context)
        saved.tokens, saved.chain = tokens, self._chain(key, tokens, hashes)
        saved.context.used_s = saved.context.called_s = self.now_s
        saved.context.is_needed = True
        complete = self.keep(saved.context, saved.chain, dict(enumerate(blocks)), tokens)
        self._swaps_out += complete
        self._too_full += not complete
        return complete

    def match(self, key: str, hashes: Sequence[Hashable], local_tokens: int, num_tokens: int) -> int:
        """How many tokens can be loaded in addition to the `local_tokens` that the device's prefix cache has.

        At least one of the call's `num_tokens` tokens is left to compute, because only a run of the model gives the
        next token.
        """
        saved = self._saved.get(key)
        if saved is not None:
            return max(0, min(self._tokens_at(saved, local_tokens), num_tokens - 1) - local_tokens)
        first = local_tokens // self.block_tokens
        end_tokens = (first + self.ready(hashes, first)) * self.block_tokens
        return max(0, min(end_tokens, num_tokens - 1) - local_tokens)

    def resume(
        self, key: str, hashes: Sequence[Hashable], blocks: Sequence[int], start_tokens: int, end_tokens: int
    ) -> None:
        """A call runs: plan to load its tokens from `start_tokens`, a whole number of blocks, to `end_tokens`."""
        saved = self._saved.get(key)
        if saved is not None:
            self._need(saved, needed=False)
        brought, count = self._brought.pop(key, 0), max(0, end_tokens - start_tokens)
        self._loaded[key] = brought + count
        self._swaps_in += saved is not None and brought + count > 0
        self.counts.loaded_tokens += brought + count
        if not count:
            return
        chain = hashes if saved is None else saved.chain
        first, last = start_tokens // self.block_tokens, -(-end_tokens // self.block_tokens)
        self._plan.loads.append(SwapBatch(list(blocks[first:last]), self._read(chain, first, last)))
        self._readers[key] = list(blocks)

    def brought(self, key: str, tokens: int) -> None:
        """So many tokens of a call that waits were copied back for it, and are in vLLM's cache now."""
        self._brought[key] = self._brought.get(key, 0) + tokens

    def loaded_tokens(self, key: str) -> int:
        """How many tokens the latest start of a call loaded, or waited for."""
        return self._loaded.get(key, 0)

    def saved_tokens(self, key: str) -> int:
        """How many tokens of a preempted call are in host memory."""
        saved = self._saved.get(key)
        return saved.context.host_tokens if saved is not None else 0

    def release(self, key: str) -> None:
        """A call has ended, or its copy is void: free the slots that nobody else needs."""
        self._loaded.pop(key, None)
        self._brought.pop(key, None)
        saved = self._saved.pop(key, None)
        if saved is not None:
            self.tier.drop(saved.context)

    def reset(self) -> None:
        for key in list(self._saved):
            self.release(key)
        super().reset()

    def stats(self) -> SwapStats:
        """What the swap has done so far, and how full the host memory is."""
        usage, speed = self._table.usage(), self.choice.copy_speed
        return SwapStats(
            usage.slots,
            usage.used,
            usage.peak,
            self._swaps_out,
            self._swaps_in,
            self.counts.spilled_tokens,
            self.counts.loaded_tokens,
            self._too_short,
            self._too_full,
            self._evicted,
            self._failed,
            self.choice.min_tokens,
            self.choice.prefill_tokens_per_s,
            speed and speed.out_bytes_per_s,
            speed and speed.in_bytes_per_s,
        )

    def _chain(self, key: str, tokens: int, hashes: Sequence[Hashable]) -> list[Hashable]:
        """The keys of a call's blocks. Those without a hash are known by their call."""
        full, tail = divmod(tokens, self.block_tokens)
        chain = list(hashes[:full])
        chain += [(key, index) for index in range(len(chain), full)]
        return [*chain, (key, full, tail)] if tail else chain

    def _tokens_at(self, saved: _SavedCall, local_tokens: int) -> int:
        """Up to which token a saved call can be loaded, if the device has `local_tokens`."""
        first = local_tokens // self.block_tokens
        return min(saved.tokens, (first + self.ready(saved.chain, first)) * self.block_tokens)

    def _need(self, saved: _SavedCall, *, needed: bool) -> None:
        saved.context.is_needed = needed
        self.tier.rank_again([saved.context])
