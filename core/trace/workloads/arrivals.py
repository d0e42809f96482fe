"""Arrival times of programs: a Poisson process, or bursts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from weft.core.errors import SimulationError


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Return an endless iterator over the arrival times of a Poisson process, in seconds.

    Args:
        rate: programs a second, on average.

    Raises:
        SimulationError: the rate is not positive and finite.
    """
    return _arrivals(rng, rate, 1.0)


def bursty(rng: random.Random, rate: float, variation: float = 4.0) -> Iterator[float]:
    """Return an endless iterator over arrival times in bursts, in seconds. The times in between are gamma distributed.

    Args:
        rate: programs a second, on average.
        variation: the standard deviation of the times between arrivals, as a multiple of their mean (Poisson: 1).

    Raises:
        SimulationError: the rate or the variation is not positive and finite.
    """
    return _arrivals(rng, rate, variation)


def _arrivals(rng: random.Random, rate: float, variation: float) -> Iterator[float]:
    if not 0 < rate < math.inf or not 0 < variation < math.inf:
        raise SimulationError(f"{rate} programs a second with variation {variation}: give finite numbers above 0.")
    shape = 1 / variation**2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
