"""Host memory as the scheduler sees it: what preempted calls and open programs have there.

The store deals in numbers only; the memory is the workers'.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft.core.errors import SwapError
from weft.core.kv_cache.config import SwapChoice
from weft.core.kv_cache.host_tier import HostTier, Longest
from weft.core.kv_cache.policies import Context, KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block
from weft.core.kv_cache.stats import KvCounts, SwapStats
from weft.core.policies.steps import StepCosts
from weft.core.prediction import KnownTime
from weft.engine.kv_cache.pool import SlotTable
from weft.engine.kv_cache.shared import Found, SharedIndex
from weft.engine.kv_cache.slot_plans import Executed, SwapBatch, SwapPlan


@dataclass(slots=True)
class _Sent:
    """A plan whose report is not there yet."""

    number: int
    keys: dict[int, Hashable]  # of the blocks that it copies out, by slot
    readers: dict[str, list[int]]  # the calls that it loads, with all their blocks
    left: list[tuple[str, list[int]]] = field(default_factory=list)  # the calls that have left since, with theirs


@dataclass(slots=True)
class _Beside:
    """What a plan copies beside steps, and has not been reported by all workers."""

    number: int
    plan: SwapPlan
    keys: dict[int, Hashable]  # of the blocks that it copies out, by slot
    workers_left: int
    failed: Executed
    is_awaited: bool = False  # whether a step has waited for it, so that nothing can go wrong with later ones


@dataclass(slots=True)
class _SavedCall:
    """The host copy of the first `tokens` tokens of a call that was preempted."""

    context: Context
    tokens: int = 0
    chain: list[Hashable] = field(default_factory=list)  # the keys of its blocks


class StoreEvents(Protocol):
    """Hears of plans, because it has the device's blocks that they read and write."""

    def step_formed(self) -> None:
        """A plan is about to be handed out. vLLM has allocated the blocks of the step."""

    def copies_reported(self) -> None:
        """The workers have reported on a plan."""

    def let_go(self) -> None:
        """No fetch may be used whose report is not there, and those not yet sent will not be."""


