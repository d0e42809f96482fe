"""Queues in rank order: O(log n) comparisons to add, take and re-rank a member, O(1) to remove one from anywhere."""

from __future__ import annotations

import math
import statistics
from bisect import bisect, insort
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

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


# -- queue bounds that are learned from the calls that have been served


# Where calibration starts. The first bound should exceed the service of a typical call. Otherwise calls are demoted
# while they run, and preempt each other to no purpose: in the demo a call takes 2 to 3 s, and with a first bound of
# 0.5 s each call was preempted once. Bounds that double tell programs apart over a wide range. The last of the five
# queues is first come, first served. With seven queues, its bound was so large that all long programs ended late.
DEFAULT_BOUNDS_S: Final = (4.0, 8.0, 16.0, 32.0)
_WINDOW_CALLS: Final = 512  # the latest calls, from which the bounds follow
_EVERY_CALLS: Final = 32  # the bounds are computed again after so many calls


class BoundsCalibration:
    """Learns the queue bounds from the latest calls.

    The first bound is the 90th percentile of a call's service, and each further bound is twice the one before. With a
    narrower first queue, calls would be demoted while they run, and preempt each other to no purpose. A much wider one
    would hold all of a short program and most of a long one, and tell them apart too late. The same calls give the same
    bounds, because only calls are counted and no clock is read.

    Args:
        queues: K, the number of queues.
    """

    def __init__(self, queues: int) -> None:
        self._queues = queues
        self._services_s: deque[float] = deque(maxlen=_WINDOW_CALLS)
        self._calls = 0

    def observe(self, service_s: float) -> Sequence[float] | None:
        """Observe a call that has left after `service_s` of service, in seconds or in any other unit.

        Returns the K-1 new bounds in the same unit after every 32nd call, otherwise None.
        """
        if service_s <= 0:  # the call was aborted before it ran
            return None
        self._services_s.append(service_s)
        self._calls += 1
        if self._calls % _EVERY_CALLS:
            return None
        first_s = statistics.quantiles(self._services_s, n=10, method="inclusive")[-1]
        return [first_s * 2**n for n in range(self._queues - 1)]


# -- counts of each queue for people who watch an engine: starts, wait and service (docs/how-to/observe.md)


# Queues that are told apart. Calls further down count in the last one.
MOST_LEVELS: Final = 16


class LevelStats(NamedTuple):
    """One queue: what it has now, and its sums so far."""

    level: int  # index of the queue, 0 is Q_1
    running: int  # sequences; a call with n > 1 has several
    waiting: int
    starts: int  # how often a call started from the queue, or started again after a preemption
    wait_s: float  # before these starts, in seconds
    service_s: float  # of calls while they were in the queue, in seconds


class ScheduleStats(NamedTuple):
    """The queues of one scheduler, and how many calls it has promoted."""

    levels: tuple[LevelStats, ...]
    promotions: int


class Levels:
    """Sums up what happens to calls, by the queue that they are in."""

    def __init__(self) -> None:
        self._starts: defaultdict[int, int] = defaultdict(int)
        self._wait_s: defaultdict[int, float] = defaultdict(float)
        self._service_s: defaultdict[int, float] = defaultdict(float)

    def started(self, level: int, wait_s: float) -> None:
        """A call starts from a queue after a wait of `wait_s`."""
        level = _bounded(level)
        self._starts[level] += 1
        self._wait_s[level] += wait_s

    def served(self, level: int, service_s: float) -> None:
        """A call in a queue has had `service_s` of service."""
        self._service_s[_bounded(level)] += service_s

    def stats(self, running: Iterable[int], waiting: Iterable[int], promotions: int) -> ScheduleStats:
        """The figures now."""
        runs, waits = _per_level(running), _per_level(waiting)
        last = max((*self._starts, *self._service_s, *runs, *waits), default=-1)
        levels = (
            LevelStats(at, runs[at], waits[at], self._starts[at], self._wait_s[at], self._service_s[at])
            for at in range(last + 1)
        )
        return ScheduleStats(tuple(levels), promotions)


def _bounded(level: int) -> int:
    return min(max(level, 0), MOST_LEVELS - 1)


def _per_level(levels: Iterable[int]) -> Counter[int]:
    return Counter(map(_bounded, levels))
