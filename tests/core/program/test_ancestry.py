"""Ancestry: which calls came before which, and the threads that they form."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import CallId, ThreadId
from weft.core.program.structure.parents import Ancestry, newest

A, B, C, D = map(CallId, "abcd")


class Made(Ancestry):
    """An ancestry to which calls are added by the ids of their parents."""

    def __init__(self, keep: int = 1000) -> None:
        count = itertools.count()
        super().__init__(lambda: ThreadId(f"t{next(count)}"), keep)

    def begin(self, call_id: CallId, parents: Collection[CallId] = (), preferred: Collection[CallId] = ()) -> str:
        before = self.set_of(parents)
        covered = before | self.past_of(before)
        return self.add(call_id, before, covered, covered, preferred)


def test_sets_of_calls() -> None:
    """In a diamond, the ancestors of a call, of several calls, and the order of a set are right."""
    calls = Made()
    calls.begin(A)
    calls.begin(B, [A])
    calls.begin(C, [A])
    calls.begin(D, [B, C])
    assert calls.in_order(calls.past(D)) == (A, B, C)
    assert calls.in_order(calls.past_of(calls.set_of([B, C]))) == (A,)
    assert [calls.contains(calls.past(D), call) for call in (A, D, CallId("unknown"))] == [True, False, False]
    assert calls.in_order(calls.set_of([C, A, B])) == (A, B, C)
    assert calls.in_order(newest(calls.set_of([C, A, B]), 2)) == (B, C)
    calls.finish(B)
    assert [calls.has_finished(call) for call in (A, B, CallId("unknown"))] == [False, True, False]
    assert calls.in_order(calls.finished) == (B,)


def test_a_join_continues_the_thread_of_a_preferred_parent() -> None:
    """Without a preferred parent that is the last call of its thread, it continues the thread of its oldest parent."""
    for preferred, expected in (((), "t0"), ((B,), "t1"), ((A, B), "t0"), ((CallId("unknown"),), "t0")):
        calls = Made()
        calls.begin(A)
        calls.begin(B)
        assert calls.begin(C, (A, B), preferred) == expected


def test_old_calls_that_are_not_in_use_are_forgotten() -> None:
    """The newest calls stay, and the calls that are in use. Their order and their ancestors stay the same."""
    calls = Made(keep=2)
    names = [CallId(str(number)) for number in range(5)]
    for number, name in enumerate(names):
        calls.begin(name, names[max(0, number - 1) : number])
        calls.finish(name)
    before = calls.set_of(names)
    renumbered = calls.forget(lambda: calls.set_of(["0"]))  # type: ignore[list-item]
    assert renumbered is not None
    assert list(calls._calls) == ["0", "3", "4"]
    assert calls.in_order(renumbered(before)) == ("0", "3", "4")
    assert calls.in_order(calls.past(names[4])) == ("0", "3")
    assert calls.in_order(calls.finished) == ("0", "3", "4")
    assert calls.forget(lambda: 0) is None, "nothing is forgotten before the limit"


def test_the_thread_of_a_failed_call_is_not_given_to_others() -> None:
    """If a parent of the failed call is forgotten, no call can have the same parents."""
    calls = Made(keep=1)
    calls.begin(A)
    calls.begin(B, [A])
    calls.begin(C, [A])
    calls.forget(lambda: calls.set_of([C]))
    assert list(calls._calls) == ["c"]
    calls.release_thread(C)
    assert calls.begin(D) == "t2"


@given(st.sets(st.integers(0, 300), min_size=1), st.data())
def test_any_set_is_read_in_order(numbers: set[int], data: st.DataObject) -> None:
    """The calls of a set come in the order of their numbers, and the newest are the last of them."""
    calls = Made()
    for number in range(301):
        calls.begin(CallId(str(number)))
    chosen = calls.set_of(CallId(str(number)) for number in numbers)
    expected = tuple(map(str, sorted(numbers)))
    assert calls.in_order(chosen) == expected
    count = data.draw(st.integers(1, len(numbers)))
    assert calls.in_order(newest(chosen, count)) == expected[-count:]
