"""The queue of waiting calls, compared with a sorted list."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.policies import Call, ProgramView, Rank
from weft.core.policies.queues import WaitingCalls


def call(key: str, level: int = 0, order: int = 0) -> Call:
    return Call(key, ProgramView("p"), rank=Rank(level, order))


def queue_of(*calls: Call) -> WaitingCalls:
    queue = WaitingCalls()
    for each in calls:
        queue.push(each)
    return queue


def keys(queue: WaitingCalls) -> list[str]:
    return [each.key for each in queue]


def test_calls_are_in_rank_order() -> None:
    """Calls are sorted by level and then by their order in the level, however they were added."""
    ranks = [(level, order) for level in range(3) for order in range(4)]
    calls = [call(f"{level}{order}", level, order) for level, order in ranks]
    random.Random(3).shuffle(calls)
    queue = queue_of(*calls)
    expected = [f"{level}{order}" for level, order in ranks]
    assert keys(queue) == expected
    assert [queue.pop().key for _ in ranks] == expected


def test_equal_ranks_keep_the_order_of_adding() -> None:
    """Calls of the same rank are sorted by when they were added. Calls themselves are never compared."""
    queue = queue_of(*(call(key) for key in "badc"))
    assert keys(queue) == list("badc")


def test_an_empty_queue_has_no_first_call() -> None:
    """`peek` and `pop` of an empty queue raise an error that says so."""
    queue = WaitingCalls()
    assert len(queue) == 0
    assert list(queue) == []
    for take in (queue.peek, queue.pop):
        with pytest.raises(IndexError, match="the queue is empty"):
            take()


def test_a_call_is_in_once() -> None:
    """Adding a call that waits already is the caller's mistake, and does not change the queue."""
    twice = call("twice")
    queue = queue_of(twice)
    with pytest.raises(ValueError, match=r"already in the queue: .*twice"):
        queue.push(twice)
    assert keys(queue) == ["twice"]


def test_peek_leaves_the_call_in() -> None:
    """`peek` removes no call, and `pop` removes the call that `peek` returned."""
    first, second = call("first", 0), call("second", 1)
    queue = queue_of(second, first)
    assert queue.peek() is queue.peek() is first
    assert queue.pop() is first
    assert first not in queue
    assert second in queue


def test_discard_removes_a_call_from_anywhere() -> None:
    """`discard` removes a call from the middle of the queue, and ignores a call that does not wait."""
    calls = [call(key, order=order) for order, key in enumerate("abc")]
    queue = queue_of(*calls)
    queue.discard(calls[1])
    queue.discard(calls[1])
    queue.discard(call("never added"))
    assert keys(queue) == ["a", "c"]


@pytest.mark.parametrize("read_first", [True, False])
def test_a_call_can_be_added_again_with_another_rank(read_first: bool) -> None:
    """A call that was removed and added again is in the queue once, at its new rank."""
    moving = call("moving", 0)
    queue = queue_of(moving, call("other", 1))
    queue.discard(moving)
    moving.rank = Rank(2, 0)
    queue.push(moving)
    assert len(queue) == 2
    if read_first:
        assert keys(queue) == ["other", "moving"]
    assert queue.peek().key == "other"
    assert [queue.pop().key, queue.pop().key] == ["other", "moving"]


def test_a_partial_read_changes_nothing() -> None:
    """Iterating only a part, or failing on the way, leaves the queue unchanged."""
    queue = queue_of(*(call(str(number), order=number) for number in range(10)))
    for _ in itertools.islice(queue, 3):
        pass

    def fail() -> None:
        for each in queue:
            if each.key == "4":
                raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert keys(queue) == [str(number) for number in range(10)]


def test_a_rank_that_changes_unannounced_is_found() -> None:
    """The integrity check finds a waiting call whose rank was changed without `update`, and names it."""
    moved = call("moved", 1, 1)
    queue = queue_of(moved, call("other", 2, 2))
    moved.rank = Rank(3, 3)
    with pytest.raises(AssertionError, match=r"sorted by rank .*moved"):
        queue.check_integrity()
    queue.update(moved)
    queue.check_integrity()
    assert keys(queue) == ["other", "moved"]


def test_old_entries_of_reranked_calls_are_dropped() -> None:
    """The heap has at most about twice as many entries as calls wait, however often their ranks change."""
    calls = [call(str(number), 0, number) for number in range(5)]
    queue = queue_of(*calls)
    for number in range(1000):
        moved = calls[number % 5]
        moved.rank = Rank(0, number + 10)
        queue.update(moved)
        assert len(queue._long) + len(queue._short) + len(queue._new) <= 2 * len(queue) + 17
    assert keys(queue) == [str(number) for number in range(5)]


