"""Counts of each queue for people who watch an engine: starts, wait and service (docs/how-to/observe.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

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
