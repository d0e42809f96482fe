"""The scheduler's side of the swap: whose KV blocks lie in which slots, and what the workers have to copy next.

Numbers only; the memory is the workers'. All of them carry out the same plans, so one table serves every shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.core.errors import SwapError
from weft.core.kv_cache.swap import SwapChoice, SwapStats
from weft.engine.kv_cache.slots import SlotTable


class Place(NamedTuple):
    """Where the copy of a block is: a slot, and the run of slots that it was allocated with."""

    slot: int
    run: int


@dataclass(slots=True)
class Copies:
    """Blocks and slots, pairwise."""

    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SwapPlan:
    """What the workers copy in one step: first out, before anything is written, then in, before the model runs."""

    out: Copies = field(default_factory=Copies)
    loads: list[Copies] = field(default_factory=list)  # one for each call that goes on


@dataclass(slots=True)
class _Saved:
    """The copy of one call's KV cache: its first `tokens` tokens."""

    tokens: int
    places: list[Place]  # of each block, in order
    waiting: bool = True  # the call is preempted; else the copy is kept in case that it is preempted again
    loaded_tokens: int = 0  # how many of them its latest resumption took from here


@dataclass(slots=True)
class _Run:
    """Slots that were allocated together, and are freed together."""

    slots: int
    saved: int = 0  # copies with slots of it
    hashes: list[Hashable] = field(default_factory=list)  # of its full blocks


