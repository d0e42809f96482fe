"""Programs that arrive at a rate, their latency, and the search for the highest rate that keeps a latency."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.trace.format import path_tokens
from weft.core.trace.workloads import poisson

ALONE_PER_S: Final = 1e-4  # at so low a rate, each program has its engine to itself
PRECISION: Final = 0.02  # the search for a rate ends within this part of the latency; the rate is closer than that


def arriving(programs: Iterable[TraceProgram], rate: float, seed: int) -> list[TraceProgram]:
    """The programs with Poisson arrivals. Another rate gives the same arrivals, closer together or further apart."""
    arrivals_s = poisson(random.Random(f"arrivals {seed}"), rate)
    return [replace(program, arrival_s=next(arrivals_s)) for program in programs]


def per_token(programs: Sequence[TraceProgram], rate: float, seed: int, settings: SimSettings) -> float:
    """Mean latency per token at a rate, in seconds."""
    made = arriving(programs, rate, seed)
    rows = simulate(made, settings).programs
    return statistics.fmean(rows[each.program].latency / path_tokens(each.calls) for each in made)


def highest_rate(latency_ratio: Callable[[float], float], guess: float) -> float:
    """The highest rate at which the latency is at most what is allowed, by the method of false position.

    The search ends within `PRECISION` of the allowed latency, or where the latency jumps over it.

    Args:
        latency_ratio: the latency at a rate, divided by the allowed latency.
        guess: the rate at which the search begins.

    Raises:
        SimulationError: no rate gives a latency below the allowed one, or none gives a latency above it.
    """
    low, high = (
        (0.0, 0.0),
        (0.0, 0.0),
    )  # rate and logarithm of the ratio: at most 0 at the low rate, above 0 at the high
    rate = guess
    for _ in range(12):
        ratio = math.log(latency_ratio(rate))
        if ratio <= 0:
            low = (rate, ratio)
        else:
            high = (rate, ratio)
        if not low[0] or not high[0]:
            rate *= 1.2 if not high[0] else 1 / 1.2
            continue
        if low[1] > -PRECISION or high[0] < low[0] * (1 + PRECISION / 4):
            break
        share = min(0.9, max(0.1, (-PRECISION / 2 - low[1]) / (high[1] - low[1])))
        rate = low[0] + share * (high[0] - low[0])
    if not low[0] or not high[0]:
        raise SimulationError("no rate has the latency that was asked for; give more programs, or another latency.")
    return low[0]
