"""A simulated KV cache in which a KV policy chooses what is evicted, and what is copied to host memory and back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from weft.core.kv_cache.eviction_order import Rank
from weft.core.kv_cache.fetch_ahead import Expected, contexts_to_fetch
from weft.core.kv_cache.policies import Action, Context, KvPolicy, Memory
from weft.core.policies.steps.costs import StepCosts
from weft.core.sim.calls import SimCall, SimProgram
from weft.core.sim.host import HostMemory
from weft.core.sim.kv import KvCache, Segment
from weft.core.sim.result import Counts
from weft.core.sim.segment_contexts import SegmentContexts
from weft.core.sim.settings import SimSettings

_QUEUE_S: Final = 0.1  # time from one look at the queue's order to the next
_FETCH_SHARE: Final = 0.99  # the share of the capacity up to which contexts are fetched


class _Fetch(NamedTuple):
    done_s: float
    context: Context
    call: SimCall  # the call that left the context
    own: Segment  # reserved for the copied tokens, which are found once the copy is done


class PolicyKvCache(KvCache):
    """A KV cache in which a KV policy chooses what is evicted.

    Args:
        settings: The simulation's settings. The KV cache must be bounded.
        policy: A KV policy object of its own.
        host: Host memory of its own. None: nothing is spilled.
    """

    def __init__(self, settings: SimSettings, policy: KvPolicy, host: HostMemory | None = None) -> None:
        super().__init__(settings.kv_capacity, block_tokens=settings.block_tokens)
        # If prompts take no time, assume the default, as an engine does until it has measured.
        self._prefill_token_s = settings.timing.prefill_token_s or StepCosts().prefill_token_s
        # Under a policy that decides nothing, each context is copied when its call ends, as vLLM's offloading does, and
        # copied back when the next call starts.
        self._copies_all = host is not None and not policy.decides
        self._fetches_ahead = settings.fetches_ahead and policy.decides
        self._host = host
        self._fetches: dict[Context, _Fetch] = {}  # in the order in which they are done
        self._now_s = 0.0
        self._queue_s = -math.inf
        self._entries = 0
        self._order: list[tuple[Rank, int, Segment]] | None = None  # heap of the leaves; None after a change
        self._contexts = SegmentContexts(
            policy, Memory(0.0, 0, self._prefill_token_s), self, knows_pauses=settings.knows_pauses
        )

    def tick(self, now_s: float) -> None:
        """The time is `now_s`. Finish copies, and in each epoch decide again on all contexts."""
        if now_s > self._now_s:
            self._now_s, self._order = now_s, None
        if self._host is not None:
            self._host.tick(now_s)
            while self._fetches and (first := next(iter(self._fetches.values()))).done_s <= now_s:
                self._finish(first)
        self._contexts.tick(now_s)

    def queue_changed(self, calls: Iterable[SimCall], now_s: float) -> None:
        """These calls wait; the call that starts next comes first. The order is read every `_QUEUE_S`."""
        if now_s < self._queue_s + _QUEUE_S:
            return
        self._queue_s, self._order = now_s, None
        self._contexts.queue_changed(calls, now_s)
        if self._host is not None and self._fetches_ahead:
            self._fetch_ahead(self._host)

    def call_arrived(self, call: SimCall) -> None:
        self._contexts.call_arrived(call, self._now_s)

    def call_moved(self, call: SimCall) -> None:
        self._contexts.call_moved(call)

    def call_began(self, call: SimCall, waited_s: float) -> None:
        self._contexts.call_began(call, waited_s, self._now_s)

    def load(self, call: SimCall, hit: int) -> tuple[int, float]:
        if self._host is None:
            return hit, 0.0
        context = self._contexts.needed_by(call)
        fetch = self._fetches.get(context) if context is not None else None
        begun, left_s = hit, 0.0
        if fetch is not None:
            begun, left_s = max(hit, fetch.own.end), fetch.done_s - self._now_s
            self._cancel(fetch)  # the call reserves these tokens itself
        tokens = max(hit, self._host.tokens_of(call))
        if tokens > begun:
            left_s = self._host.fetch(tokens - begun, self._now_s) - self._now_s
        return tokens, left_s

    def call_ended(self, call: SimCall, segment: Segment) -> None:
        self._contexts.call_left(call, segment, None, self._now_s)
        self._copy(call, segment)

    def call_preempted(self, call: SimCall, segment: Segment) -> None:
        """A running call waits again, and needs the context that it leaves."""
        self._contexts.call_left(call, segment, self._now_s, self._now_s)
        self._copy(call, segment)

    def _copy(self, call: SimCall, segment: Segment) -> None:
        if self._copies_all and self._host is not None:
            self._host.spill(call, segment.end, self._now_s)

    def program_ended(self, program: SimProgram) -> None:
        self._contexts.program_ended(program)
        if self._host is not None:
            self._host.program_ended(program)

    def release(self, own: Segment) -> None:
        super().release(own)
        self._order = None
        segment: Segment | None = own
        while segment is not None and not segment.pins:
            self._contexts.used(segment, self._now_s)
            segment = segment.parent

    def _evict(self) -> None:
        super()._evict()
        if self.pinned > self.capacity and self._fetches:  # running calls go first
            for fetch in list(self._fetches.values()):
                self._cancel(fetch)
            super()._evict()

    def _split(self, segment: Segment, at: int) -> Segment:
        head = super()._split(segment, at)
        self._contexts.used(head, self._now_s)
        return head

    def _next_leaf(self) -> Segment:
        if self._order is None:
            self._contexts.compare()
            self._order = [self._entry(leaf) for leaf in self._leaves]
            heapq.heapify(self._order)
        while self._order[0][-1] not in self._leaves:
            heapq.heappop(self._order)
        return self._order[0][-1]

    def _drop(self, leaf: Segment) -> None:
        super()._drop(leaf)
        self._contexts.segment_dropped(leaf)
        parent = leaf.parent
        if self._order is not None and parent is not None and parent in self._leaves:
            heapq.heappush(self._order, self._entry(parent))

    def _entry(self, leaf: Segment) -> tuple[Rank, int, Segment]:
        self._entries += 1
        return self._contexts.rank(leaf, self._now_s), self._entries, leaf

    # -- as the `SegmentCache` of its contexts

    def memory(self) -> Memory:
        """The memory as policies see it."""
        used = min(1.0, (self.pinned + self._contexts.held_tokens) / self.capacity)
        copy_token_s = math.inf if self._host is None else self._host.copy_token_s
        return Memory(used, self.pinned, self._prefill_token_s, copy_token_s)

    def decided(self, context: Context) -> None:
        """A context was decided again. Copy it to host memory if it is to be spilled."""
        self._order = None
        if context.decision.action is Action.SPILL and self._host is not None and self._contexts.is_cached(context):
            call = self._contexts.call_of[context]
            self._host.spill(call, context.tokens, self._now_s)
            context.on_host = self._host.tokens_of(call) >= context.tokens

    def given_up(self, context: Context) -> None:
        """Nobody needs a context any more."""
        self._order = None
        if context in self._fetches:
            self._cancel(self._fetches[context])

    # -- copies

    def _fetch_ahead(self, host: HostMemory) -> None:
        memory, now_s = self._contexts.refresh(), self._now_s
        expected = [
            Expected(context, context.expected_s(memory, now_s), context.called_s is not None, context.tokens, missing)
            for context, call in self._contexts.call_of.items()
            if context not in self._fetches and not call.running
            for missing in (max(0, host.tokens_of(call) - context.tokens),)
        ]
        room_tokens = _FETCH_SHARE * self.capacity - self.pinned
        for context in contexts_to_fetch(
            expected, room_tokens=room_tokens, copy_token_s=host.copy_token_s, busy_s=host.busy_s(now_s)
        ):
            call = self._contexts.call_of[context]
            segment, hit = self.find(call.prefixes())
            tokens = host.tokens_of(call)
            if hit < tokens and self.cost(segment, hit, tokens) <= self.available:
                own = self.reserve(("fetch", context), segment, hit, tokens)
                self._fetches[context] = _Fetch(host.fetch(tokens - hit, now_s), context, call, own)

    def _finish(self, fetch: _Fetch) -> None:
        """A copy is done. Its tokens are found from now on, unless the cache has them already."""
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
        self._contexts.put(context, own)

    def _cancel(self, fetch: _Fetch) -> None:
        """Nobody needs the tokens of a copy any more."""
        own = fetch.own
        del self._fetches[fetch.context], self._index[own.key]
        own.key = None
        self.release(own)
        self._drop(own)


def kv_cache(settings: SimSettings, counts: Counts) -> KvCache:
    """Make the KV cache of a replica. It has a KV policy if the settings have one and anything can be evicted.

    Args:
        settings: The simulation's settings.
        counts: The totals to which copies are added.
    """
    capacity, config = settings.kv_capacity, settings.kv_policy
    if config is None or not settings.shares_prefixes or capacity == math.inf:
        return KvCache(capacity, keep=settings.shares_prefixes, block_tokens=settings.block_tokens)
    host, policy = None, config.make()
    if settings.host_kv_tokens:
        host = HostMemory(settings.host_kv_tokens, settings.swap_token_s, counts, ended_first=policy.evicts_ended_first)
    return PolicyKvCache(settings, policy, host)
