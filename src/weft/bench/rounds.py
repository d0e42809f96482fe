"""The programs of a session's rounds, and how long each of them takes when it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from weft.bench.clock import STEP_S
from weft.bench.load import RoundPrograms, Scaling, make_round
from weft.bench.settings import BenchSettings
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, StepTime, TraceProgram, simulate

EQUAL_STEPS: Final = StepTime(STEP_S, 0.0, 0.0, 0.0)  # every simulated step takes as long as on the clock of steps


def programs_of_round(settings: BenchSettings, load: str, number: int, max_call_tokens: int) -> RoundPrograms:
    """The programs of one round of a load, the same each time.

    Args:
        max_call_tokens: the most tokens that a call may have in the session's engines.
    """
    scaling = Scaling(settings.scale, max_call_tokens, whole_steps=settings.clock == "steps")
    return make_round(settings.source, load, number, scaling, programs=settings.programs, seed=settings.seed)


def unloaded_steps(settings: BenchSettings, programs: Sequence[TraceProgram]) -> dict[str, int]:
    """The steps that each program takes when it is alone, from a simulation; by the program's id."""
    alone = SimSettings(
        policy=PolicyConfig("fcfs"),
        batch_size=settings.batch_size,
        chunk_tokens=settings.chunk_tokens,
        kv_tokens=float("inf"),
        step_time=EQUAL_STEPS,
    )
    steps = {}
    for program in programs:
        result = simulate([replace(program, arrival_s=0.0)], alone)
        steps[program.program] = round(result.makespan / STEP_S)
    return steps
