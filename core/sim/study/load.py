"""The capacity of an engine in programs a second, and arrivals at a multiple of it (`--load`)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import simulate
from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads import poisson

ENOUGH: Final = 200  # programs from which a capacity is measured, if a workload can draw so many


def check_load(load: float) -> None:
    """Raise SimulationError unless a multiple of the capacity is a number above 0."""
    if not 0 < load < math.inf:
        raise SimulationError(
            f"a load is a multiple of what the engine can serve; give one above 0, such as 0.8, not {load}."
        )


def with_load(
    programs: Sequence[TraceProgram], load: float, settings: SimSettings, seed: int = 0
) -> list[TraceProgram]:
    """Stretch the arrivals of programs, so that their rate is a multiple of the capacity, which is measured from them.
    Programs that all arrive at once, as in recordings that have no times, get those of a Poisson process of `seed`.

    Raises:
        SimulationError: The load is not above 0, or there is only one program.
    """
    check_load(load)
    arrivals_s = [program.arrival_s for program in programs]
    if len(programs) < 2:
        raise SimulationError("one program has no rate of arrival; give more programs, or no load.")
    if len(set(arrivals_s)) == 1:
        draws = random.Random(f"arrivals {seed}")  # noqa: S311
        arrivals_s = list(itertools.islice(poisson(draws, 1.0), len(programs)))
    first_s = min(arrivals_s)
    rate = (len(programs) - 1) / (max(arrivals_s) - first_s)
    factor = rate / (load * capacity(programs, settings, tools=False))
    return [replace(each, arrival_s=(at_s - first_s) * factor) for each, at_s in zip(programs, arrivals_s, strict=True)]


def capacity(programs: Iterable[TraceProgram], settings: SimSettings, *, tools: bool = True) -> float:
    """The programs that end in a unit of time if all of them arrive at once.

    The capacity is measured under FCFS and with an unbounded KV cache, so that nothing is computed twice. No policy can
    serve many more programs in the long run.

    Args:
        programs: The programs. There should be so many that the last ones, which leave slots empty, hardly count. Their
            arrivals do not matter.
        tools: Whether tools take their time. If tools are slow, the engine idles until the last ones return. False then
            tells more about the engine.
    """
    crowd = [replace(program, arrival_s=0.0) for program in programs]
    if not tools:
        crowd = [replace(each, calls=tuple(replace(call, gap_s=0.0) for call in each.calls)) for each in crowd]
    return simulate(crowd, replace(settings, policy=PolicyConfig("fcfs"), kv_tokens=math.inf)).throughput
