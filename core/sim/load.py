"""What an engine can serve, so that rates can be given as multiples of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceProgram

ENOUGH: Final = 200  # programs from which a capacity is measured, where as many can be drawn


def check_load(load: float) -> None:
    """Check a multiple of the capacity.

    Raises:
        SimulationError: It is not a number above 0.
    """
    if not 0 < load < math.inf:
        raise SimulationError(
            f"a load is a multiple of what the engine can serve; give one above 0, such as 0.8, not {load}."
        )


def with_load(programs: Sequence[TraceProgram], load: float, settings: SimSettings) -> list[TraceProgram]:
    """Programs whose arrivals are stretched, so that as many arrive in a unit of time as a multiple of the capacity.

    Args:
        programs: They are also those from which the capacity is measured.
        load: Of the capacity.
        settings: The engine.

    Raises:
        SimulationError: The load is not above 0, or all programs arrive at once.
    """
    check_load(load)
    first_s = min(program.arrival_s for program in programs)
    period_s = max(program.arrival_s for program in programs) - first_s
    if not period_s:
        raise SimulationError(
            "all programs arrive at once, so they have no rate; give them different values of arrival_s."
        )
    factor = (len(programs) - 1) / period_s / (load * capacity(programs, settings, tools=False))
    return [replace(program, arrival_s=(program.arrival_s - first_s) * factor) for program in programs]


def capacity(programs: Iterable[TraceProgram], settings: SimSettings, *, tools: bool = True) -> float:
    """The programs that end in a unit of time when all of them are there at once.

    It is measured under FCFS and without a bound of the KV cache, so that nothing is computed twice. A policy cannot
    serve many more in the long run.

    Args:
        programs: Enough of them that the last ones, which leave slots empty, do not count. Their arrivals do not
            matter.
        settings: The engine.
        tools: Whether tools take their time. Where it is long, the engine waits for the last ones, and then False tells
            more of the engine.
    """
    crowd = [replace(program, arrival_s=0.0) for program in programs]
    if not tools:
        crowd = [replace(each, calls=tuple(replace(call, gap_s=0.0) for call in each.calls)) for each in crowd]
    return simulate(crowd, replace(settings, policy=PolicyConfig("fcfs"), kv_tokens=math.inf)).throughput
