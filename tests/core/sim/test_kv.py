"""The KV cache of a simulated replica: sharing, pinning, and what goes first."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate
from weft.core.sim.kv import KvCache, Segment


def test_a_prefix_is_shared_and_pinned_once() -> None:
    """Two calls that share 30 tokens of a third take only what they have beyond it."""
    kv = KvCache(100)
    kv.release(kv.reserve("a", None, 0, 40))
    for key in "bc":
        segment, hit = kv.find([("a", 30)])
        assert hit == 30
        kv.reserve(key, segment, hit, 50)
    assert (kv.pinned, kv.cached) == (30 + 20 + 20, 10)
    kv.check_integrity()


def test_the_longest_prefix_that_is_here_is_found() -> None:
    """Its own KV first, then its ancestors', as long as both share it."""
    kv = KvCache(math.inf)
    a = kv.reserve("a", None, 0, 40)
    b = kv.reserve("b", a, 40, 60)
    assert kv.find([("c", 90), ("b", 80), ("a", 35)]) == (b, 60)
    assert kv.find([("b", 35)]) == (a, 35)
    assert kv.find([("c", 90), ("a", 35)]) == (a, 35)
    assert kv.find([("c", 90)]) == (None, 0)


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    """Of two prefixes the older one is cut from its end; what is left of it is still found."""
    kv = KvCache(100)
    kv.release(kv.reserve("a", None, 0, 40))
    kv.release(kv.reserve("b", None, 0, 40))
    kv.reserve("c", None, 0, 50)
    assert (kv.find([("a", 40)])[1], kv.find([("b", 40)])[1]) == (10, 40)
    assert (kv.pinned, kv.cached, kv.available) == (50, 50, 50)
    kv.check_integrity()


def test_an_end_goes_before_what_it_follows() -> None:
    """When a call ends, its own tokens go first and then those it shared, although they are older."""
    kv = KvCache(100)
    a = kv.reserve("a", None, 0, 40)
    kv.release(a)
    kv.release(kv.reserve("b", a, 40, 60))
    kv.release(kv.reserve("other", None, 0, 20))
    kv.reserve("c", None, 0, 50)
    assert (kv.find([("b", 60), ("a", 40)])[1], kv.find([("other", 20)])[1]) == (30, 20)


def test_what_is_read_stays() -> None:
    """A pinned prefix is not counted as room, and a call that shares it costs only the rest."""
    kv = KvCache(100)
    a = kv.reserve("a", None, 0, 40)
    assert (kv.available, kv.cost(a, 40, 70), kv.cost(None, 0, 70)) == (60, 30, 70)
    kv.release(a)
    assert (kv.available, kv.cost(a, 40, 70)) == (100, 70)


def test_without_prefix_caching_nothing_stays() -> None:
    """A call's tokens go with it."""
    kv = KvCache(100, keep=False)
    kv.release(kv.reserve("a", None, 0, 40))
    assert (kv.pinned, kv.cached, kv.find([("a", 40)])) == (0, 0, (None, 0))
    kv.check_integrity()


class Cache(RuleBasedStateMachine):
    """Calls come, grow and go in any order; what is found is checked against whole prompts."""

    CAPACITY = 60

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCache(self.CAPACITY)
        self.running: dict[int, tuple[Segment, int]] = {}  # with their tokens
        self.paths: dict[int, list[tuple[int, int]]] = {}  # (ancestor, tokens shared with it), the nearest first
        self.lengths: dict[int, int] = {}
        self.number = 0

    @rule(data=st.data(), more=st.integers(0, 15))
    def start(self, data: st.DataObject, more: int) -> None:
        """A call that shares some tokens of one that has ended, or none."""
        parent = data.draw(st.sampled_from([None, *(each for each in self.lengths if each not in self.running)]))
        shared = data.draw(st.integers(0, self.lengths[parent])) if parent is not None else 0
        path: list[tuple[int, int]] = []
        if parent is not None and shared:
            path = [(parent, shared), *((each, min(shared, count)) for each, count in self.paths[parent])]
        tokens = shared + more
        if self.admit(self.number, path, tokens):
            self.paths[self.number], self.lengths[self.number] = path, tokens
            self.number += 1

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A call that was stopped goes on with what is left of it."""
        stopped = [number for number in self.lengths if number not in self.running]
        if stopped:
            number = data.draw(st.sampled_from(stopped))
            self.admit(number, [(number, self.lengths[number]), *self.paths[number]], self.lengths[number])

    def admit(self, number: int, path: list[tuple[int, int]], tokens: int) -> bool:
        """Let a call in if it fits."""
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
        """A running call gives a token."""
        number = data.draw(st.sampled_from(list(self.running)))
        own, tokens = self.running[number]
        self.kv.grow(1)
        self.kv.settle(own, 1)
        self.running[number] = (own, tokens + 1)
        self.lengths[number] += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A running call ends; right after that all of it is still found."""
        number = data.draw(st.sampled_from(list(self.running)))
        own, tokens = self.running.pop(number)
        assert own.end == tokens
        self.kv.release(own)
        assert self.kv.find([(number, tokens)])[1] == tokens

    @invariant()
    def adds_up(self) -> None:
        """Sums agree, and no more is held than there is room for."""
        self.kv.check_integrity()
        assert self.kv.pinned <= sum(tokens for _, tokens in self.running.values())


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCache = Cache.TestCase


def test_a_prefix_that_was_lost_is_shared_again() -> None:
    """Three calls follow one whose KV another program has pushed out but for 4 tokens: the first of them computes it
    again, and the other two find it."""
    lost = TraceProgram(
        "lost",
        (
            TraceCall("a", (), output_tokens=1, prompt_tokens=100),
            *(
                TraceCall(name, ("a",), output_tokens=1, prompt_tokens=105, shared_prefix_tokens=101, gap_s=50.0)
                for name in "bcd"
            ),
        ),
    )
    big = TraceProgram("big", (TraceCall("x", (), output_tokens=1, prompt_tokens=240),), arrival_s=10.0)
    result = simulate([lost, big], SimSettings(kv_tokens=245, batch_size=4))
    assert result.counts.prefix_hits == 4 + 2 * 101
