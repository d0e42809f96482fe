"""A KV policy in an engine: its order of eviction becomes the order of vLLM's list of free blocks.

vLLM hands out the blocks at the front of that list. Before a step, Weft moves the blocks that the policy gives away
first to the front, as many as the step can take. vLLM still counts every block as free, and a call that finds one takes
it. So a hold cannot stop an engine, and an error in the order costs a prefix, never a wrong token.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple

from weft.core.kv_cache.contexts import MOST_TURNS, NEXT_TURNS
from weft.core.kv_cache.eviction_order import LEAST_MOVED, Rotation
from weft.core.kv_cache.policies import KvPolicy, Memory
from weft.core.kv_cache.prefix_tree import Block
from weft.core.kv_cache.retention import CallAnnounced, KvEvent, ProgramGone, Retention, RunningCall, TieredRetention
from weft.core.kv_cache.stats import ToolStats
from weft.core.policies.steps import StepCosts
from weft.engine.kv_cache.ahead import Fetches, Spills
from weft.engine.kv_cache.order import CallKv, EndedFirstOrder, KvOrder, NextStep
from weft.engine.kv_cache.store import HostStore
from weft.engine.vllm_compat.names import BlockPool, KVCacheBlock, Request

_EPOCH_S: Final = 1.0
_MOST_REVISITS_A_S: Final = 1000  # contexts and blocks that are ranked again; of more, each is less often
_CHECK_S: Final = 10.0
_QUEUE_S: Final = 0.1
_MOST_TOOLS: Final = 100  # in the figures
_FRESH_S: Final = 0.1  # so long a step may use what was prepared before it


class _Cached(NamedTuple):
    """Where the KV of a key lies."""

    block: KVCacheBlock
    content: Any  # the block's hash; another one means that vLLM has evicted it

    @property
    def is_there(self) -> bool:
        return bool(self.block.block_hash == self.content)

    @property
    def is_free(self) -> bool:
        """Whether vLLM can give it away, and has not done so."""
        return not self.block.ref_cnt and self.is_there


class SoftHold(KvOrder):
    """Orders vLLM's free blocks by a KV policy.

    A key is a block's hash, which stands for its tokens and all before them. Two blocks may hold the same; vLLM finds
    one of them, and the other is spare.

    Args:
        pool: vLLM's blocks, of a model with one kind of attention.
        retention: Decides by the policy; no other object uses it.
    """

    def __init__(self, pool: BlockPool, retention: Retention) -> None:
        self._pool = pool
        self.retention = retention
        self._block_tokens = block_tokens = retention.tree.block_tokens
        self._capacity_tokens = max(1, len(pool.blocks) - 1) * block_tokens  # vLLM keeps one block for itself
        self._prefill_token_s, self._copy_token_s = StepCosts().prefill_token_s, math.inf
        self._cached: dict[Hashable, _Cached] = {}  # by key
        # Blocks that no call will find. What another scheduler's programs have left is of that kind.
        self._spare: dict[int, Any] = {block.block_id: block.block_hash for block in pool.blocks if block.block_hash}
        self._running: dict[str, RunningCall] = {}  # by request
        self._waiting_since_s: dict[str, float] = {}  # by request
        self._front: deque[_Cached] = deque()  # of the free list when it was made, and what these blocks held
        self._moved: list[tuple[Hashable, _Cached]] = []  # those of them that can be found
        self._is_best = False  # whether no block of these is of use to anybody
        self._has_changed = False  # the order, since then, in a way that matters to these
        self._is_stale = False  # whether blocks elsewhere are worth less than these now
        self._moved_s = -math.inf  # when the front was made
        self._to_revisit = Rotation(self.retention.to_revisit, _EPOCH_S, _MOST_REVISITS_A_S)
        self._to_check = Rotation[Hashable](lambda: self._cached, _CHECK_S)  # whether they are still there
        self._next_queue_s = self._next_epoch_s = -math.inf
        self._programs_moved: set[Hashable] = set()  # whose blocks these are
        self._most_blocks = 0  # that the step can take
        self._prepared_s = -math.inf  # when that was done last that need not be done just before a step
        self._at_front = 0  # blocks of `_front` that are there yet, as counted then, up to what the step can take
        self.moves = 0  # of blocks so far

    # -- what happens

    def call_arrived(self, request: Request, program: Hashable, now_s: float, *, tool: str | None = None) -> None:
        self._waiting_since_s[request.request_id] = now_s
        self.retention.call_arrived(program, request.block_hashes, now_s, tool=tool)
        self._context_changed(program)

    def call_began(
        self, request: Request, program: Hashable, name: str, found_tokens: int, now_s: float, *, level: int = 0
    ) -> None:
        waited_s = now_s - self._waiting_since_s.pop(request.request_id, now_s)
        if request.request_id not in self._running:  # the next input of a streaming session has kept its blocks
            found = request.block_hashes[: found_tokens // self._block_tokens]
            began = self.retention.call_began(program, name, found, now_s, waited_s=waited_s, level=level)
            self._running[request.request_id] = began

    def call_left(self, call: CallKv, now_s: float) -> None:
        request = call.request
        self._waiting_since_s.pop(request.request_id, None)
        running = self._running.pop(request.request_id, None)
        if running is None:  # it did not run since it came, or since it was preempted
            self.retention.call_cancelled(call.program, request.block_hashes, now_s)
        else:
            self._grow(running, call, now_s)
            # A stop string ends a call in the host's process, which looks like an abort here.
            if request.num_output_tokens:
                self.retention.call_ended(running, now_s, tool=call.next_tool)
                if call.is_next_soon:
                    self.retention.happened(call.program, CallAnnounced(), now_s)
            else:
                self.retention.call_aborted(running, now_s)

    def call_preempted(self, call: CallKv, now_s: float) -> None:
        self._waiting_since_s[call.request.request_id] = now_s
        running = self._running.pop(call.request.request_id, None)
        if running is not None:
            self._grow(running, call, now_s)
            self.retention.call_preempted(running, now_s)

    def happened(self, program: Hashable, event: KvEvent, now_s: float) -> None:
        self.retention.happened(program, event, now_s)
        if isinstance(event, ProgramGone):
            self._order_changed()
        else:
            self._context_changed(program)

    def use_prefill_speed(self, token_s: float) -> None:
        if token_s > 0:  # steps that are all alike do not tell
            self._prefill_token_s = token_s

    def reset(self, now_s: float) -> None:
        self.retention.reset()
        self._cached = {key: at for key, at in self._cached.items() if key in self.retention.tree and at.is_there}
        self._spare.clear()
        self._moved.clear()
        self._front.clear()
        self._at_front = 0
        self._is_best, self._has_changed, self._is_stale = False, True, False

    @property
    def held_blocks(self) -> int:
        return self.retention.held_tokens // self._block_tokens

    @property
    def programs_held(self) -> int:
        return self.retention.programs_held

    def tools(self) -> tuple[ToolStats, ...]:
        return tuple(
            ToolStats(name, len(samples), samples.mean_s, samples.quantile_s(0.95))
            for name, samples in self.retention.tool_times.most_seen(_MOST_TOOLS)
        )

    @property
    def knows_contexts(self) -> bool:
        return True

    def tokens_of(self, program: Hashable) -> tuple[int, int] | None:
        return self.retention.tree.tokens_of(program), 0

    # -- the order

    def before_step(self, step: NextStep, now_s: float) -> None:
        """Move as many blocks to the front as the step can take, if it can take those that are not there yet."""
        self._most_blocks = step.most_blocks()
        if now_s >= self._prepared_s + _FRESH_S:
            self._prepare(step, now_s)
        self._prepared_s = -math.inf
        self._fill_front(1, now_s)

    def while_step_runs(self, step: NextStep, now_s: float) -> None:
        """Do what is due, and have twice as many blocks at the front as the next step takes if no call ends before."""
        self._most_blocks = step.most_blocks()
        self._prepare(step, now_s)
        self._fill_front(2, now_s)
        self._prepared_s = now_s

    def _prepare(self, step: NextStep, now_s: float) -> None:
        self.retention.observe_memory(self._memory())
        self._do_part_of_epoch(step, now_s)
        self._at_front = self._count_front()

    def _fill_front(self, times: int, now_s: float) -> None:
        """Make the front of the free list again if it is out of date, or shorter than what the step can take. It then
        gets `times` as many blocks as the step can take."""
        most = min(self._most_blocks, self._pool.get_num_free_blocks())
        if most <= 0:
            return
        if not (self._has_changed or (self._is_stale and now_s >= self._moved_s + _QUEUE_S)):
            if self._at_front < most:
                self._at_front = self._count_front()
            if self._at_front >= most:
                return
        self._forget_all([key for key, at in self._moved if not at.is_there and self._cached.get(key) is at], now_s)
        self._move(max(times * most, LEAST_MOVED), now_s)
        self._at_front = len(self._front)
        self._has_changed = self._is_stale = False
        self._moved_s = now_s

    def _count_front(self) -> int:
        """How many blocks of the front are there yet, up to what the step can take. vLLM takes the first ones first."""
        front = self._front
        while front and not front[0].is_free:
            front.popleft()
        return sum(1 for _ in itertools.islice((at for at in front if at.is_free), max(0, self._most_blocks)))

    def _do_part_of_epoch(self, step: NextStep, now_s: float) -> None:
        """What is to be done once a second, or in ten, evenly over the steps, so that no step takes long. A step that
        comes after a second without one does all of it."""
        cached = self._cached.get
        due = ((key, cached(key)) for key in self._to_check.due(now_s))
        self._forget_all([key for key, at in due if at and at.block.block_hash != at.content], now_s)
        if now_s >= self._next_queue_s:
            is_epoch = now_s >= self._next_epoch_s
            self._next_queue_s = now_s + _QUEUE_S
            self._next_epoch_s = now_s + _EPOCH_S if is_epoch else self._next_epoch_s
            turns = MOST_TURNS if is_epoch else NEXT_TURNS
            self.retention.observe_queue(itertools.islice(step.queue(), turns), now_s)
        for each in self._to_revisit.due(now_s):
            self.retention.revisit(each, now_s)

    def _context_changed(self, program: Hashable) -> None:
        """A context of a program is worth more or less than before. If blocks of it are at the front, the front is made
        again before the next step; otherwise when it is used up."""
        self._has_changed = self._has_changed or program in self._programs_moved

    def _order_changed(self) -> None:
        """Some block is worth less than before. A front with blocks that somebody may need is made again soon."""
        self._is_stale = self._is_stale or not self._is_best

    def _move(self, count: int, now_s: float) -> None:
        """Make empty blocks, spare ones and the policy's next ones the first `count` of the free list."""
        queue = self._pool.free_block_queue
        free = itertools.islice(queue.iter_blocks_after(None), count)
        front = list(itertools.takewhile(lambda block: block.block_hash is None, free))
        self._moved, self._programs_moved, self._is_best = [], set(), True
        if len(front) < count:
            front += self._take_spare(count - len(front))
            self._moved = self._next(count - len(front), now_s)
            blocks = [self.retention.tree.get(key) for key, _ in self._moved]
            self._programs_moved = {block.program for block in blocks if block is not None}
            self._is_best = not any(block is not None and (block.needed_by or block.is_common) for block in blocks)
            front += (at.block for _, at in self._moved)
            for block in front:
                queue.remove(block)
            queue.prepend_n(front)
            self.moves += len(front)
        self._front = deque(_Cached(block, block.block_hash) for block in front)

    def _take_spare(self, count: int) -> list[KVCacheBlock]:
        """At most `count` free blocks that no call will find. Those in use follow when they are free."""
        taken: list[KVCacheBlock] = []
        for number in list(itertools.islice(self._spare, 2 * max(0, count))):
            block, content = self._pool.blocks[number], self._spare.pop(number)
            if block.block_hash != content:  # vLLM has given it away
                continue
            self._spare[number] = content  # behind the others
            if not block.ref_cnt and len(taken) < count:
                taken.append(block)
        return taken

    def _next(self, count: int, now_s: float) -> list[tuple[Hashable, _Cached]]:
        """The next blocks that the policy gives away. What vLLM has evicted without being told to is forgotten."""
        while count > 0:
            keys = self.retention.order.next_blocks(count, now_s)
            found = [(key, self._cached.get(key)) for key in keys]
            gone = [key for key, at in found if at is None or not at.is_there]
            if not gone:
                return [(key, at) for key, at in found if at is not None and not at.block.ref_cnt]
            self._forget_all(gone, now_s)
        return []

    # -- which block holds what

    def _grow(self, running: RunningCall, call: CallKv, now_s: float) -> list[tuple[Hashable, KVCacheBlock]]:
        """A call's blocks are about to be freed. Its full ones can be found from now on. Returns them with their keys.

        Most of a long context was noted when the call before it left.
        """
        running.level = call.level
        found: list[tuple[Hashable, KVCacheBlock]] = []
        blocks, cached = self._pool.blocks, self._cached
        numbers = call.manager.get_block_ids(call.request.request_id)[0]
        for key, number in zip(call.request.block_hashes, numbers, strict=False):
            block = blocks[number]
            if block.block_hash is None:
                break
            at = cached.get(key)
            if at is None or at.block is not block or at.content != block.block_hash:
                self._note(key, block)
            found.append((key, block))
        self.retention.call_grew(running, [key for key, _ in found], now_s)
        return found

    def _note(self, key: Hashable, block: KVCacheBlock) -> None:
        known = self._cached.get(key)
        if known is not None and known.block is not block and known.is_there:
            self._spare[block.block_id] = block.block_hash
            return
        self._spare.pop(block.block_id, None)
        self._cached[key] = _Cached(block, block.block_hash)

    def _block_of(self, key: Hashable) -> KVCacheBlock | None:
        at = self._cached.get(key)
        return at.block if at is not None and at.is_there else None

    def _forget_all(self, keys: Sequence[Hashable], now_s: float) -> None:
        """vLLM has evicted these. What is behind them cannot be found any more."""
        before: dict[Block, None] = {}
        for key in keys:
            self._cached.pop(key, None)
            block = self.retention.tree.get(key)
            if block is None or block.pins:
                continue
            for each in _behind(block):
                at = self._cached.pop(each.key, None)
                if at is not None and at.is_there:
                    self._spare[at.block.block_id] = at.content
            self.retention.tree.remove(block)
            if block.parent is not None:
                before[block.parent] = None
        self.retention.rank_again(before)

    def _memory(self) -> Memory:
        in_use = len(self._pool.blocks) - 1 - self._pool.get_num_free_blocks()
        running_tokens = in_use * self._block_tokens
        used_share = min(1.0, (running_tokens + self.retention.held_tokens) / self._capacity_tokens)
        return Memory(used_share, running_tokens, self._prefill_token_s, self._copy_token_s)

    def check_integrity(self) -> None:
        self.retention.check_integrity()
        unknown = [key for key in self._cached if key not in self.retention.tree]
        if unknown:
            raise AssertionError(f"{len(unknown)} keys are not in the tree")
        if not self._spare.keys().isdisjoint(at.block.block_id for at in self._cached.values() if at.is_there):
            raise AssertionError("a block that can be found is spare")