def test_old_entries_of_removed_calls_are_dropped() -> None:
    """The heap has at most about twice as many entries as calls wait, however many are added and removed."""
    stay = [call(f"stay{number}", 5, number) for number in range(5)]
    queue = queue_of(*stay)
    for number in range(1000):
        passing = call(f"passing{number}", 9, number)
        queue.push(passing)
        queue.discard(passing)
        assert len(queue._long) + len(queue._short) + len(queue._new) <= 2 * len(queue) + 17
    assert keys(queue) == [each.key for each in stay]


class QueueMachine(RuleBasedStateMachine):
    """Any use of the queue, compared with a list that is sorted whenever it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingCalls()
        self.model: list[tuple[Rank, int, Call]] = []
        self.removed: list[Call] = []
        self.pushes = itertools.count()
        self.names = itertools.count()

    @property
    def expected(self) -> list[Call]:
        return [each for _, _, each in sorted(self.model, key=lambda item: item[:2])]

    def remove_from_model(self, removed: Call) -> None:
        self.model = [item for item in self.model if item[2] is not removed]
        self.removed.append(removed)

    def push_call(self, pushed: Call) -> None:
        self.queue.push(pushed)
        self.model.append((pushed.rank, next(self.pushes), pushed))

    ranks = st.builds(Rank, st.integers(0, 3), st.integers(0, 5))

    @rule(rank=ranks)
    def push(self, rank: Rank) -> None:
        self.push_call(Call(str(next(self.names)), ProgramView("p"), rank=rank))

    @rule(ranks=st.lists(ranks, min_size=10, max_size=40))
    def push_many(self, ranks: list[Rank]) -> None:
        for rank in 10 * ranks:  # as many as fill the short list
            self.push(rank)

    @precondition(lambda self: self.removed)
    @rule(data=st.data(), rank=ranks)
    def push_again(self, data: st.DataObject, rank: Rank) -> None:
        pushed = self.removed.pop(data.draw(st.integers(0, len(self.removed) - 1)))
        pushed.rank = rank
        self.push_call(pushed)

    @precondition(lambda self: self.model)
    @rule(rank=ranks)
    def demote_first(self, rank: Rank) -> None:
        """The first call gets another rank, and nothing is read in between."""
        self.discard_call(self.expected[0])
        moved = self.removed.pop()
        moved.rank = rank
        self.push_call(moved)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), rank=ranks)
    def rerank(self, data: st.DataObject, rank: Rank) -> None:
        """A waiting call gets another rank and stays in."""
        moved = data.draw(st.sampled_from(self.expected))
        if moved.rank != rank:
            self.model = [item for item in self.model if item[2] is not moved]
            self.model.append((rank, next(self.pushes), moved))
        moved.rank = rank
        self.queue.update(moved)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def update_without_a_change(self, data: st.DataObject) -> None:
        self.queue.update(data.draw(st.sampled_from(self.expected)))

    @precondition(lambda self: self.removed)
    @rule(data=st.data(), rank=ranks)
    def rerank_absent(self, data: st.DataObject, rank: Rank) -> None:
        """A call that does not wait gets another rank and stays out."""
        moved = data.draw(st.sampled_from(self.removed))
        moved.rank = rank
        self.queue.update(moved)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def push_twice(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.expected))
        with pytest.raises(ValueError, match="already in the queue"):
            self.queue.push(waiting)

    @precondition(lambda self: self.model)
    @rule()
    def pop(self) -> None:
        first = self.expected[0]
        assert self.queue.pop() is first
        self.remove_from_model(first)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.discard_call(data.draw(st.sampled_from(self.expected)))

    def discard_call(self, removed: Call) -> None:
        self.queue.discard(removed)
        self.remove_from_model(removed)

    @precondition(lambda self: len(self.model) > 10)
    @rule(keep=st.integers(0, 5))
    def discard_most(self, keep: int) -> None:
        """Remove so many calls at once that the heap is rebuilt."""
        for removed in self.expected[keep:]:
            self.discard_call(removed)

    @precondition(lambda self: self.removed)
    @rule(data=st.data())
    def discard_absent(self, data: st.DataObject) -> None:
        self.queue.discard(data.draw(st.sampled_from(self.removed)))

    @rule(count=st.integers(0, 10))
    def read_some(self, count: int) -> None:
        assert list(itertools.islice(self.queue, count)) == self.expected[:count]

    @rule()
    def read_all(self) -> None:
        assert list(self.queue) == self.expected

    @precondition(lambda self: self.model)
    @rule()
    def peek(self) -> None:
        assert self.queue.peek() is self.expected[0]

    def teardown(self) -> None:
        self.read_all()

    @invariant()
    def same_members(self) -> None:
        """Queue and model hold the same calls. The check does not read in order, because `peek` would drop the old
        entries of removed calls before the next rule finds them."""
        assert len(self.queue) == len(self.model)
        assert all(each in self.queue for each in self.expected)
        assert not any(each in self.queue for each in self.removed)
        self.queue.check_integrity()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.__doc__ = "However the queue is used, it reads as a sorted list."
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30)
