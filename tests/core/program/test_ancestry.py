"""Ancestry: which calls came before which, and the threads that they form."""

from __future__ import annotations

import itertools

from weft.core.ids import CallId, ThreadId
from weft.core.program.ancestry import Ancestry

A, B, C = map(CallId, "abc")


def ancestry(keep: int = 1000) -> Ancestry:
    count = itertools.count()
    return Ancestry(lambda: ThreadId(f"t{next(count)}"), keep)


def test_sets_of_calls() -> None:
    """In a diamond, the sets of ancestors, of calls with their ancestors, and of finished calls are right."""
    calls = ancestry()
    calls.add(A, ())
    calls.add(B, (A,))
    calls.add(C, (A,))
    calls.add(CallId("d"), (B, C))
    assert [calls.contains(calls.ancestors(["d"]), call) for call in ("a", "b", "c", "d")] == [True, True, True, False]  # type: ignore[list-item]
    assert [calls.contains(calls.with_ancestors([B]), call) for call in (A, B, C)] == [True, True, False]
    assert calls.in_order([C, A, B]) == (A, B, C)
    calls.finish(B)
    assert [calls.has_finished(call) for call in (A, B, CallId("unknown"))] == [False, True, False]


def test_a_join_continues_the_thread_of_a_preferred_parent() -> None:
    """Without a preferred parent that is the last call of its thread, it continues the thread of its first parent."""
    for preferred, expected in (((), "t0"), ((B,), "t1"), ((A, B), "t0"), ((CallId("unknown"),), "t0")):
        calls = ancestry()
        calls.add(A, ())
        calls.add(B, ())
        assert calls.add(C, (A, B), preferred) == expected


def test_old_calls_that_are_not_in_use_are_forgotten() -> None:
    """The newest calls stay, and the calls that are in use."""
    calls = ancestry(keep=2)
    for number in range(5):
        calls.add(CallId(str(number)), ())
    calls.forget(lambda: [CallId("0")])
    assert list(calls._calls) == ["0", "3", "4"]
    calls.forget(list)
    assert len(calls._calls) == 3, "nothing is forgotten before the limit"
