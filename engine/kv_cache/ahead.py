"""Copies that nobody waits for: contexts that go out to host memory, and contexts that come back before their calls."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from weft.core.kv_cache import fetch_ahead, spill_ahead
from weft.core.kv_cache.policies import Context
from weft.core.kv_cache.prefix_tree import Block, path
from weft.core.kv_cache.retention import RunningCall, TieredRetention
from weft.core.prediction import KnownTime
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import BlockPool, KVCacheBlock, Request, make_block_hash_with_group_id

_MOVING: Final = 2  # times as much as else a step copies, beside it, if another replica waits for it


class Spills:
    """Copies contexts to host memory, with a soft hold's knowledge of the device's blocks."""

    def __init__(
        self,
        store: HostStore,
        retention: TieredRetention,
        pool: BlockPool,
        block_of: Callable[[Hashable], KVCacheBlock | None],
        forget: Callable[[Sequence[Hashable], float], None],
    ) -> None:
        self._store = store
        self._retention = retention
        self._pool = pool
        self._block_of = block_of
        self._forget = forget
        self._watched: dict[int, tuple[Hashable, Any]] = {}  # by block: its key and its hash
        self._reused: dict[Hashable, int] = {}  # in this step: blocks by key
        self._gone: list[Hashable] = []  # that vLLM has evicted, and nobody knows yet
        self._copying: deque[tuple[int, Context]] = deque()  # with the number of the plan that completes them
        self._is_short = False
        self._copied_from: dict[int, Any] = {}  # by block that is copied out beside steps: its hash
        self.computing: dict[str, Request] = {}  # running calls whose prompts are copied once they are computed
        self.prompts: dict[str, Context] = {}  # what host memory has of them, until they leave

    def watch(self, blocks: Iterable[tuple[Hashable, KVCacheBlock]]) -> None:
        """Have vLLM tell when it gives these blocks away. A call that is about to be freed has them."""
        new: list[KVCacheBlock] = []
        for key, block in blocks:
            if self._watched.get(block.block_id) != (key, block.block_hash):
                self._watched[block.block_id] = key, block.block_hash
                new.append(block)
        if new:
            self._pool.touch(new)
            self._pool.unpin_blocks(new, self._on_reuse)  # the references are as before, only the watcher stays

    def plan(self, most_blocks: int) -> bool:
        """Plan copies of contexts that are to be spilled, as many as one step makes. Returns whether a context is in
        host memory now that was not."""
        has_copied = False
        store, retention = self._store, self._retention
        while self._copying and self._copying[0][0] <= store.copied:
            context = self._copying.popleft()[1]
            chain = retention.chain_of(context)
            has_all = context.host_tokens >= max(1, len(chain) * store.block_tokens)  # not blocks that only others keep
            if has_all and store.tier.held(chain) == len(chain):
                retention.copied(context)
                has_copied = True
        of_nobody = self._pool.get_num_free_blocks() - retention.tree.needed
        self._is_short = spill_ahead.is_short(of_nobody, most_blocks, len(self._pool.blocks))
        most_tokens = spill_ahead.most_bytes(beside=store.copies_beside) / store.choice.token_bytes
        most = max(1, int(most_tokens / store.block_tokens))
        left = most - len(store.spilling)
        has_copied |= self._spill(retention.moving, max(1, left, _MOVING * most if store.copies_beside else 0))
        if self._is_short:
            has_copied |= self._spill(retention.spills, left)
            self._spill_prompts(most)
        if retention.left and not (retention.spills and self._is_short) and not store.spilling:
            context, chain = next(iter(retention.left.items()))
            blocks = self._to_copy(chain, most)
            if not (blocks and self._keep(context, chain[: max(blocks) + 1], blocks)) or max(blocks) + 1 == len(chain):
                del retention.left[context]
        return has_copied

    def _spill(self, contexts: dict[Context, None], most: int) -> bool:
        """Plan copies of these contexts, at most `most` blocks, and take out the contexts that need no further copy.
        Returns whether one of them was in host memory already."""
        has_copied = False
        store, retention = self._store, self._retention
        while contexts and most > 0:
            context = next(iter(contexts))
            chain = retention.chain_of(context)
            blocks = self._to_copy(chain, most)
            most -= max(1, len(blocks))
            is_kept = self._pays(context) and self._keep(context, chain, blocks)
            if is_kept and most <= 0 and store.tier.held(chain) < len(chain):
                break  # the rest follows in the next step
            del contexts[context]
            if is_kept and chain and not blocks:
                retention.copied(context)
                has_copied = True
            elif is_kept and chain:
                self._copying.append((store.next_plan, context))
        return has_copied

    def _spill_prompts(self, most: int) -> None:
        """Plan copies of the prompts that are computed, at most `most` blocks beside one step."""
        store, policy = self._store, self._retention.policy
        for key, request in list(self.computing.items()):
            if (left := most - len(store.spilling)) <= 0:
                return
            if request.is_prefill_chunk:
                continue
            tokens = request.num_computed_tokens  # those of the step that runs are there when the copies begin
            chain = request.block_hashes[: tokens // store.block_tokens]
            blocks = self._to_copy(chain, left)
            pays = spill_ahead.copies_prompt(policy, tokens, self._retention.memory, store.now_s)
            if pays and blocks and tokens >= store.choice.min_tokens:
                context = Context(("prompt", key), "", store.now_s, KnownTime(0.0), is_needed=False)
                context = self.prompts.setdefault(key, context)
                if self._keep(context, chain[: max(blocks) + 1], blocks) and len(blocks) == left:
                    return  # the rest follows in the next step
            del self.computing[key]

    def is_moving(self, program: Hashable) -> bool:
        """Whether contexts of a program are to be copied for another replica, or any of its are being copied."""
        return any(each.program == program for each in (*self._retention.moving, *(each for _, each in self._copying)))

    def _to_copy(self, chain: Sequence[Any], most: int) -> dict[int, int]:
        """The next blocks of a chain that the device has and host memory lacks, by index, at most `most` of them."""
        blocks: dict[int, int] = {}
        for index, key in enumerate(chain):
            if key in self._store.tier.slots:
                continue
            found = self._pool.get_cached_block(key, [0]) if len(blocks) < most else None
            if not found:
                break
            blocks[index] = found[0].block_id
        return blocks

    def _keep(self, context: Context, chain: Sequence[Hashable], blocks: dict[int, int]) -> bool:
        self._copied_from.update((number, self._pool.blocks[number].block_hash) for number in blocks.values())
        return self._store.keep(context, chain, blocks, beside=True)

    def reset(self) -> None:
        """vLLM has emptied its prefix cache."""
        self._reused.clear()  # what is being copied out may be overwritten now, but its hash is gone
        self._gone.clear()
        self._copying.clear()
        self._retention.spills.clear()
        self._retention.moving.clear()
        self._retention.left.clear()

    @property
    def wants_step(self) -> bool:
        """Whether a step would copy something."""
        is_done = bool(self._copying) and self._copying[0][0] <= self._store.copied
        return is_done or bool(self._retention.moving) or (self._is_short and bool(self._retention.spills))

    def _pays(self, context: Context) -> bool:
        return context.tokens >= self._store.choice.min_tokens

    def _on_reuse(self, block: KVCacheBlock) -> None:
        key, content = self._watched.pop(block.block_id)
        if block.block_hash == content:
            self._reused[key] = block.block_id

    def step_formed(self) -> None:
        """vLLM has given blocks away in the step."""
        reused, self._reused = self._reused, {}
        if self._copied_from:
            taken, blocks = set(reused.values()), self._pool.blocks
            of = self._copied_from = {number: self._copied_from.get(number) for number in self._store.spilling}
            self._store.hurry(lambda number: number in taken or blocks[number].block_hash != of[number])
        if reused:
            self._spill_reused(reused)

    def _spill_reused(self, reused: dict[Hashable, int]) -> None:
        """Of the blocks that the step overwrites, plan to copy those of open programs' contexts. They are forgotten
        later, since that delays the step."""
        block_at, block_of = self._retention.tree.get, self._block_of
        lost: dict[Block, int] = {}
        ends: dict[Context, Block] = {}  # of the contexts that lose blocks and are not in host memory
        for key, number in reused.items():
            block = block_at(key)
            if block is None or block.pins:
                continue
            self._gone.append(key)
            if not block.children and all(context.on_host for context in block.contexts):
                continue  # nobody loses anything, which is the usual case
            if (at := block_of(key)) is not None and at.block_id != number:
                continue  # another block holds the same
            lost[block] = number
            if not block.children:
                ends.update((context, block) for context in block.contexts if not context.on_host)
                continue
            behind = [block]  # can still be read, and not be found
            for each in behind:
                if each is not block and each not in lost and (at := block_of(each.key)) is not None:
                    lost[each] = at.block_id
                if each.contexts:
                    ends.update((context, each) for context in each.contexts if not context.on_host)
                if each.children:
                    behind += (child for child in each.children if child not in lost)
        for context, end in ends.items():
            if self._pays(context):
                chain = path(end)
                numbers = {each.depth: lost[each] for each in chain if each in lost}
                self._store.keep(context, [each.key for each in chain[: max(numbers) + 1]], numbers)

    def forget_reused(self) -> None:
        """Forget what vLLM has evicted, unless it is there again."""
        gone, self._gone = self._gone, []
        if gone:
            self._forget([key for key in gone if self._block_of(key) is None], self._store.now_s)


_MOST_WAITS: Final = 3  # for copies beside steps by one call, before it starts with what is there
_MANY: Final = 100  # contexts that are asked every `EVERY_S`; more are not asked as often
_ASK_S: Final = 1.0  # so often a context is asked when it is due, though nothing happens


@dataclass(slots=True, eq=False)
class _Fetch:
    number: int  # of its plan
    context: Context | None  # None: a call waits for it
    chain: list[Hashable]  # the keys of the blocks up to the last one that comes
    slots: list[int]
    there: list[KVCacheBlock]  # the blocks before, which must stay, or come by the same plan
    coming: list[KVCacheBlock]
    call: str | None = None  # the call that waits for it


class Fetches:
    """Plans fetches, and makes their blocks known to vLLM when they are done.

    Args:
        note: Called with a key and the block that holds it from now on.
        spare: Called with a key and a block that vLLM finds although no program needs it.
        make_room: Moves as many blocks as it is told to the front of vLLM's free list, in the policy's order.
    """

    def __init__(
        self,
        store: HostStore,
        retention: TieredRetention,
        pool: BlockPool,
        *,
        block_of: Callable[[Hashable], KVCacheBlock | None],
        note: Callable[[Hashable, KVCacheBlock], Any],
        spare: Callable[[Hashable, KVCacheBlock], Any],
        make_room: Callable[[int, float], None],
    ) -> None:
        self._store = store
        self._retention = retention
        self._pool = pool
        self._block_of = block_of
        self._note = note
        self._spare = spare
        self._make_room = make_room
        self._under_way: list[_Fetch] = []
        self._waits: dict[str, list[int]] = {}  # by call: the plans that it has waited for, and does
        self._brought: dict[str, list[tuple[Hashable, KVCacheBlock]]] = {}  # by call: what came for it
        self._next_s = -math.inf
        self._step_blocks = max(1, int(fetch_ahead.STEP_BYTES / (store.choice.token_bytes * store.block_tokens)))
        self._idle_until_s = -math.inf  # until then nothing is due that has room, unless something changes
        self.looks = False  # whether something has changed since the last look

    @property
    def wants_step(self) -> bool:
        """Whether an engine without calls should look what can be fetched."""
        return self.looks and bool(self._store.tier.slots) and self._store.copy_token_s < math.inf

    def plan(self, most_blocks: int, running: Collection[RunningCall], *, is_idle: bool) -> bool:
        """Plan what is due.

        Args:
            is_idle: No call runs or waits. Then everything is due that has room: there is nothing better to do.

        Returns:
            Whether it took blocks.
        """
        self.let_go_if_short(most_blocks)
        now_s = self._store.now_s
        if self._under_way or not (now_s >= self._next_s or (is_idle and self.looks)):
            return False
        has_changed, self.looks = self.looks, False
        self._next_s = now_s + fetch_ahead.EVERY_S
        copy_token_s = self._store.copy_token_s
        if not self._store.tier.slots or copy_token_s == math.inf:
            return False
        if not has_changed and now_s < self._idle_until_s:
            return False
        left = min(self._step_blocks, self._pool.get_num_free_blocks() - self._spared(most_blocks))
        for context in self._due(running, copy_token_s, fetch_ahead.LEAD_S if not is_idle else math.inf):
            if left <= 0:
                break
            left -= self._fetch(context, left)
        return bool(self._under_way)

    def let_go_if_short(self, most_blocks: int) -> None:
        """Give back the blocks of all fetches ahead of need if the next step may need them."""
        ahead = self._under_way and [fetch for fetch in self._under_way if fetch.context is not None]
        if ahead and self._pool.get_num_free_blocks() < self._spared(most_blocks):
            self._drop(ahead)

    def _spared(self, most_blocks: int) -> int:
        return most_blocks + 1 + len(self._pool.blocks) // fetch_ahead.WATERMARK

    def let_go(self) -> None:
        """Give back the blocks of all fetches under way, as if there had been none."""
        self._drop(self._under_way)

    def _drop(self, dropped: list[_Fetch]) -> None:
        """Give up fetches. If the workers do not know a fetch yet, it is taken out of the plan, because the plan's step
        may need the blocks. Otherwise the workers may still write to its blocks, so the next step waits for that."""
        self._under_way = [fetch for fetch in self._under_way if fetch not in dropped]
        for fetch in dropped:
            if fetch.number == self._store.next_plan:
                self._store.withdraw_fetches(fetch.slots)
            self._store.wait_for(fetch.number)
            self._free(fetch)

    # -- for calls that wait

    def load(self, call: str, hashes: Sequence[Hashable], first: int, spared: int) -> bool:
        """Have a call that could start wait for its blocks, if they come from host memory beside the steps or can.
        Returns whether it waits. Otherwise it starts, and its step waits for the copies.

        Args:
            hashes: vLLM's hashes of the blocks that it would find.
            first: How many of them it finds on the device.
            spared: How many blocks stay free besides all of these.
        """
        waits = self._waits.get(call, [])
        if not self._store.copies_beside or len(waits) == _MOST_WAITS or first >= len(hashes):
            return False
        coming = {key: fetch.number for fetch in self._under_way for key in fetch.chain[len(fetch.there) :]}
        number = coming.get(hashes[first])  # calls with a common prefix fetch it once
        if number is None:
            count = self._store.ready(hashes, first)
            count = next((index for index in range(count) if hashes[first + index] in coming), count)
            number = self._load(call, hashes, first, count, spared)
        if number is not None:
            self._waits[call] = [*waits, number]
        return number is not None

    def _load(self, call: str, hashes: Sequence[Hashable], first: int, count: int, spared: int) -> int | None:
        """Plan to fetch the next `count` blocks of a call. Returns the number of the plan; None if there is no room."""
        store, pool = self._store, self._pool
        there = [block for key in hashes[:first] if (block := self._cached(key)) is not None]
        taken = sum(not block.ref_cnt for block in there)
        needed = taken + len(hashes) - first + spared
        if not count or len(there) < first or pool.get_num_free_blocks() < needed:
            return None
        pool.touch(there)
        self._make_room(needed - taken, store.now_s)
        new = pool.get_new_blocks(count)
        number, slots = store.fetch(hashes, first, [block.block_id for block in new], for_call=True)
        self._under_way.append(_Fetch(number, None, list(hashes[: first + count]), slots, there, new, call))
        return number

    @property
    def calls_waiting(self) -> int:
        return sum(map(self.is_awaited_by, self._waits)) if self._under_way else 0

    def is_awaited_by(self, call: str) -> bool:
        """Whether a call waits for a copy."""
        numbers = self._waits.get(call)
        return numbers is not None and any(fetch.number == numbers[-1] for fetch in self._under_way)

    def call_began(self, call: str) -> None:
        """A call has started, with what came for it."""
        self._waits.pop(call, None)
        self._brought.pop(call, None)

    def call_left(self, call: str) -> None:
        """A call has left. If it never started, what came for it is of no use to it."""
        self._waits.pop(call, None)
        for key, block in self._brought.pop(call, ()):
            if block.block_hash == make_block_hash_with_group_id(cast("Any", key), 0):
                self._spare(key, block)

    def _due(self, running: Collection[RunningCall], copy_token_s: float, lead_s: float) -> list[Context]:
        retention, now_s = self._retention, self._store.now_s
        busy = {call.program for call in running}
        memory = retention.memory
        contexts = [each for each in retention.contexts_anywhere() if each.program not in busy]
        self._next_s = now_s + min(fetch_ahead.EVERY_S * max(1.0, len(contexts) / _MANY), _ASK_S)
        missing = [each for each in contexts if each.host_tokens > each.tokens and fetch_ahead.is_likely(each)]
        due = [each for each in missing if self._may_be_due(each, copy_token_s, lead_s)]
        soon_s = min((each.ask_s for each in missing if each.ask_s > now_s), default=math.inf)
        self._idle_until_s = min(soon_s, now_s + _ASK_S)
        if not due:
            return []
        expected = [fetch_ahead.expect(context, memory, now_s) for context in contexts]
        capacity = (len(self._pool.blocks) - 1) * self._store.block_tokens
        room = fetch_ahead.SHARE * capacity - memory.running_tokens
        found = fetch_ahead.contexts_to_fetch(expected, room_tokens=room, copy_token_s=copy_token_s, lead_s=lead_s)
        if found:
            self._idle_until_s = -math.inf
        return found

    def _may_be_due(self, context: Context, copy_token_s: float, lead_s: float) -> bool:
        """Whether a copy back may be due. The time until a call runs falls by at most a second in a second, unless
        something happens to the context, or to others from which its pause is predicted. So most contexts need not be
        asked each time."""
        now_s = self._store.now_s
        if context.called_s is not None or lead_s == math.inf:
            return True
        if now_s < context.ask_s:
            return False
        copy_s = (context.host_tokens - context.tokens) * copy_token_s
        early_s = context.expected_s(self._retention.memory, now_s) - copy_s - lead_s
        context.ask_s = now_s + min(early_s, fetch_ahead.short_pause_s(context) - context.elapsed_s(now_s), _ASK_S)
        return context.ask_s <= now_s

    def _fetch(self, context: Context, most: int) -> int:
        """Plan to fetch the next blocks of a context. Returns how many free blocks that takes."""
        store, pool = self._store, self._pool
        chain = store.tier.tree.chain(store.tier.tree.end_of(context))
        coming = self._coming()
        there: list[KVCacheBlock] = []
        for key in chain:
            block = self._block_of(key) or coming.get(key)  # contexts with a common prefix fetch it once
            if block is None:
                break
            there.append(block)
        taken = sum(not block.ref_cnt for block in there)  # they leave the free list as well
        count = min(most - taken, store.ready(chain, len(there)))
        if count <= 0:
            return 0
        pool.touch(there)
        self._make_room(count, store.now_s)
        new = pool.get_new_blocks(count)
        last = len(there) + count
        number, slots = store.fetch(chain, len(there), [block.block_id for block in new])
        self._under_way.append(_Fetch(number, context, chain[:last], slots, there, new))
        return count + taken

    def _coming(self) -> dict[Hashable, KVCacheBlock]:
        """The blocks that fetches under way copy, by key."""
        found: dict[Hashable, KVCacheBlock] = {}
        for fetch in self._under_way:
            found.update(zip(fetch.chain[len(fetch.there) :], fetch.coming, strict=True))
        return found

    def copies_reported(self) -> None:
        """The workers have reported on a plan."""
        copied = self._store.copied
        done = [fetch for fetch in self._under_way if fetch.number <= copied]
        if not done:
            return
        self._under_way = [fetch for fetch in self._under_way if fetch.number > copied]
        self.looks = True  # there may be more
        for fetch in done:
            before, keys = fetch.chain[: len(fetch.there)], fetch.chain[len(fetch.there) :]
            # A slot that could not be read is forgotten. So are those of a program that has ended.
            context, is_found = fetch.context, self._block_of if fetch.context is not None else self._cached
            is_valid = (
                self._store.has_kept(keys, fetch.slots, fetch.number)
                and (context is None or self._store.tier.tree.end_of(context) is not None)
                and all(is_found(key) is not None for key in before)  # else nobody finds what follows
            )
            if is_valid:
                for index, (key, block) in enumerate(zip(keys, fetch.coming, strict=True), start=len(fetch.there)):
                    self._insert(key, block, (index + 1) * self._store.block_tokens, fetch)
            self._free(fetch)
            if is_valid and context is not None:
                self._retention.fetched(context, fetch.chain, self._store.now_s)

    def _insert(self, key: Any, block: KVCacheBlock, num_tokens: int, fetch: _Fetch) -> None:
        """Have vLLM find a block, unless it finds another with the same content already."""
        if self._cached(key) is not None:
            return
        self._pool._insert_block_hash(make_block_hash_with_group_id(key, 0), block, num_tokens)  # noqa: SLF001
        if fetch.call is None:
            self._note(key, block)
        elif fetch.call in self._waits:
            self._brought.setdefault(fetch.call, []).append((key, block))
            self._store.brought(fetch.call, self._store.block_tokens)
        else:  # it has left
            self._spare(key, block)

    def _cached(self, key: Any) -> KVCacheBlock | None:
        """The block that vLLM finds."""
        blocks = self._pool.get_cached_block(key, [0])
        return blocks[0] if blocks else None

    def _free(self, fetch: _Fetch) -> None:
        self._pool.free_blocks([*reversed(fetch.coming), *reversed(fetch.there)])

    def check_integrity(self) -> None:
        """Assert that each block of a fetch under way is taken, and no other fetch's. For tests."""
        coming = [block for fetch in self._under_way for block in fetch.coming]
        if len({block.block_id for block in coming}) < len(coming):
            raise AssertionError("two fetches write to one block")
        if any(not block.ref_cnt for fetch in self._under_way for block in (*fetch.there, *fetch.coming)):
            raise AssertionError("a block of a fetch is free")
        if any(block.block_hash is not None for block in coming):
            raise AssertionError("a block can be found that is being fetched")
        unsent = [fetch for fetch in self._under_way if fetch.number == self._store.next_plan]
        planned = {block.block_id for fetch in unsent for block in fetch.coming}
        if planned != self._store.to_fetch:
            raise AssertionError(f"the plan fetches into {self._store.to_fetch}, and {planned} are taken for it")
