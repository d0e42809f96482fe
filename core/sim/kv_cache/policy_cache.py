"""A simulated KV cache in which a KV policy chooses what is evicted."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final

from weft.core.kv_cache.contexts import MOST_TURNS, NEXT_TURNS
from weft.core.kv_cache.eviction_order import LEAST_MOVED, EvictionRank, Group, Rotation
from weft.core.kv_cache.policies import Context, KvPolicy, Memory
from weft.core.policies.steps import StepCosts
from weft.core.sim.kv_cache.cache import KvCache, Segment
from weft.core.sim.kv_cache.host import HostMemory
from weft.core.sim.kv_cache.segment_contexts import EPOCH_S, SegmentContexts
from weft.core.sim.settings import SimSettings
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.trace.prefixes import BLOCK_TOKENS

_QUEUE_S: Final = 0.1  # time from one look at the queue's order to the next
_MOST_STALE: Final = 64  # entries that a heap may have beyond a multiple of those that are current


class PolicyKvCache(KvCache):
    """A KV cache in which a KV policy chooses what is evicted.

    Args:
        settings: The simulation's settings. The KV cache must be bounded.
        copy_token_s: Seconds to copy a token to host memory; infinite without host memory.
    """

    def __init__(self, settings: SimSettings, policy: KvPolicy, copy_token_s: float = math.inf) -> None:
        super().__init__(settings.kv_capacity, block_tokens=settings.block_tokens)
        # If prompts take no time, assume the default, as an engine does until it has measured.
        self._prefill_token_s = settings.timing.prefill_token_s or StepCosts().prefill_token_s
        self._copy_token_s = copy_token_s
        self._host: HostMemory | None = None
        self._now_s = self._queue_s = self._next_epoch_s = -math.inf
        # As in `weft.core.kv_cache.eviction_order`: leaves are ranked when something has happened to them and somebody
        # asks what goes next, when their hold expires, and once in each epoch.
        self._order: list[tuple[EvictionRank, int, Segment]] = []  # heap of the leaves
        self._expiries: list[tuple[float, int, Segment]] = []  # heap of those that are held
        self._entries = 0
        self._entry_of: dict[Segment, int] = {}  # the number of its valid entry
        self._marked: dict[Segment, None] = {}  # to be ranked
        # What goes next: segments, each down to this position. It is chosen again if something happens to a program
        # whose contexts are among them.
        self._front: deque[tuple[Segment, int]] = deque()
        self._front_programs: set[Hashable] = set()
        self._ahead_tokens = LEAST_MOVED * max(settings.block_tokens, BLOCK_TOKENS)
        self._compared_s = -math.inf  # when all contexts were compared last
        self._compares_with_all = policy.compares_with_all
        self._to_rank: Rotation[Segment] | None = None
        if policy.decides or policy.changes_with_time:
            self._to_rank = Rotation(lambda: self._leaves, EPOCH_S)
        self._contexts = SegmentContexts(
            policy, Memory(0.0, 0, self._prefill_token_s), self, knows_pauses=settings.knows_pauses
        )

    def tick(self, now_s: float) -> None:
        """The time is `now_s`. In each epoch decide again on all contexts."""
        if now_s == self._now_s:
            return
        self._now_s = now_s
        self._contexts.tick(now_s)
        if self._to_rank is not None:
            self._marked.update(dict.fromkeys(filter(self._contexts.changes_rank, self._to_rank.due(now_s))))

    def queue_changed(self, calls: Iterable[SimCall], now_s: float) -> None:
        """These calls wait; the call that starts next comes first. The order is read every `_QUEUE_S`."""
        if now_s < self._queue_s + _QUEUE_S:
            return
        self._queue_s = now_s
        is_epoch = now_s >= self._next_epoch_s
        self._next_epoch_s = now_s + EPOCH_S if is_epoch else self._next_epoch_s
        self._contexts.queue_changed(itertools.islice(calls, MOST_TURNS if is_epoch else NEXT_TURNS), now_s)

    def call_arrived(self, call: SimCall) -> None:
        self._contexts.call_arrived(call, self._now_s)
        self._program_changed(call.owner)

    def _program_changed(self, program: SimProgram) -> None:
        if program.number in self._front_programs:
            self._front.clear()

    def call_moved(self, call: SimCall) -> None:
        self._contexts.call_moved(call)

    def call_began(self, call: SimCall, waited_s: float) -> None:
        self._contexts.call_began(call, waited_s, self._now_s)

    def call_left(self, call: SimCall, segment: Segment, *, has_ended: bool) -> None:
        self._contexts.call_left(call, segment, None if has_ended else self._now_s, self._now_s)
        leaf: Segment | None = segment
        while leaf is not None and not leaf.tokens and leaf in self._leaves:  # or what is before it would be no leaf
            self._drop(leaf)
            leaf = leaf.parent
        if has_ended:
            self._program_changed(call.owner)

    def program_ended(self, program: SimProgram) -> None:
        self._contexts.end_program(program)
        if self._front_programs:  # something is worth less than what somebody needs
            self._front.clear()
        if self._host is not None:
            self._host.evict_first(program.keys)

    def release(self, own: Segment) -> None:
        super().release(own)
        segment: Segment | None = own
        while segment is not None and not segment.pins:
            self._contexts.used(segment, self._now_s)
            if segment in self._leaves:
                self._marked[segment] = None
            segment = segment.parent

    def _split(self, segment: Segment, at: int) -> Segment:
        head = super()._split(segment, at)
        self._contexts.used(head, self._now_s)
        return head

    def _shorten(self, leaf: Segment, tokens: int) -> None:
        super()._shorten(leaf, tokens)
        for context in self._contexts.ending_in(leaf):
            context.tokens = leaf.end

    def _drop(self, leaf: Segment) -> None:
        super()._drop(leaf)
        self._contexts.segment_dropped(leaf)
        self._entry_of.pop(leaf, None)
        if leaf.parent is not None and leaf.parent in self._leaves:
            self._marked[leaf.parent] = None

    def _next_leaf(self) -> Segment:
        """The leaf to evict next. As engines do, it names what goes next some blocks ahead."""
        while self._front:
            leaf, end = self._front[0]
            if leaf in self._leaves and leaf.end > end:
                return leaf
            self._front.popleft()
        self._make_front()
        return self._front[0][0]

    def _make_front(self) -> None:
        self._rank_marked()
        left, taken = self._ahead_tokens, []
        while left > 0 and self._order:
            _, entry, leaf = first = heapq.heappop(self._order)
            if leaf not in self._leaves or self._entry_of.get(leaf) != entry:
                continue
            taken.append(first)
            segment: Segment = leaf
            while left > 0:
                self._front.append((segment, max(segment.base, segment.end - left)))
                left -= segment.tokens
                parent = segment.parent
                if parent is None or parent.pins or parent.children > 1 or self._contexts.ending_in(parent):
                    break
                segment = parent
        for each in taken:
            heapq.heappush(self._order, each)
        self._front_programs = {
            context.program for segment, _ in self._front for context in self._contexts.ending_in(segment)
        }

    def _rank_marked(self) -> None:
        """Rank the leaves to which something has happened, and those whose hold has expired."""
        if self._compares_with_all and self._compared_s != self._now_s:
            self._compared_s, self._marked = self._now_s, dict.fromkeys(self._leaves)
        if self._marked:
            self._contexts.compare()
        marked, self._marked = self._marked, {}
        for leaf in marked:
            self._rank(leaf)
        while self._expiries and self._expiries[0][0] <= self._now_s:
            _, entry, leaf = heapq.heappop(self._expiries)
            if self._entry_of.get(leaf) == entry:
                self._rank(leaf)

    def _rank(self, leaf: Segment) -> None:
        if leaf not in self._leaves:
            return
        self._entries += 1
        self._entry_of[leaf] = self._entries
        rank = self._contexts.rank(leaf, self._now_s)
        heapq.heappush(self._order, (rank, self._entries, leaf))
        if rank.group == Group.HELD:
            until_s = self._contexts.held_until_s(leaf, self._now_s)
            heapq.heappush(self._expiries, (until_s, self._entries, leaf))
        if len(self._order) > _MOST_STALE + 3 * len(self._leaves):
            self._order = [each for each in self._order if self._entry_of.get(each[-1]) == each[1]]
            heapq.heapify(self._order)

    # -- what its contexts ask and tell

    def memory(self) -> Memory:
        """The memory as policies see it."""
        used = min(1.0, (self.pinned + self._contexts.held_tokens) / self.capacity)
        return Memory(used, self.pinned, self._prefill_token_s, self._copy_token_s)

    def decided(self, context: Context) -> None:
        """A context was decided again."""

    def left_behind(self, context: Context) -> None:
        """The program of a context has ended."""

    def given_up(self, context: Context) -> None:
        """Nobody needs a context any more."""
        self.changed(context)

    def changed(self, context: Context) -> None:
        """Something has happened to a context, so its place in the order of eviction may be another."""
        leaf = self._contexts.end_of(context)
        if leaf is not None:
            self._marked[leaf] = None
