"""The programs of a session's rounds, and how long each of them takes when it is alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weft.bench.clock import STEP_S
from weft.bench.load import CLOSED, RoundPrograms, Scaling, make_round
from weft.bench.settings import BenchSettings
from weft.core.errors import BenchError
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, StepTime, TraceProgram, capacity, simulate
from weft.core.sim.study.load import ENOUGH

EQUAL_STEPS: Final = StepTime(STEP_S, 0.0, 0.0, 0.0, 0.0)  # every simulated step takes as long as on the clock of steps


def programs_of_round(settings: BenchSettings, load: str, number: int, max_call_tokens: int) -> RoundPrograms:
    """The programs of one round of a load, the same each time.

    `max_call_tokens` is the most that a call may have in the session's engines.
    """
    scaling = Scaling(settings.scale, max_call_tokens, whole_steps=settings.clock == "steps")
    return make_round(settings.source, load, number, scaling, programs=settings.programs, seed=settings.seed)


def rates_of_loads(settings: BenchSettings, loads: Sequence[float]) -> list[float]:
    """Rates that are these multiples of the capacity, which is measured by a simulation of engine steps, with at
    least `ENOUGH` programs of a workload. Raises BenchError if a load is not above 0, or the clock is not that of
    steps."""
    if not all(0 < load < math.inf for load in loads):
        raise BenchError(f"--loads are {', '.join(map(str, loads))}; give numbers above 0, such as 0.5,0.8.")
    if loads and settings.clock != "steps":
        raise BenchError("--loads need --clock steps, because how long a step takes is not known before; give --rates.")
    if not loads:
        return []
    many = settings if settings.is_file else replace(settings, programs=max(settings.programs, ENOUGH))
    most = capacity(
        programs_of_round(many, CLOSED, 0, settings.kv_capacity_tokens).programs, _engine(settings), tools=False
    )
    return [float(f"{load * most * settings.scale:.3g}") for load in loads]


def _engine(settings: BenchSettings) -> SimSettings:
    """The engine on which a program is alone, and whose capacity is measured."""
    return SimSettings(
        policy=PolicyConfig("fcfs"),
        batch_size=settings.batch_size,
        chunk_tokens=settings.chunk_tokens,
        kv_tokens=math.inf,
        step_time=EQUAL_STEPS,
    )


def unloaded_steps(settings: BenchSettings, programs: Sequence[TraceProgram]) -> dict[str, int]:
    """The steps that each program takes when it is alone, from a simulation; by the program's id."""
    alone = _engine(settings)
    steps = {}
    for program in programs:
        result = simulate([replace(program, arrival_s=0.0)], alone)
        steps[program.program] = round(result.makespan / STEP_S)
    return steps
