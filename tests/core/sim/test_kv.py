"""The KV cache of a simulated replica: sharing, pinning and eviction."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate
from weft.core.sim.kv_cache.cache import KvCache, Segment


def test_a_prefix_is_shared_and_pinned_once() -> None:
    """Two calls that share 30 tokens of a third call take capacity only for their other tokens."""
    kv = KvCache(100)
    kv.release(kv.reserve("a", None, 0, 40))
    for key in "bc":
        segment, hit = kv.find([("a", 30)])
        assert hit == 30
        kv.reserve(key, segment, hit, 50)
    assert (kv.pinned, kv.cached) == (30 + 20 + 20, 10)
    kv.check_integrity()


def test_the_longest_cached_prefix_is_found() -> None:
    """The cache is searched for a call's own KV first and for that of its ancestors next. The hit ends where the shared
    tokens end."""
    kv = KvCache(math.inf)
    a = kv.reserve("a", None, 0, 40)
    b = kv.reserve("b", a, 40, 60)
    assert kv.find([("c", 90), ("b", 80), ("a", 35)]) == (b, 60)
    assert kv.find([("b", 35)]) == (a, 35)
    assert kv.find([("c", 90), ("a", 35)]) == (a, 35)
    assert kv.find([("c", 90)]) == (None, 0)


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    """Of two prefixes, the older one loses tokens at its end, and the rest of it is still found."""
    kv = KvCache(100)
    kv.release(kv.reserve("a", None, 0, 40))
    kv.release(kv.reserve("b", None, 0, 40))
    kv.reserve("c", None, 0, 50)
    assert (kv.find([("a", 40)])[1], kv.find([("b", 40)])[1]) == (10, 40)
    assert (kv.pinned, kv.cached, kv.available) == (50, 50, 50)
    kv.check_integrity()


def test_a_segment_is_evicted_before_its_parent() -> None:
    """A call's own tokens are evicted before the tokens that it shared, although the shared tokens are older."""
    kv = KvCache(100)
    a = kv.reserve("a", None, 0, 40)
    kv.release(a)
    kv.release(kv.reserve("b", a, 40, 60))
    kv.release(kv.reserve("other", None, 0, 20))
    kv.reserve("c", None, 0, 50)
    assert (kv.find([("b", 60), ("a", 40)])[1], kv.find([("other", 20)])[1]) == (30, 20)


def test_a_pinned_prefix_is_not_available() -> None:
    """Pinned tokens do not count as available, and a call that shares them takes only its other tokens."""
    kv = KvCache(100)
    a = kv.reserve("a", None, 0, 40)
    assert (kv.available, kv.cost(a, 40, 70), kv.cost(None, 0, 70)) == (60, 30, 70)
    kv.release(a)
    assert (kv.available, kv.cost(a, 40, 70)) == (100, 70)


def test_reserved_tokens_evict_others_only_once_they_are_computed() -> None:
    """An engine allocates a prompt's blocks chunk by chunk, so a long prompt does not evict everything at its start."""
    kv = KvCache(100)
    kv.release(kv.reserve("old", None, 0, 60))
    kv.unfilled = 80
    kv.reserve("new", None, 0, 80)
    assert (kv.available, kv.cached) == (20, 60)
    for unfilled, cached in ((50, 60), (40, 60), (30, 50), (0, 20)):
        kv.fill(unfilled)
        assert kv.cached == cached
        kv.check_integrity()


def test_prefixes_are_evicted_in_blocks() -> None:
    """Where one token lacks, a whole block goes."""
    kv = KvCache(96, block_tokens=32)
    kv.release(kv.reserve("old", None, 0, 64))
    kv.reserve("new", None, 0, 33)
    assert kv.find([("old", 64)])[1] == 32


def test_without_prefix_caching_no_prefix_is_kept() -> None:
    """A call's tokens leave the cache when it stops."""
    kv = KvCache(100, keep=False)
    kv.release(kv.reserve("a", None, 0, 40))
    assert (kv.pinned, kv.cached, kv.find([("a", 40)])) == (0, 0, (None, 0))
    kv.check_integrity()