class HostStore:
    """One pool of slots for preempted calls and for the contexts of open programs, by the keys of their blocks.

    A full block is found by vLLM's hash of it, so what has a copy is not copied again for others. Other blocks,
    such as the last one of a preempted call, are found by their call only. Nothing waits for free slots: what is worth
    less makes way, or the KV is computed again.

    A copy is used once the reports of all plans before its own are there, and one that was made beside steps once its
    own is, too. So a copy of a block that could not be loaded is never used. Each worker answers for its own failures:
    a slot that it could not write is a slot that it cannot load, and vLLM computes what was not loaded.

    Attributes:
        now_s: The time on the scheduler's clock, which the caller keeps.
        workers: How many report on each plan.
        copies_beside: Whether their copies can run beside steps. Otherwise each plan is done with its own step.
        tier: Whose the blocks are, and which go first.
        shared: What other replicas have in host memory; None: this one shares nothing.
    """

    def __init__(self, slots: int, block_tokens: int, choice: SwapChoice) -> None:
        self.choice = choice
        self.counts = KvCounts()
        self.now_s = 0.0
        self.events: StoreEvents | None = None
        self.block_tokens = block_tokens
        self.capacity_tokens = slots * block_tokens
        self._table = SlotTable(slots)
        self._is_lost = False  # the memory
        self.workers = 1
        self.copies_beside = False
        self._plan_of: dict[int, int] = {}  # by slot: the number of the plan that writes it
        self._plan = SwapPlan(number=1)
        self._out: dict[int, tuple[int, Hashable]] = {}  # what the present plan copies out: by slot, block and key
        self._spill: dict[int, tuple[int, Hashable]] = {}  # and beside its step
        self._fetch: dict[int, int] = {}  # what it fetches: by slot, the block
        self._for_calls = 0  # how many of these calls wait for
        self._readers: dict[str, list[int]] = {}  # the calls that it loads, with all their blocks
        self._reading: list[Block] = []  # the ends of the chains that it reads
        self._sent: deque[_Sent] = deque()
        self._beside: deque[_Beside] = deque()
        self._going_out: dict[int, int] = {}  # by slot that is written beside steps: the number of the plan
        self._waits_for = 0  # up to which plan the next step waits for such copies
        self._reported = 0
        self._evicted = 0
        self._failed = 0
        self.tier = self._new_tier(Longest())
        self._saved: dict[str, _SavedCall] = {}  # by request
        self._loaded: dict[str, int] = {}  # by request: tokens that its latest start loaded
        self._brought: dict[str, int] = {}  # by request: tokens that came while it waited for them
        self._swaps_out = self._swaps_in = 0
        self._too_short = self._too_full = 0
        self.shared: SharedIndex | None = None
        self._has_looked = False  # in this step
        self._found: dict[Hashable, Found] = {}  # by key: what a call may load in this step from other replicas
        self._unpublished: deque[tuple[int, int, Hashable]] = deque()  # the number of the plan, slot and key

    def use_policy(self, policy: KvPolicy) -> None:
        """What is kept is for this policy to say from now on. Forgets everything."""
        self._forget()
        self.tier = self._new_tier(policy)

    def _new_tier(self, policy: KvPolicy) -> HostTier:
        return HostTier(policy, self.block_tokens, Memory(0.0, 0, StepCosts().prefill_token_s), self._free)

    @property
    def slots(self) -> int:
        """KV blocks that the host memory holds."""
        return self._table.slots

    @property
    def copy_token_s(self) -> float:
        """Seconds to copy a token one way; infinite as long as that is not known, or if there is no memory."""
        speed = self.choice.copy_speed
        if speed is None or self._is_lost:
            return math.inf
        return self.choice.token_bytes / min(speed.out_bytes_per_s, speed.in_bytes_per_s)

    # -- copies

    def keep(
        self,
        context: Context,
        chain: Sequence[Hashable],
        blocks: Mapping[int, int],
        tokens: int | None = None,
        *,
        beside: bool = False,
    ) -> bool:
        """Have the blocks of a context in host memory: plan to copy out those that are not there yet. Returns whether
        all of `blocks` are there, or will be once they are copied.

        Args:
            context: The context. It ends at the end of the chain from now on.
            chain: The keys of its blocks, the first one first.
            blocks: The device's blocks, by index in the chain. The others stay gaps.
            tokens: The tokens in all its blocks; None: the last one is full.
            beside: Whether the copies may run beside steps. Then `hurry` tells of blocks that a step overwrites.
        """
        if self._is_lost:
            return False
        end = self.tier.put(context, chain, self.now_s)
        missing = [index for index in sorted(blocks) if index < len(chain) and chain[index] not in self.tier.slots]
        lacking = len(missing) - self._free_slots
        if lacking > 0:
            rank = self.tier.rank_of(context, self.now_s)
            self._evicted += self.tier.evict(lacking, rank, self.now_s)
        count = min(len(missing), self._free_slots)
        slots = self._table.allocate(count) if count else None
        for index, slot in zip(missing, slots or (), strict=False):
            if self.shared is not None:
                self.shared.withdraw(slot)
            self.tier.slots[chain[index]] = slot
            self._plan_of[slot] = self._plan.number
            (self._spill if beside else self._out)[slot] = blocks[index], chain[index]
            if beside:
                self._going_out[slot] = self._plan.number
            copied = self.block_tokens if tokens is None else min(self.block_tokens, tokens - index * self.block_tokens)
            self.counts.spilled_tokens += copied
        self.tier.unpin(end)
        return count == len(missing)

    def ready(self, chain: Sequence[Hashable], first: int = 0) -> int:
        """How many blocks of a chain can be loaded in this step, from index `first` on."""
        count = 0
        for index in range(first, len(chain)):
            slot = self.tier.slots.get(chain[index])
            if slot is None or slot in self._going_out or self._plan_of[slot] > self._reported + 1:
                break
            count += 1
        return count

    def fetch(
        self, chain: Sequence[Hashable], first: int, blocks: Sequence[int], *, for_call: bool = False
    ) -> tuple[int, list[int]]:
        """Plan to copy blocks back for a call that is expected, or that waits for it (`for_call`). They are valid once
        the plan is `copied`, if `has_kept` holds then. Returns the number of the plan, and the slots, which no other
        fetch of the plan may have."""
        slots = self._read(chain, first, first + len(blocks))
        self._fetch.update(zip(slots, blocks, strict=True))
        self._for_calls += for_call * len(slots)
        return self._plan.number, slots

    def has_kept(self, chain: Sequence[Hashable], slots: Sequence[int], number: int) -> bool:
        """Whether these slots have held the blocks of a chain since before plan `number` read them."""
        return all(
            self.tier.slots.get(key) == slot and self._plan_of[slot] <= number
            for key, slot in zip(chain, slots, strict=True)
        )

    @property
    def to_fetch(self) -> set[int]:
        """The blocks that the present plan fetches into."""
        return set(self._fetch.values())

    def hurry(self, is_overwritten: Callable[[int], bool]) -> None:
        """The step overwrites blocks. Those that the present plan copies out beside it are copied before it, and it
        waits for those that are being copied out.

        Args:
            is_overwritten: By block, whether the step overwrites it, or has given it to a call.
        """
        for slot in [slot for slot, (block, _) in self._spill.items() if is_overwritten(block)]:
            self._out[slot] = self._spill.pop(slot)
            del self._going_out[slot]
        for each in self._beside:
            if any(map(is_overwritten, each.plan.spill.blocks)):
                self.wait_for(each.number)

    def wait_for(self, number: int) -> None:
        """The next step waits for the copies beside steps up to this plan, because it may use the blocks that these
        write, or overwrite those that they read."""
        if any(each.number == number and not each.is_awaited for each in self._beside):
            self._waits_for = max(self._waits_for, number)

    def withdraw_fetches(self, slots: Iterable[int]) -> None:
        """What the present plan was to fetch from these slots has no place any more. It is not copied."""
        for slot in slots:
            self._fetch.pop(slot, None)

    def _void_fetches(self) -> None:
        self._fetch.clear()
        if self.events is not None:
            self.events.let_go()

    def _read(self, chain: Sequence[Hashable], first: int, last: int) -> list[int]:
        """The slots of blocks. What this replica has of them is not given up before the plan is handed out."""
        known = (block for key in reversed(chain[first:last]) if (block := self.tier.tree.get(key)) is not None)
        block = next(known, None)
        if block is not None:
            self.tier.tree.pin(block)
            self._reading.append(block)
        slots = []
        for key in chain[first:last]:
            found = self._found.get(key)
            if found is not None:
                self._plan.generations[found.slot] = found.generation
            slots.append(self.tier.slots[key] if found is None else found.slot)
        return slots

    # -- plans

    @property
    def next_plan(self) -> int:
        """The number of the plan that is being made."""
        return self._plan.number

    def take_plan(self) -> SwapPlan | None:
        """What the workers copy in the step that has just been scheduled; None if nothing, as in most steps."""
        if self.events is not None:
            self.events.step_formed()
        self._found.clear()
        self._has_looked = False
        if not self._has_plan:
            if self._reading:
                self._begin_plan(self._plan.number)
            return None
        plan = self._plan
        plan.fetch = SwapBatch(list(self._fetch.values()), list(self._fetch))
        self.counts.fetched_tokens += max(0, len(self._fetch) - self._for_calls) * self.block_tokens
        plan.out = SwapBatch([block for block, _ in self._out.values()], list(self._out))
        plan.spill = SwapBatch([block for block, _ in self._spill.values()], list(self._spill))
        plan.waits_for, self._waits_for = max(self._waits_for, self._latest_in_the_way(plan)), 0
        for each in self._beside:
            each.is_awaited = each.is_awaited or each.number <= plan.waits_for
        self._sent.append(_Sent(plan.number, {slot: key for slot, (_, key) in self._out.items()}, self._readers))
        if self.shared is not None:
            written = (*self._out.items(), *self._spill.items())
            self._unpublished += [(plan.number, slot, key) for slot, (_, key) in written]
        if plan.spill.slots or plan.fetch.slots:
            keys = {slot: key for slot, (_, key) in self._spill.items()}
            self._beside.append(_Beside(plan.number, plan, keys, self.workers, Executed(plan.number)))
        self._begin_plan(plan.number + 1)
        return plan

    @property
    def _has_plan(self) -> bool:
        return bool(self._out or self._spill or self._fetch or self._plan.loads or self._waits_for)

    def _latest_in_the_way(self, plan: SwapPlan) -> int:
        """The latest plan that reads or writes slots beside steps which this one writes, since they were given up."""
        written, used = plan.written_slots, plan.written_slots | plan.read_slots
        for each in reversed(self._beside):
            is_free = written.isdisjoint(each.plan.fetch.slots) and used.isdisjoint(each.plan.spill.slots)
            if not (is_free or each.is_awaited):
                return each.number
        return 0

    def _begin_plan(self, number: int) -> None:
        self._plan, self._for_calls = SwapPlan(number=number), 0
        self._out, self._spill, self._fetch, self._readers = {}, {}, {}, {}
        reading, self._reading = self._reading, []
        for block in reading:
            self.tier.unpin(block)

    @property
    def awaits_report(self) -> bool:
        """Whether the workers have not reported on a plan yet, or there is one that they do not have, or one whose
        fetches were withdrawn, and whose slots the next step gives up."""
        return bool(self._sent or self._beside or self._reading) or self._has_plan

    @property
    def under_way(self) -> int:
        """The number of the latest plan whose copies beside steps are under way; 0 if none are."""
        return self._beside[-1].number if self._beside else 0

    @property
    def spilling(self) -> list[int]:
        """The blocks that are copied out beside steps, those of the present plan included."""
        sent = [block for each in self._beside for block in each.plan.spill.blocks] if self._beside else []
        return sent + [block for block, _ in self._spill.values()] if self._spill else sent

    @property
    def copied(self) -> int:
        """The number of the latest plan of which all copies are done, as those of all plans before."""
        return min(self._reported, self._beside[0].number - 1) if self._beside else self._reported

    def executed(self, report: Executed) -> None:
        """The workers have carried out a plan. What they could not copy is forgotten. What they refused to read stays,
        and nothing that it was to be read into is valid."""
        self._reported = max(self._reported, report.number)
        lost = {*report.lost, *report.unread}
        self._failed += len(lost) + len(report.refused)
        while self._sent and self._sent[0].number <= report.number:
            for slot, key in self._sent.popleft().keys.items():
                if slot in lost:
                    self._lose(slot, key)
        self._lose_unread(report.unread, report.number)
        if report.unread or report.refused:
            self.void()
        if self.shared is not None:
            for slot in report.refused:
                self.shared.forget(slot)
        self._publish()
        if self.events is not None:
            self.events.copies_reported()

    def _publish(self) -> None:
        """Other replicas may read what has been copied for good."""
        while self._unpublished and self._unpublished[0][0] <= self.copied:
            number, slot, key = self._unpublished.popleft()
            if self.shared is not None and self.tier.slots.get(key) == slot and self._plan_of[slot] == number:
                self.shared.publish(slot, key)

    def copied_beside(self, report: Executed) -> None:
        """A worker has made the copies of a plan that run beside steps."""
        for each in self._beside:
            if each.number == report.number:
                each.workers_left -= 1
                each.failed = each.failed.together(report)
        while self._beside and not self._beside[0].workers_left:
            done = self._beside.popleft()
            for slot, key in done.keys.items():
                if self._going_out.get(slot) == done.number:
                    del self._going_out[slot]
                    if slot in done.failed.lost:
                        self._lose(slot, key)
            self._lose_unread(done.failed.unread, done.number)
            self._failed += len({*done.failed.lost, *done.failed.unread}) + len(done.failed.refused)
            if done.failed.refused:
                self._void_fetches()
        self._publish()
        if self.events is not None:
            self.events.copies_reported()

    def left(self, key: str, blocks: Callable[[], Sequence[int]]) -> None:
        """A call runs no longer. It may have read, or computed from, blocks whose copies turn out to have failed.

        Args:
            blocks: Gives the device's blocks that it had. Called only while the workers load.
        """
        if any(sent.readers for sent in self._sent):
            self._sent[-1].left.append((key, list(blocks())))

    @property
    def readers(self) -> list[tuple[str, list[int]]]:
        """The calls that the workers load, or that have left since, with the blocks that they had then."""
        return [each for sent in self._sent for each in (*sent.readers.items(), *sent.left)]

    def void(self) -> None:
        """Blocks hold no valid KV: no copy is used that was made since, and could be one of theirs."""
        unsent = {slot: key for slot, (_, key) in (*self._out.items(), *self._spill.items())}
        sent = (each.keys for each in self._sent)
        for keys in (*sent, *(each.keys for each in self._beside), unsent):
            for slot, key in keys.items():
                self._lose(slot, key)

    def _lose_unread(self, slots: Sequence[int], number: int) -> None:
        """Plan `number` could not read these slots. What was written into them since then stays."""
        by_slot = {slot: key for key, slot in self.tier.slots.items()} if slots else {}
        for slot in slots:
            if slot in by_slot and self._plan_of[slot] <= number:
                self._lose(slot, by_slot[slot])

    def _lose(self, slot: int, key: Hashable) -> None:
        if self.tier.slots.get(key) == slot:
            self.tier.lose(key)

    def reset(self) -> None:
        """Forget all copies, and all that is planned: the model's weights have changed. Those of other replicas may not
        have, so nothing is shared from now on."""
        if self.shared is not None:
            self.shared.leave()
        self._found.clear()
        self._forget()

    def _forget(self) -> None:
        for key in list(self._saved):
            self.release(key)
        self._void_fetches()
        self._begin_plan(self._plan.number)
        for program in list(self.tier.tree.programs):
            for context in self.tier.tree.contexts_of(program):
                self.tier.drop(context)

    def memory_lost(self) -> None:
        """A worker has no host memory: nothing is kept any more."""
        self._is_lost = True
        self.reset()

    @property
    def _free_slots(self) -> int:
        return self._table.slots - self._table.used

    def _free(self, slot: int) -> None:
        """A slot is free. If the present plan was to write it, another block may get it in this step."""
        self._out.pop(slot, None)
        self._spill.pop(slot, None)
        self._going_out.pop(slot, None)
        if slot in self._fetch:  # the copy was lost after the fetch was planned
            self._void_fetches()
        del self._plan_of[slot]
        self._table.free(slot)

    # -- preempted calls

    def save(self, key: str, blocks: Sequence[int], tokens: int, hashes: Sequence[Hashable]) -> bool:
        """A call is preempted: plan to copy out its KV, if it is worth a swap. Returns whether the KV of all tokens is
        in host memory now or will be after the step.

        Args:
            tokens: Tokens whose KV the blocks hold.
            hashes: vLLM's hashes of the call's full blocks, from the first on; there may be fewer than full blocks.
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
        end_tokens = self._loadable(hashes, local_tokens // self.block_tokens) * self.block_tokens
        return max(0, min(end_tokens, num_tokens - 1) - local_tokens)

    def _loadable(self, chain: Sequence[Hashable], first: int) -> int:
        """Up to which block a chain can be loaded in this step, from index `first` on: from this replica's host memory,
        or from that of others."""
        last = first + self.ready(chain, first)
        while self.shared is not None and last < len(chain):
            if not self._has_looked:
                self.shared.look(self.now_s)
                self._has_looked = True
            found = self._found.get(chain[last]) or self.shared.find(chain[last])
            if found is None:
                break
            self._found[chain[last]] = found
            last += 1 + self.ready(chain, last + 1)
        return last

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
        slots = self._read(chain, first, last)
        self.counts.moved_tokens += sum(slot >= self.slots for slot in slots) * self.block_tokens
        self._plan.loads.append(SwapBatch(list(blocks[first:last]), slots))
        self._readers[key] = list(blocks)

    def brought(self, key: str, tokens: int) -> None:
        """`tokens` tokens of a call that waits were copied back for it, and are in vLLM's cache now."""
        self._brought[key] = self._brought.get(key, 0) + tokens

    def loaded_tokens(self, key: str) -> int:
        """How many tokens the latest start of a call loaded, or waited for."""
        return self._loaded.get(key, 0)

    def saved_tokens(self, key: str) -> int:
        """How many tokens of a preempted call are in host memory."""
        saved = self._saved.get(key)
        return saved.context.host_tokens if saved is not None else 0

    def release(self, key: str) -> None:
        """A call has ended, or its copy is void. Free the slots that no other call and no context needs."""
        self._loaded.pop(key, None)
        self._brought.pop(key, None)
        saved = self._saved.pop(key, None)
        if saved is not None:
            self.tier.drop(saved.context)

    def stats(self) -> SwapStats:
        """What the swap has done so far, and how full the host memory is."""
        table, speed = self._table, self.choice.copy_speed
        return SwapStats(
            table.slots,
            table.used,
            table.peak,
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
        return min(saved.tokens, self._loadable(saved.chain, first) * self.block_tokens)

    def _need(self, saved: _SavedCall, *, needed: bool) -> None:
        saved.context.is_needed = needed
        self.tier.rank_again([saved.context])

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or holds a block that somebody needs, and the present plan reads
        and writes no others, each once. For tests."""
        self._table.check_integrity()
        self.tier.check_integrity()
        if self._table.used != len(self.tier.slots):
            raise SwapError(f"{self._table.used} slots are in use, and {len(self.tier.slots)} blocks are known")
        if self.tier.slots.values() - self._plan_of.keys():
            raise SwapError("a slot was never written")
        owned = {slot: key for key, slot in self.tier.slots.items()}
        if any(owned.get(slot) != key for slot, (_, key) in (*self._out.items(), *self._spill.items())):
            raise SwapError("a plan writes a slot that is free, or that holds another block")
        under_way = {slot: each.number for each in self._beside for slot in each.keys}
        under_way |= dict.fromkeys(self._spill, self._plan.number)
        if any(under_way.get(slot) != number for slot, number in self._going_out.items()):
            raise SwapError("a slot is said to be written beside steps, and is not")
        if not self._fetch.keys() <= owned.keys():
            raise SwapError("a plan fetches from a slot that is free")
        if self._plan.loads:
            raise SwapError("a plan outlives the step that loads by it")
        blocks = list(self._fetch.values())
        SwapPlan(fetch=SwapBatch(blocks, list(self._fetch))).check_integrity()
