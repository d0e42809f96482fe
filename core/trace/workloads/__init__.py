"""Generates programs with the published statistics of the papers' workloads, and their arrivals.

Each paper has a file. `weft trace make` and the benchmarks use `generate`, which makes a trace of a workload.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads.astraea import intercepted
from weft.core.trace.workloads.autellix import chat as chat
from weft.core.trace.workloads.autellix import mixed, tools
from weft.core.trace.workloads.autellix import search as search
from weft.core.trace.workloads.parts import LongTail as LongTail
from weft.core.trace.workloads.saga import TOOL_TIMES_S as TOOL_TIMES_S
from weft.core.trace.workloads.saga import swe as swe
from weft.core.trace.workloads.saga import tenants as tenants
from weft.core.trace.workloads.saga import tool_time_s as tool_time_s
from weft.core.trace.workloads.saga import web as web

AUTELLIX: Final = ("chat", "tools", "search", "mixed")

WORKLOADS: Final[dict[str, Callable[[random.Random, str], TraceProgram]]] = {
    "chat": chat,
    "tools": tools,
    "search": search,
    "mixed": mixed,
    "swe": swe,
    "web": web,
    "tenants": tenants,
    "intercepted": intercepted,
}


def generate(workload: str, programs: int, arrivals: Iterator[float], rng: random.Random) -> list[TraceProgram]:
    """Generate the programs of a trace. The same seeds give the same trace.

    Args:
        programs: the number of programs. Their ids are p0, p1, ...
        arrivals: the arrival times of the programs, in seconds.

    Raises:
        SimulationError: the workload is unknown, or the number of programs is below 1.
    """
    if workload not in WORKLOADS or programs < 1:
        raise SimulationError(f"{programs} programs of {workload!r}: give at least one of {', '.join(WORKLOADS)}.")
    make = WORKLOADS[workload]
    return [replace(make(rng, f"p{number}"), arrival_s=next(arrivals)) for number in range(programs)]


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
        bursts = "" if variation == 1 else f" with variation {variation}"
        raise SimulationError(f"{rate} programs a second{bursts}: give finite numbers above 0.")
    shape = 1 / variation**2
    return itertools.accumulate(rng.gammavariate(shape, 1 / (rate * shape)) for _ in itertools.count())