class Cache(RuleBasedStateMachine):
    """Calls start, grow, stop and resume in any order. The model knows which tokens each call shares."""

    CAPACITY = 60

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(self.CAPACITY)
        self.running: dict[int, tuple[Segment, int]] = {}  # their own segments and their tokens
        self.paths: dict[int, list[tuple[int, int]]] = {}  # (ancestor, tokens shared with it), the nearest first
        self.lengths: dict[int, int] = {}
        self.number = 0

    @rule(data=st.data(), more=st.integers(0, 15))
    def start(self, data: st.DataObject, more: int) -> None:
        """Start a call that shares some tokens of a stopped call, or none."""
        parent = data.draw(st.sampled_from([None, *(call for call in self.lengths if call not in self.running)]))
        shared = data.draw(st.integers(0, self.lengths[parent])) if parent is not None else 0
        path: list[tuple[int, int]] = []
        if parent is not None and shared:
            path = [(parent, shared), *((call, min(shared, count)) for call, count in self.paths[parent])]
        tokens = shared + more
        if self.admit(self.number, path, tokens):
            self.paths[self.number], self.lengths[self.number] = path, tokens
            self.number += 1

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Start a stopped call again with the tokens of it that are still cached."""
        stopped = [number for number in self.lengths if number not in self.running]
        if stopped:
            number = data.draw(st.sampled_from(stopped))
            self.admit(number, [(number, self.lengths[number]), *self.paths[number]], self.lengths[number])

    def admit(self, number: int, path: list[tuple[int, int]], tokens: int) -> bool:
        """Admit a call if it fits."""
        segment, hit = self.kv.find(path)
        assert hit <= max((shared for _, shared in path), default=0)
        fits = self.kv.cost(segment, hit, tokens) <= self.kv.available
        if fits:
            before, cost = self.kv.pinned, self.kv.cost(segment, hit, tokens)
            own = self.kv.reserve(number, segment, hit, tokens)
            assert own.end == tokens
            assert self.kv.pinned - before == cost
            self.running[number] = (own, tokens)
        return fits

    @precondition(lambda self: self.running and self.kv.available >= 1)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """A running call generates a token."""
        number = data.draw(st.sampled_from(list(self.running)))
        own, tokens = self.running[number]
        self.kv.grow(1)
        self.kv.settle(own, 1)
        self.running[number] = (own, tokens + 1)
        self.lengths[number] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A running call stops. Immediately afterwards all of its tokens are still found."""
        number = data.draw(st.sampled_from(list(self.running)))
        own, tokens = self.running.pop(number)
        assert own.end == tokens
        self.kv.release(own)
        assert self.kv.find([(number, tokens)])[1] == tokens

    @invariant()
    def counts_agree(self) -> None:
        """The counts agree with the tree, and do not exceed the capacity."""
        self.kv.check_integrity()
        assert self.kv.pinned <= sum(tokens for _, tokens in self.running.values())


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCache = Cache.TestCase


def test_a_recomputed_prefix_is_shared_again() -> None:
    """Another program has all but 4 tokens of a call evicted. Of the three calls that follow it, the first computes the
    prefix again, and the other two find it."""
    evicted = TraceProgram(
        "evicted",
        (
            TraceCall("a", (), output_tokens=1, prompt_tokens=100),
            *(
                TraceCall(name, ("a",), output_tokens=1, prompt_tokens=105, shared_prefix_tokens=101, gap_s=50.0)
                for name in "bcd"
            ),
        ),
    )
    big = TraceProgram("big", (TraceCall("x", (), output_tokens=1, prompt_tokens=240),), arrival_s=10.0)
    result = simulate([evicted, big], SimSettings(kv_tokens=245, batch_size=4))
    assert result.counts.prefix_hits == 4 + 2 * 101
