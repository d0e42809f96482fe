"""KV policies in the simulator: the contexts that programs leave in a simulated KV cache, and which of them is evicted.

The policies and predictors are those of engines. Contexts lie in segments here and in blocks there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from weft.core.kv_cache.eviction_order import Group, group_of
from weft.core.kv_cache.fetch_ahead import Expected, contexts_to_fetch
from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.policies.step_costs import StepCosts
from weft.core.prediction import Reuse, ToolTimes, Waits
from weft.core.prediction.tool_times import pause_name
from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.host import HostTier
from weft.core.sim.kv import KvCache, Segment
from weft.core.sim.result import Counts
from weft.core.sim.settings import SimSettings

_EPOCH_S: Final = 1.0
_QUEUE_S: Final = 0.1  # the queue's order is looked at so often
_FETCH_SHARE: Final = 0.99  # of the capacity that fetched contexts may fill


class _Fetch(NamedTuple):
    done_s: float
    context: Context
    call: SimCall  # that left it
    own: Segment  # the tokens that come, which nobody finds before


class KeptKv(KvCache):
    """A KV cache in which a KV policy chooses what is evicted.

    Args:
        capacity: In tokens, bounded.
        policy: A policy of its own.
        prefill_token_s: Seconds to compute a prompt token.
        host: Host memory of its own. None: nothing is spilled.
    """

    def __init__(self, capacity: float, policy: KvPolicy, prefill_token_s: float, host: HostTier | None = None) -> None:
        super().__init__(capacity)
        self._policy = policy
        self._prefill_token_s = prefill_token_s
        self._host = host
        self._tool_times, self._reuse, self._waits = ToolTimes(), Reuse(), Waits()
        self._contexts: dict[Hashable, dict[int, Context]] = {}  # of each program, by the call that left it
        self._calls: dict[Context, SimCall] = {}  # that left them
        self._where: dict[Context, Segment] = {}
        self._inside: dict[Segment, dict[Context, None]] = {}  # the contexts that end in a segment
        self._used_s: dict[Segment, float] = {}  # of segments without contexts: when they were last used
        self._held: dict[Context, int] = {}
        self._fetches: dict[Context, _Fetch] = {}  # in the order in which they are done
        self._now_s = 0.0
        self._epoch_s = self._queue_s = -math.inf
        self._entries = 0
        self._order: list[tuple[int, float, int, int, Segment]] | None = None  # the leaves, until something changes

    def tick(self, now_s: float) -> None:
        """The time is `now_s`. Copies are done, and in each epoch all contexts are decided again."""
        if now_s > self._now_s:
            self._now_s, self._order = now_s, None
        if self._host is not None:
            self._host.tick(now_s)
            while self._fetches and (first := next(iter(self._fetches.values()))).done_s <= now_s:
                self._finish(first)
        if now_s >= self._epoch_s + _EPOCH_S and self._policy.decides:
            self._epoch_s = now_s
            for context in self._where:
                self._decide(context)

    def queue_changed(self, calls: Iterable[SimCall], now_s: float) -> None:
        """These calls wait, the one that starts next first. Looked at from time to time."""
        if now_s < self._queue_s + _QUEUE_S:
            return
        self._queue_s, self._order = now_s, None
        for turn, call in enumerate(calls):
            context = self._needed_by(call)
            if context is not None:
                context.turn_s = now_s + turn * self._waits.turn_s
        if self._host is not None:
            self._fetch_ahead(self._host)

    def call_arrived(self, call: SimCall) -> None:
        """A call has arrived, and needs the context of its first parent."""
        context = self._needed_by(call)
        if context is None or context.called_s is not None:
            return
        context.called_s = self._now_s
        self._tool_times.observe(pause_name(context.tool, context.name), self._now_s - context.used_s)
        self._reuse.observe(context.name, context.age, continued=True)
        self._decide(context)

    def call_began(self, call: SimCall, waited_s: float) -> None:
        """A call starts to run for the first time."""
        self._waits.observe(self._now_s, waited_s)
        for context in self._contexts.get(call.owner.number, {}).values():
            context.age += 1
            context.chance = self._reuse.chance(context.name, context.age)

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        if self._host is None:
            return hit, 0.0
        context = self._needed_by(call)
        fetch = self._fetches.get(context) if context is not None else None
        begun, left_s = hit, 0.0
        if fetch is not None:
            begun, left_s = max(hit, fetch.own.end), fetch.done_s - self._now_s
            self._cancel(fetch)  # the call reserves the tokens itself
        tokens = max(hit, self._host.tokens_of(call))
        if tokens > begun:
            left_s = self._host.fetch(tokens - begun, self._now_s) - self._now_s
        return tokens, left_s

    def call_ended(self, call: SimCall, segment: Segment) -> None:
        """A call has ended. What it leaves takes the place of its first parent's context."""
        self._leave(call, segment, None)

    def call_preempted(self, call: SimCall, segment: Segment) -> None:
        """A running call waits again, and needs what it leaves."""
        self._leave(call, segment, self._now_s)

    def _leave(self, call: SimCall, segment: Segment, called_s: float | None) -> None:
        owner, spec = call.owner, call.spec
        mine = self._contexts.setdefault(owner.number, {})
        if spec.parents:
            self._give_up(mine.pop(owner.index_of[spec.parents[0]], None))
        tool = next((owner.spec.calls[child].tool for child in owner.children[call.index]), None)
        name = owner.view.name
        context = Context(owner.number, name, self._now_s, self._tool_times.of(pause_name(tool, name)), tool=tool)
        context.called_s = called_s
        context.tokens, context.chance = call.context_tokens, self._reuse.chance(name, 0)
        self._give_up(mine.get(call.index))
        mine[call.index] = context
        self._calls[context] = call
        self._put(context, segment)
        self._decide(context)

    def program_ended(self, program: SimProgram) -> None:
        """No call of a program will come."""
        for context in self._contexts.pop(program.number, {}).values():
            if context.called_s is None:
                self._reuse.observe(context.name, context.age, continued=False)
            self._give_up(context)
        if self._host is not None:
            self._host.program_ended(program)

    def release(self, own: Segment) -> None:
        super().release(own)
        self._order = None
        segment: Segment | None = own
        while segment is not None and not segment.pins:
            self._used_s[segment] = self._now_s
            segment = segment.parent

    def _evict(self) -> None:
        super()._evict()
        if self.pinned > self.capacity and self._fetches:  # running calls go first
            for fetch in list(self._fetches.values()):
                self._cancel(fetch)
            super()._evict()

    def _split(self, segment: Segment, at: int) -> Segment:
        head = super()._split(segment, at)
        self._used_s[head] = self._now_s
        return head

    def _next_leaf(self) -> Segment:
        if self._order is None:
            memory = self._memory()
            self._order = [self._entry(leaf, memory) for leaf in self._leaves]
            heapq.heapify(self._order)
        while self._order[0][-1] not in self._leaves:
            heapq.heappop(self._order)
        return self._order[0][-1]

    def _drop(self, leaf: Segment) -> None:
        parent = leaf.parent
        contexts = self._inside.pop(leaf, {})
        used_s = self._used_s.pop(leaf, 0.0)
        super()._drop(leaf)
        for context in contexts:
            del self._where[context]
            context.tokens = 0
            if parent is not None:
                self._put(context, parent)
            else:
                self._held.pop(context, None)
        if parent is not None:
            self._used_s[parent] = max(self._used_s.get(parent, 0.0), used_s)
            if self._order is not None and parent in self._leaves:
                heapq.heappush(self._order, self._entry(parent, self._memory()))

    def _entry(self, leaf: Segment, memory: Memory) -> tuple[int, float, int, int, Segment]:
        self._entries += 1
        contexts = self._inside.get(leaf)
        if not contexts:
            is_common = isinstance(leaf.key, tuple) and leaf.key[0] == "name"
            group = Group.LEFT if is_common or not self._policy.evicts_ended_first else Group.ENDED
            used_s = self._used_s.get(leaf, 0.0)
            return group, self._policy.worth_of_nobody(used_s, memory, self._now_s), -leaf.end, self._entries, leaf
        group = max(group_of(context, self._now_s) for context in contexts)
        best = (each for each in contexts if group_of(each, self._now_s) == group)
        worth = self._policy.worth_together(self._policy.worth(each, memory, self._now_s) for each in best)
        return group, worth, -leaf.end, self._entries, leaf

    def _memory(self) -> Memory:
        used = min(1.0, (self.pinned + sum(self._held.values())) / self.capacity)
        copy_token_s = math.inf if self._host is None else self._host.copy_token_s
        return Memory(used, self.pinned, self._prefill_token_s, copy_token_s, self._waits.wait_s)

    def _needed_by(self, call: SimCall) -> Context | None:
        """The context that a call continues: what it left when it was preempted, or that of its first parent."""
        mine = self._contexts.get(call.owner.number)
        if mine is None or call.index in mine:
            return mine[call.index] if mine else None
        parents = call.spec.parents
        return mine.get(call.owner.index_of[parents[0]]) if parents else None

    # -- copies

    def _fetch_ahead(self, host: HostTier) -> None:
        memory, now_s = self._memory(), self._now_s
        expected = [
            Expected(context, context.expected_s(memory, now_s), context.called_s is not None, context.tokens, missing)
            for context, call in self._calls.items()
            if context not in self._fetches and not call.running
            for missing in (max(0, host.tokens_of(call) - context.tokens),)
        ]
        room_tokens = _FETCH_SHARE * self.capacity - self.pinned
        for context in contexts_to_fetch(
            expected, room_tokens=room_tokens, copy_token_s=host.copy_token_s, busy_s=host.busy_s(now_s)
        ):
            call = self._calls[context]
            segment, hit = self.find(call.prefixes())
            tokens = host.tokens_of(call)
            if hit < tokens and self.cost(segment, hit, tokens) <= self.available:
                own = self.reserve(("fetch", context), segment, hit, tokens)
                self._fetches[context] = _Fetch(host.fetch(tokens - hit, now_s), context, call, own)

    def _finish(self, fetch: _Fetch) -> None:
        """A copy is done: what it brought is found from now on, unless it is there already."""
        context, own, key = fetch.context, fetch.own, fetch.call.kv_key
        before = self._index.get(key)
        if before is not None and before.end >= own.end:
            self._cancel(fetch)
            return
        del self._fetches[context], self._index[own.key]
        if before is not None:
            before.key = None
        own.key, self._index[key] = key, own
        self.release(own)
        self._leave_segment(context)
        self._put(context, own)

    def _cancel(self, fetch: _Fetch) -> None:
        """Nobody needs what a copy brings any more."""
        own = fetch.own
        del self._fetches[fetch.context], self._index[own.key]
        own.key = None
        self.release(own)
        self._drop(own)

    def _decide(self, context: Context) -> None:
        self._order = None
        if not self._policy.decides:
            return
        context.decision = self._policy.decide(context, self._memory(), self._now_s)
        self._held.pop(context, None)
        if context not in self._where:
            return
        if context.decision.action is Action.KEEP:
            self._held[context] = self._where[context].tokens
        elif context.decision.action is Action.SPILL and self._host is not None:
            call = self._calls[context]
            self._host.spill(call, context.tokens, self._now_s)
            context.on_host = self._host.tokens_of(call) >= context.tokens

    def _put(self, context: Context, segment: Segment) -> None:
        self._where[context] = segment
        self._inside.setdefault(segment, {})[context] = None
        context.tokens = segment.end

    def _give_up(self, context: Context | None) -> None:
        if context is None:
            return
        self._order = None
        if context in self._fetches:
            self._cancel(self._fetches[context])
        self._calls.pop(context, None)
        self._held.pop(context, None)
        self._leave_segment(context)

    def _leave_segment(self, context: Context) -> None:
        segment = self._where.pop(context, None)
        if segment is not None:
            del self._inside[segment][context]
            if not self._inside[segment]:
                del self._inside[segment]


def kv_cache(settings: SimSettings, counts: Counts) -> KvCache:
    """The KV cache of a replica: ruled by a KV policy, if there is one and something can be evicted. `counts` are the
    totals to add copies to."""
    capacity, config = settings.kv_capacity, settings.kv_policy
    if config is None or not settings.shares_prefixes or capacity == math.inf:
        return KvCache(capacity, keep=settings.shares_prefixes)
    host = None
    if settings.host_kv_tokens:
        host = HostTier(settings.host_kv_tokens, settings.swap_token_s, counts)
    # Steps that are all alike do not tell the speed. An engine then assumes the default, too.
    prefill_token_s = settings.timing.prefill_token_s or StepCosts().prefill_token_s
    return KeptKv(capacity, config.make(), prefill_token_s, host)
