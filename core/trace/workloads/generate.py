"""The workloads by name (`WORKLOADS`), and `generate`, which makes a trace of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads.astraea import intercepted
from weft.core.trace.workloads.autellix import chat, mixed, search, tools
from weft.core.trace.workloads.saga import swe, tenants, web

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
