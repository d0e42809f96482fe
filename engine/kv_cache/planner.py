"""The scheduler's side of the swap: which KV blocks lie in which slots, and what the workers have to copy next.

The planner deals in numbers only; the memory is the workers'. Every worker carries out the same plans on its shard, so
one table of slots serves all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.errors import SwapError
from weft.core.kv_cache.choice import SwapChoice
from weft.core.kv_cache.eviction import HostCopy, copies_to_evict
from weft.core.kv_cache.stats import SwapStats
from weft.engine.kv_cache.plan import SwapBatch, SwapPlan
from weft.engine.kv_cache.slots import SlotTable


class SlotRef(NamedTuple):
    """Where the host copy of a block lies."""

    slot: int
    extent: int  # number of the extent that the slot was allocated in


@dataclass(slots=True)
class _SavedCall:
    """The host copy of the first `tokens` tokens of one call."""

    tokens: int
    slot_refs: list[SlotRef]  # of each block, in order
    waiting: bool = True  # the call is preempted; otherwise it runs, and the copy is kept for its next preemption
    loaded_tokens: int = 0  # tokens that the call's latest resumption loaded from this copy
    extents: frozenset[int] = field(init=False)  # numbers of the extents that the slots lie in

    def __post_init__(self) -> None:
        self.extents = frozenset(ref.extent for ref in self.slot_refs)


@dataclass(slots=True)
class _Extent:
    """Slots that were allocated together, and are freed together."""

    slots: int
    calls: int = 0  # saved calls with slots in it
    hashes: list[Hashable] = field(default_factory=list)  # of its full blocks


class SwapPlanner:
    """Decides which calls' KV is kept in host memory, and plans the copies.

    A full block never changes, so a block that has a host copy is not copied again: neither when its call is preempted
    a second time, nor when another call has the same block, which vLLM's block hashes tell. A preemption never waits
    for free slots. If there are too few, other copies are given up (`copies_to_evict`), or the call is computed again.

    Args:
        slots: KV blocks that the host memory holds.
        block_tokens: tokens in a block.
        choice: from how many tokens on a call is swapped.
    """

    def __init__(self, slots: int, block_tokens: int, choice: SwapChoice) -> None:
        self.choice = choice
        self._block_tokens = block_tokens
        self._table = SlotTable(slots)  # its owners are the numbers of extents
        self._saved: dict[str, _SavedCall] = {}  # by request, the oldest copy first
        self._extents: dict[int, _Extent] = {}
        self._by_hash: dict[Hashable, SlotRef] = {}
        self._extent_numbers = itertools.count()
        self._plan = SwapPlan()
        self._loading: set[str] = set()  # calls that the present plan loads
        self._swaps_out = self._swaps_in = self._out_tokens = self._in_tokens = 0
        self._too_short = self._too_full = self._evicted = 0

    def save(self, key: str, blocks: Sequence[int], tokens: int, hashes: Sequence[Hashable]) -> bool:
        """A call is preempted: plan to copy out its KV, if it is worth a swap and slots can be had.

        Args:
            key: the call's request.
            blocks: the call's KV blocks, in order.
            tokens: tokens whose KV the blocks hold.
            hashes: vLLM's hashes of the call's full blocks, from the first on; there may be fewer than full blocks.

        Returns:
            Whether the KV of all tokens is in host memory now or will be after the step.
        """
        old = self._saved.get(key)
        if old is not None:
            old.waiting = True
            if old.tokens >= tokens:
                return True
        if tokens < max(1, self.choice.min_tokens):
            self._too_short += 1
            return False
        refs = self._find_copied(old, tokens, hashes)
        missing = [index for index, ref in enumerate(refs) if ref is None]
        fresh = self._allocate(key, len(missing), tokens, {ref.extent for ref in refs if ref is not None})
        if fresh is None:
            self._too_full += 1
            return False
        full_blocks = tokens // self._block_tokens
        for index, ref in zip(missing, fresh, strict=True):
            refs[index] = ref
            self._plan.out.blocks.append(blocks[index])
            self._plan.out.slots.append(ref.slot)
            self._out_tokens += min(tokens - index * self._block_tokens, self._block_tokens)
            if index < min(full_blocks, len(hashes)):
                self._by_hash[hashes[index]] = ref
                self._extents[ref.extent].hashes.append(hashes[index])
        self._swaps_out += 1
        self._replace(key, _SavedCall(tokens, [ref for ref in refs if ref is not None]))
        return True

    def match(self, key: str, local_tokens: int, num_tokens: int) -> int:
        """How many tokens can be loaded in addition to the `local_tokens` that the device's prefix cache has.

        At least one of the call's `num_tokens` tokens is left to compute, because only a run of the model gives the
        next token.
        """
        saved = self._saved.get(key)
        return 0 if saved is None else max(0, min(saved.tokens, num_tokens - 1) - local_tokens)

    def resume(self, key: str, blocks: Sequence[int], start_tokens: int, end_tokens: int) -> None:
        """A call runs again: plan to load its tokens from `start_tokens`, a whole number of blocks, to `end_tokens`."""
        saved = self._saved.get(key)
        if saved is None:
            return
        saved.waiting = False
        saved.loaded_tokens = end_tokens - start_tokens
        if saved.loaded_tokens <= 0:
            return
        first, last = start_tokens // self._block_tokens, -(-end_tokens // self._block_tokens)
        self._plan.loads.append(SwapBatch(list(blocks[first:last]), [ref.slot for ref in saved.slot_refs[first:last]]))
        self._loading.add(key)
        self._swaps_in += 1
        self._in_tokens += saved.loaded_tokens

    def loaded_tokens(self, key: str) -> int:
        """How many tokens the latest resumption of a call loaded."""
        saved = self._saved.get(key)
        return 0 if saved is None else saved.loaded_tokens

    def release(self, key: str) -> None:
        """A call has ended, or its copy is void: free the slots that no other call uses."""
        saved = self._saved.pop(key, None)
        if saved is None:
            return
        for number in saved.extents:
            extent = self._extents[number]
            extent.calls -= 1
            if extent.calls == 0:
                self._free(number)

    def reset(self) -> None:
        """Forget all copies: the model's weights have changed."""
        for key in list(self._saved):
            self.release(key)

    def take_plan(self) -> SwapPlan | None:
        """What the workers copy in the step that has just been scheduled; None if nothing, as in most steps."""
        if not self._plan.out.blocks and not self._plan.loads:
            return None
        plan, self._plan = self._plan, SwapPlan()
        self._loading.clear()
        return plan

    def stats(self) -> SwapStats:
        """What the swap has done so far, and how full the host memory is."""
        usage, speed = self._table.usage(), self.choice.copy_speed
        return SwapStats(
            usage.slots,
            usage.used,
            usage.peak,
            self._swaps_out,
            self._swaps_in,
            self._out_tokens,
            self._in_tokens,
            self._too_short,
            self._too_full,
            self._evicted,
            self.choice.min_tokens,
            self.choice.prefill_tokens_per_s,
            speed and speed.out_bytes_per_s,
            speed and speed.in_bytes_per_s,
        )

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or used by a saved call, and all counts agree. For tests."""
        self._table.check_integrity()
        users = dict.fromkeys(self._extents, 0)
        for saved in self._saved.values():
            for extent in {ref.extent for ref in saved.slot_refs}:
                users[extent] += 1
            if len(saved.slot_refs) != -(-saved.tokens // self._block_tokens):
                raise SwapError(f"a copy of {saved.tokens} tokens has {len(saved.slot_refs)} blocks")
        if {number: extent.calls for number, extent in self._extents.items()} != users or not all(users.values()):
            raise SwapError(f"the extents {self._extents} do not agree with the calls that use them: {users}")
        if self._table.usage().owners != len(self._extents):
            raise SwapError("slots are owned by an extent that does not exist")
        if sum(len(extent.hashes) for extent in self._extents.values()) != len(self._by_hash):
            raise SwapError("the index of block hashes does not agree with the extents")

    def _find_copied(self, old: _SavedCall | None, tokens: int, hashes: Sequence[Hashable]) -> list[SlotRef | None]:
        """Where the host copy of each block of a call lies; None for blocks that have no copy yet."""
        full_blocks = tokens // self._block_tokens
        refs: list[SlotRef | None] = [None] * -(-tokens // self._block_tokens)
        for index in range(min(full_blocks, len(hashes))):
            refs[index] = self._by_hash.get(hashes[index])
        if old is not None:
            count = old.tokens // self._block_tokens
            refs[:count] = old.slot_refs[:count]
        return refs

    def _allocate(self, key: str, count: int, tokens: int, reused: set[int]) -> list[SlotRef] | None:
        """Allocate an extent of `count` slots for a call of `tokens` tokens; None if too few slots can be had.

        Copies that share one of the `reused` extents are not given up for it.
        """
        if count == 0:
            return []
        number = next(self._extent_numbers)
        slots = self._table.allocate(number, count)
        if slots is None and self._evict(key, count, tokens, reused):
            slots = self._table.allocate(number, count)
        if slots is None:
            return None
        self._extents[number] = _Extent(count)
        return [SlotRef(slot, number) for slot in slots.tolist()]

    def _evict(self, key: str, count: int, tokens: int, reused: set[int]) -> bool:
        """Give up copies until `count` slots are free. Gives up none, and returns False, if that is impossible."""
        evicted = copies_to_evict(
            [
                HostCopy(
                    call=other,
                    tokens=saved.tokens,
                    waiting=saved.waiting,
                    pinned=other == key or other in self._loading or not reused.isdisjoint(saved.extents),
                    extents=saved.extents,
                )
                for other, saved in self._saved.items()
            ],
            {number: extent.slots for number, extent in self._extents.items()},
            tokens=tokens,
            free_slots=self._table.slots - self._table.used,
            needed_slots=count,
        )
        if evicted is None:
            return False
        for other in evicted:
            self.release(other)
        self._evicted += len(evicted)
        return True

    def _replace(self, key: str, saved: _SavedCall) -> None:
        """Save a call. `saved` replaces the call's older copy, if there is one."""
        for number in saved.extents:
            self._extents[number].calls += 1  # before the older copy goes, because both may share extents
        self.release(key)
        self._saved[key] = saved

    def _free(self, number: int) -> None:
        """Free the slots of an extent that no saved call uses any more."""
        for block_hash in self._extents.pop(number).hashes:
            del self._by_hash[block_hash]
        self._cancel_copies_to(set(self._table.owned(number).tolist()))
        self._table.free(number)

    def _cancel_copies_to(self, slots: set[int]) -> None:
        """Take copies to `slots` out of the plan: the slots are free, and another call may get them in this step."""
        out = self._plan.out
        if not slots.isdisjoint(out.slots):
            kept = [(block, slot) for block, slot in zip(out.blocks, out.slots, strict=True) if slot not in slots]
            out.blocks, out.slots = [block for block, _ in kept], [slot for _, slot in kept]
