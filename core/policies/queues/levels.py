"""Counts of each queue for people who watch an engine: starts, wait and service (docs/how-to/observe.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

# Queues that are told apart. Calls further down count in the last one.
MOST_LEVELS: Final = 16


@dataclass(slots=True)
class LevelCounts:
    """The sums of one queue so far.

    Attributes:
        starts: How often a call started from the queue, or started again after a preemption.
        wait_s: The wait before these starts, in seconds.
        service_s: The service of calls while they were in the queue, in seconds.
    """

    starts: int = 0
    wait_s: float = 0.0
    service_s: float = 0.0


class LevelStats(NamedTuple):
    """One queue: what it has now, and its sums so far, as in `LevelCounts`."""

    level: int  # index of the queue, 0 is Q_1
    running: int  # sequences; a call with n > 1 has several
    waiting: int
    starts: int
    wait_s: float
    service_s: float


class ScheduleStats(NamedTuple):
    """The queues of one scheduler, and how many calls it has promoted."""

    levels: tuple[LevelStats, ...]
    promotions: int


class Levels:
    """Sums up what happens to calls, by the queue that they are in."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, LevelCounts] = defaultdict(LevelCounts)

    def started(self, level: int, wait_s: float) -> None:
        """A call starts from a queue after a wait of `wait_s`."""
        counts = self._counts[_bounded(level)]
        counts.starts += 1
        counts.wait_s += wait_s

    def served(self, level: int, service_s: float) -> None:
        """A call in a queue has had `service_s` of service."""
        self._counts[_bounded(level)].service_s += service_s

    def stats(self, running: Iterable[int], waiting: Iterable[int], promotions: int) -> ScheduleStats:
        """The figures now."""
        runs, waits = _per_level(running), _per_level(waiting)
        found = []
        for level in range(max((*self._counts, *runs, *waits), default=-1) + 1):
            sums = self._counts[level]
            found.append(LevelStats(level, runs[level], waits[level], sums.starts, sums.wait_s, sums.service_s))
        return ScheduleStats(tuple(found), promotions)


def _bounded(level: int) -> int:
    return min(max(level, 0), MOST_LEVELS - 1)


def _per_level(levels: Iterable[int]) -> Counter[int]:
    return Counter(map(_bounded, levels))