class SwapPlanner:
    """Decides which calls' KV is kept, and plans the copies.

    A call's full blocks never change, so what was copied once is not copied again: neither when the call is preempted a
    second time, nor when another call has the same block (vLLM's block hashes tell). A full table never blocks: copies
    of calls that run again give way first, then those of waiting calls that are shorter than the one at hand; else the
    call is computed again.

    Args:
        slots: KV blocks that the host memory takes.
        block_tokens: tokens in a block.
        choice: from how many tokens on a call is swapped.
    """

    def __init__(self, slots: int, block_tokens: int, choice: SwapChoice) -> None:
        self.choice = choice
        self._block_tokens = block_tokens
        self._table = SlotTable(slots)
        self._saved: dict[str, _Saved] = {}  # by request, the longest kept first
        self._runs: dict[int, _Run] = {}
        self._by_hash: dict[Hashable, Place] = {}
        self._numbers = itertools.count()
        self._plan = SwapPlan()
        self._loading: set[str] = set()  # calls that the present plan loads
        self._swaps_out = self._swaps_in = self._out_tokens = self._in_tokens = 0
        self._too_short = self._too_full = self._evicted = 0

    def save(self, key: str, blocks: Sequence[int], tokens: int, hashes: Sequence[Hashable]) -> bool:
        """A call is preempted: plan to copy out what is worth it.

        Args:
            key: the call's request.
            blocks: its KV blocks, in order.
            tokens: how many tokens these hold.
            hashes: vLLM's hashes of its full blocks, as far as there are any.

        Returns:
            Whether all of it is, or will be, in host memory.
        """
        old = self._saved.get(key)
        if old is not None:
            old.waiting = True
            if old.tokens >= tokens:
                return True
        if tokens < max(1, self.choice.min_tokens):
            self._too_short += 1
            return False
        places = self._known(old, tokens, hashes)
        missing = [index for index, place in enumerate(places) if place is None]
        fresh = self._allocate(key, len(missing), tokens, {place.run for place in places if place is not None})
        if fresh is None:
            self._too_full += 1
            return False
        full = tokens // self._block_tokens
        for index, place in zip(missing, fresh, strict=True):
            places[index] = place
            self._plan.out.blocks.append(blocks[index])
            self._plan.out.slots.append(place.slot)
            self._out_tokens += min(tokens - index * self._block_tokens, self._block_tokens)
            if index < min(full, len(hashes)):
                self._by_hash[hashes[index]] = place
                self._runs[place.run].hashes.append(hashes[index])
        self._swaps_out += 1
        self._put(key, _Saved(tokens, [place for place in places if place is not None]))
        return True

    def match(self, key: str, local_tokens: int, num_tokens: int) -> int:
        """How many tokens can be loaded beyond the `local_tokens` that the device's prefix cache has. At least one of
        the call's `num_tokens` is left to compute, since the model has to run to say something."""
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
        self._plan.loads.append(Copies(list(blocks[first:last]), [place.slot for place in saved.places[first:last]]))
        self._loading.add(key)
        self._swaps_in += 1
        self._in_tokens += saved.loaded_tokens

    def loaded_tokens(self, key: str) -> int:
        """How many tokens a call's latest resumption loaded."""
        saved = self._saved.get(key)
        return 0 if saved is None else saved.loaded_tokens

    def release(self, key: str) -> None:
        """A call has ended, or its copy is void."""
        saved = self._saved.pop(key, None)
        if saved is not None:
            self._drop(saved)

    def reset(self) -> None:
        """Forget all copies: the model's weights have changed."""
        for key in list(self._saved):
            self.release(key)

    def take_plan(self) -> SwapPlan | None:
        """What the workers copy in the step that has just been scheduled; None for nothing, as in most steps."""
        if not self._plan.out.blocks and not self._plan.loads:
            return None
        plan, self._plan = self._plan, SwapPlan()
        self._loading.clear()
        return plan

    def stats(self) -> SwapStats:
        """What was done so far, and how full the host memory is."""
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
        """Raise SwapError unless every slot is free or has users, and the books agree. For tests."""
        self._table.check_integrity()
        users = dict.fromkeys(self._runs, 0)
        for saved in self._saved.values():
            for run in {place.run for place in saved.places}:
                users[run] += 1
            if len(saved.places) != -(-saved.tokens // self._block_tokens):
                raise SwapError(f"{saved.tokens} tokens in {len(saved.places)} blocks")
        if {number: run.saved for number, run in self._runs.items()} != users or not all(users.values()):
            raise SwapError(f"runs {self._runs} do not agree with their users {users}")
        if self._table.usage().owners != len(self._runs):
            raise SwapError("slots are owned by a run that is gone")
        if sum(len(run.hashes) for run in self._runs.values()) != len(self._by_hash):
            raise SwapError("the index of hashes does not agree with the runs")

    def _known(self, old: _Saved | None, tokens: int, hashes: Sequence[Hashable]) -> list[Place | None]:
        """Where each block of a call already is."""
        full = tokens // self._block_tokens
        places: list[Place | None] = [None] * -(-tokens // self._block_tokens)
        for index in range(min(full, len(hashes))):
            places[index] = self._by_hash.get(hashes[index])
        if old is not None:
            count = old.tokens // self._block_tokens
            places[:count] = old.places[:count]
        return places

    def _allocate(self, key: str, count: int, tokens: int, needed: set[int]) -> list[Place] | None:
        """`count` slots in a run of their own, or None; the runs `needed` stay."""
        if count == 0:
            return []
        number = next(self._numbers)
        slots = self._table.allocate(number, count)
        if slots is None and self._make_room(key, count, tokens, needed):
            slots = self._table.allocate(number, count)
        if slots is None:
            return None
        self._runs[number] = _Run(count)
        return [Place(slot, number) for slot in slots.tolist()]

    def _make_room(self, key: str, count: int, tokens: int, needed: set[int]) -> bool:
        """Give up the copies that are worth least until `count` slots are free; none if that is not to be had."""
        candidates = sorted(
            (saved.waiting, saved.tokens if saved.waiting else 0, order, other)
            for order, (other, saved) in enumerate(self._saved.items())
            if other != key
            and other not in self._loading
            and (not saved.waiting or saved.tokens < tokens)
            and needed.isdisjoint(place.run for place in saved.places)
        )
        free = self._table.slots - self._table.used
        users = {number: run.saved for number, run in self._runs.items()}
        chosen: list[str] = []
        for *_, other in candidates:
            chosen.append(other)
            for number in {place.run for place in self._saved[other].places}:
                users[number] -= 1
                free += self._runs[number].slots if users[number] == 0 else 0
            if free >= count:
                break
        if free < count:
            return False
        for other in chosen:
            self.release(other)
        self._evicted += len(chosen)
        return True

    def _put(self, key: str, saved: _Saved) -> None:
        for run in {place.run for place in saved.places}:
            self._runs[run].saved += 1
        self.release(key)
        self._saved[key] = saved

    def _drop(self, saved: _Saved) -> None:
        for number in {place.run for place in saved.places}:
            run = self._runs[number]
            run.saved -= 1
            if run.saved == 0:
                for block_hash in run.hashes:
                    del self._by_hash[block_hash]
                del self._runs[number]
                self._cancel(set(self._table.owned(number).tolist()))
                self._table.free(number)

    def _cancel(self, slots: set[int]) -> None:
        """Take copies to slots that are free again out of the plan: others may get them in the same step."""
        out = self._plan.out
        if not slots.isdisjoint(out.slots):
            kept = [(block, slot) for block, slot in zip(out.blocks, out.slots, strict=True) if slot not in slots]
            out.blocks, out.slots = [block for block, _ in kept], [slot for _, slot in kept]