def _behind(block: Block) -> Sequence[Block]:
    """The blocks that cannot be found without this one."""
    found: list[Block] = list(block.children)
    for each in found:
        found += each.children
    return found


class TieredHold(SoftHold):
    """A soft hold with host memory behind it.

    Args:
        retention: Decides by the policy, also about the store's host memory; no other object uses it.
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
        store.events = self

    def step_formed(self) -> None:
        self._spills.step_formed()

    def copies_reported(self) -> None:
        self._fetches.copies_reported()

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
        self._copy_token_s = self._store.copy_token_s
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
        if self._store.copies_beside:
            self._spills.computing[request.request_id] = request

    def call_left(self, call: CallKv, now_s: float) -> None:
        super().call_left(call, now_s)
        self._fetches.call_left(key := call.request.request_id)
        self._spills.computing.pop(key, None)
        if key in self._spills.prompts:  # what the call has left has these blocks now
            self._store.tier.drop(self._spills.prompts.pop(key))
        self._fetches.looks = True  # there is more room

    def call_preempted(self, call: CallKv, now_s: float) -> None:
        super().call_preempted(call, now_s)
        self._spills.computing.pop(key := call.request.request_id, None)
        if key in self._spills.prompts:
            self._store.tier.drop(self._spills.prompts.pop(key))
        self._fetches.looks = True

    def happened(self, program: Hashable, event: KvEvent, now_s: float) -> None:
        self._tiered.keeps_ended = self._store.copies_beside
        super().happened(program, event, now_s)
        self._fetches.looks = True

    def spill(self, program: Hashable, *, begins: bool) -> bool:
        if begins:
            self._tiered.spill_now(program)
        return self._spills.is_moving(program)

    def on_host(self, program: Hashable) -> list[bytes]:
        tier = self._store.tier
        chains = (tier.tree.chain(tier.tree.end_of(each)) for each in reversed(tier.tree.contexts_of(program)))
        return list(
            dict.fromkeys(key for chain in chains for key in chain if isinstance(key, bytes) and key in tier.slots)
        )

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

    def _grow(self, running: RunningCall, call: CallKv, now_s: float) -> list[tuple[Hashable, KVCacheBlock]]:
        found = super()._grow(running, call, now_s)
        self._spills.watch([each for each in found if self._cached[each[0]].block is each[1]])
        return found

    def _note_spare(self, key: Hashable, block: KVCacheBlock) -> None:
        """Note a block that no program is known to need, unless a call that ran since has left it in the cache."""
        at = self._cached.get(key)
        if at is None or at.block is not block:
            self._spare[block.block_id] = block.block_hash


def make_order(policy: KvPolicy, pool: BlockPool, block_tokens: int, store: HostStore | None = None) -> KvOrder:
    """What carries out a KV policy on vLLM's blocks, of a model with one kind of attention.

    Where vLLM computes hashes of parts of blocks, it keeps its order.

    Args:
        policy: The policy; no other order uses this object.
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
