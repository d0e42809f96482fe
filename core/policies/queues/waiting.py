"""Queues in rank order: O(log n) comparisons to add, take and re-rank a member, O(1) to remove one from anywhere."""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Hashable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from weft.core.policies.view import Call, Rank


class Ranked(Hashable, Protocol):
    """Something with a rank. The member with the least rank comes first."""

    @property
    def rank(self) -> Rank: ...


T = TypeVar("T", bound=Ranked)
_Entry = tuple[int, float, int, int, T]  # the rank of a member, the number of its push, and the member
_FEW: Final = 16  # new entries that are sorted in one by one
_PART: Final = 64  # entries of the long list that are read at a time
_SHORT: Final = 256  # entries of the short list, and one more for each 32 of the long one


class RankQueue(Generic[T]):
    """A priority queue by rank. After a change of a member's rank, call `update`.

    The entries are in two sorted lists. When somebody reads, new ones are sorted into the short list, which joins the
    long one when it has grown. So a few new ones cost little, however many there are. Removing or re-ranking a member
    leaves its old entry behind. An old entry is dropped when it reaches the front, and all are dropped when more than
    half of the entries are old.
    """

    def __init__(self) -> None:
        self._entries: dict[T, _Entry[T]] = {}  # the valid entry of each member
        self._long: list[_Entry[T]] = []  # the last entry comes first
        self._short: list[_Entry[T]] = []
        self._new: list[_Entry[T]] = []  # not sorted in yet
        self._pushes = 0  # breaks ties, so that members are never compared

    def push(self, member: T) -> None:
        """Add a member, which must not be in the queue (ValueError)."""
        if member in self._entries:
            raise ValueError(f"already in the queue: {member}")
        self._add(member, member.rank)

    def update(self, member: T) -> None:
        """Sort a member by its present rank. A member that is not in the queue is ignored."""
        entry = self._entries.get(member)
        if entry is not None and entry[:3] != (rank := member.rank):
            self._add(member, rank)
            self._drop_old()

    def peek(self) -> T:
        """Return the first member and leave it in. An empty queue raises IndexError."""
        if self._new:
            self._sort()
        entries, long, short = self._entries, self._long, self._short
        while long and entries.get(long[-1][4]) is not long[-1]:
            long.pop()
        while short and entries.get(short[0][4]) is not short[0]:
            del short[0]
        if not entries:
            raise IndexError("the queue is empty")
        return (long[-1] if not short or (long and long[-1] < short[0]) else short[0])[4]

    def pop(self) -> T:
        """Take the first member out. An empty queue raises IndexError."""
        member = self.peek()
        del self._entries[member]
        return member

    def discard(self, member: T) -> None:
        """Take a member out, if it is in the queue."""
        if self._entries.pop(member, None) is not None:
            self._drop_old()

    def check_integrity(self) -> None:
        """Assert that each member is sorted by its present rank. For tests."""
        for member, entry in self._entries.items():
            if entry[:3] != member.rank:
                raise AssertionError(f"sorted by rank {entry[:3]}: {member}")

    def _add(self, member: T, rank: Rank) -> None:
        self._pushes += 1
        entry = self._entries[member] = (*rank, self._pushes, member)
        self._new.append(entry)

    def _sort(self) -> None:
        if len(self._new) > _FEW:
            self._short += self._new
            self._short.sort()
        else:
            for entry in self._new:
                insort(self._short, entry)
        self._new.clear()
        if len(self._short) > _SHORT + len(self._long) // 32:
            self._long += self._short
            self._long.sort(reverse=True)
            self._short.clear()

    def _drop_old(self) -> None:
        if len(self._long) + len(self._short) + len(self._new) > 2 * len(self._entries) + 16:
            for part in (self._long, self._short, self._new):
                part[:] = [entry for entry in part if self._entries.get(entry[4]) is entry]

    def __contains__(self, member: object) -> bool:
        return member in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Iterate in rank order. The queue must not change during the iteration."""
        if self._new:
            self._sort()
        valid, long, short, done = self._entries.get, self._long, self._short, 0
        for end in range(len(long), 0, -_PART):
            part = long[max(0, end - _PART) : end][::-1]
            first, done = done, bisect(short, part[-1], done)
            if done > first:
                part = sorted(part + short[first:done])
            yield from (entry[4] for entry in part if valid(entry[4]) is entry)
        yield from (entry[4] for entry in short[done:] if valid(entry[4]) is entry)


class WaitingCalls(RankQueue[Call]):
    """The calls that wait, by `Call.rank`.

    Attributes:
        now_s: The time of the latest report or decision, for orders that change with time.
    """

    now_s = -math.inf
