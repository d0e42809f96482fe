"""The rule of eviction in host memory, by examples and against a naive model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.core.kv_cache.eviction import HostCopy, copies_to_evict


def running(call: str, extent: int, tokens: int = 8) -> HostCopy:
    """A copy whose call runs again."""
    return HostCopy(call, tokens, waiting=False, pinned=False, extents=frozenset([extent]))


def waiting(call: str, extent: int, tokens: int = 8) -> HostCopy:
    """A copy whose call is preempted."""
    return HostCopy(call, tokens, waiting=True, pinned=False, extents=frozenset([extent]))


def evicted(copies: list[HostCopy], needed_slots: int, *, tokens: int = 100, free_slots: int = 0) -> list[str] | None:
    """The copies that are given up, where every extent has two slots."""
    slots = {extent: 2 for copy in copies for extent in copy.extents}
    return copies_to_evict(copies, slots, tokens=tokens, free_slots=free_slots, needed_slots=needed_slots)


def test_copies_of_running_calls_go_first_and_the_oldest_of_them() -> None:
    """A running call needs its copy only if it is preempted again."""
    copies = [waiting("waits", 0, tokens=1), running("old", 1, tokens=90), running("young", 2, tokens=1)]
    assert evicted(copies, 1) == ["old"]
    assert evicted(copies, 4) == ["old", "young"]
    assert evicted(copies, 5) == ["old", "young", "waits"]


def test_the_shortest_waiting_call_goes_first() -> None:
    """The shortest call costs least to compute again; of two that are as long, the older one goes."""
    copies = [waiting("long", 0, tokens=9), waiting("first", 1, tokens=5), waiting("second", 2, tokens=5)]
    assert evicted(copies, 2) == ["first"]
    assert evicted(copies, 6) == ["first", "second", "long"]


def test_a_waiting_call_keeps_its_copy_from_a_shorter_one() -> None:
    """A waiting call that has as many tokens as the call at hand, or more, keeps its copy."""
    copies = [waiting("shorter", 0, tokens=4), waiting("equal", 1, tokens=5), waiting("longer", 2, tokens=6)]
    assert evicted(copies, 2, tokens=5) == ["shorter"]
    assert evicted(copies, 3, tokens=5) is None
    assert evicted([running("longer", 0, tokens=6)], 2, tokens=5) == ["longer"]


def test_a_pinned_copy_stays() -> None:
    """Neither a running nor a waiting call loses a copy that is pinned."""
    copies = [running("runs", 0)._replace(pinned=True), waiting("waits", 1)._replace(pinned=True), waiting("other", 2)]
    assert evicted(copies, 2) == ["other"]
    assert evicted(copies, 3) is None


def test_an_extent_becomes_free_with_its_last_copy() -> None:
    """Two calls share the copy of their prefix: both must go before its slots are free."""
    shared = [running("a", 0), running("b", 0)]
    assert evicted(shared, 2) == ["a", "b"]
    assert evicted([shared[0], shared[1]._replace(pinned=True)], 1) is None


def test_nothing_is_given_up_without_need_or_without_use() -> None:
    """With enough free slots no copy goes; where all of them would not be enough, none goes either."""
    copies = [running("a", 0), running("b", 1)]
    assert evicted(copies, 3, free_slots=3) == []
    assert evicted(copies, 7, free_slots=3) == ["a", "b"]
    assert evicted(copies, 8, free_slots=3) is None
    assert evicted([], 1) is None


def naive(
    copies: list[HostCopy], extent_slots: dict[int, int], tokens: int, free_slots: int, needed_slots: int
) -> list[str] | None:
    """Tries none, one, two … copies in the order of the rule, and counts the free slots from the start each time."""
    idle = [copy for copy in copies if not copy.waiting and not copy.pinned]
    shorter = [copy for copy in copies if copy.waiting and not copy.pinned and copy.tokens < tokens]
    order = idle + sorted(shorter, key=lambda copy: copy.tokens)
    held = {extent for copy in copies for extent in copy.extents}
    for count in range(len(order) + 1):
        gone = [copy.call for copy in order[:count]]
        still_held = {extent for copy in copies if copy.call not in gone for extent in copy.extents}
        if free_slots + sum(extent_slots[extent] for extent in held - still_held) >= needed_slots:
            return gone
    return None


@st.composite
def host_copies(draw: st.DrawFn) -> list[HostCopy]:
    """Copies of up to seven calls in up to six extents, some of them shared."""
    return [
        HostCopy(
            f"call-{number}",
            tokens=draw(st.integers(1, 6)),
            waiting=draw(st.booleans()),
            pinned=draw(st.sampled_from([False, False, True])),
            extents=draw(st.frozensets(st.integers(0, 5), max_size=3)),
        )
        for number in range(draw(st.integers(0, 7)))
    ]


@given(
    copies=host_copies(),
    extent_slots=st.fixed_dictionaries({extent: st.integers(1, 4) for extent in range(6)}),
    tokens=st.integers(1, 7),
    free_slots=st.integers(0, 3),
    needed_slots=st.integers(1, 12),
)
def test_the_rule_agrees_with_the_naive_model(
    copies: list[HostCopy], extent_slots: dict[int, int], tokens: int, free_slots: int, needed_slots: int
) -> None:
    """For any copies, sizes and needs, the same copies are given up in the same order."""
    found = copies_to_evict(copies, extent_slots, tokens=tokens, free_slots=free_slots, needed_slots=needed_slots)
    assert found == naive(copies, extent_slots, tokens, free_slots, needed_slots)
