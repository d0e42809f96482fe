"""Whether a figure stays flat during a soak. Pure: it sees only samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

WARM_UP: Final = 1 / 3  # of the time: caches fill, and the allocator settles
_BINS: Final = 120  # a sample that is high because garbage waits for its collection does not change a bin's median


class Limit(NamedTuple):
    """How much a figure may grow."""

    per_hour: float
    at_least: float  # what a short soak may grow by, because a figure is never quite still


class Verdict(NamedTuple):
    """What was found about one figure."""

    start: float  # its median in the first sixth after the warm-up
    end: float  # its median in the last sixth
    slope_per_hour: float  # Theil-Sen
    growth: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        """Whether the figure grew by no more than it may."""
        return self.growth <= self.allowed


def judge(times_s: Sequence[float], values: Sequence[float], limit: Limit, warm_up: float = WARM_UP) -> Verdict:
    """Judge one figure by its samples after the warm-up.

    The growth is the larger one of two: the Theil-Sen slope times the time, which finds a steady leak in noise, and the
    difference of the medians at both ends, which also finds a leak that begins late.

    Args:
        times_s: When the samples were taken, in seconds, increasing.
        values: The samples.
        limit: In the unit of the samples.
        warm_up: The share of the time whose samples do not count.

    Raises:
        ValueError: Fewer than 12 samples are left after the warm-up.
    """
    warm_s = times_s[0] + (times_s[-1] - times_s[0]) * warm_up if times_s else 0.0
    samples = [(time_s, value) for time_s, value in zip(times_s, values, strict=True) if time_s >= warm_s]
    if len(samples) < 12:
        raise ValueError(f"{len(samples)} samples after the warm-up are too few to judge by. Let the soak run longer.")
    hours = (samples[-1][0] - samples[0][0]) / 3600
    slope = theil_sen([time_s / 3600 for time_s, _ in samples], [value for _, value in samples])
    sixth = len(samples) // 6
    start = statistics.median(value for _, value in samples[:sixth])
    end = statistics.median(value for _, value in samples[-sixth:])
    allowed = max(limit.per_hour * hours, limit.at_least)
    return Verdict(start, end, slope, max(slope * hours, end - start), allowed)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points (Theil 1950, Sen 1968); each point is the median of a bin.

    Args:
        times: Increasing.
        values: As many.
    """
    size = -(-len(times) // _BINS)
    bins = range(0, len(times), size)
    points = [
        (statistics.median(times[first : first + size]), statistics.median(values[first : first + size]))
        for first in bins
    ]
    slopes = [
        (later_value - value) / (later - time)
        for number, (time, value) in enumerate(points)
        for later, later_value in points[number + 1 :]
    ]
    return statistics.median(slopes)
