"""The simulator and the engines: the same programs, policy, batch size and KV cache, on both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from weft.core.policies import PolicyConfig
from weft.core.sim import SimResult, SimSettings, StepTime, TraceProgram, simulate
from weft.core.sim.trace import path_tokens
from weft.engine.bench.clock import STEP_S
from weft.engine.bench.measures import Figures, figure, summarise
from weft.engine.bench.records import Round, Run
from weft.engine.bench.rivals import RIVALS
from weft.engine.bench.session import draw_round
from weft.engine.bench.settings import BLOCK_TOKENS, BenchSettings

NOMINAL: Final = StepTime(STEP_S, 0.0, 0.0, 0.0)


class Agreement(NamedTuple):
    """Mean program latency of a round, on the engine and simulated."""

    load: str
    number: int
    rival: str  # "srpt" is only simulated
    real_s: float | None
    simulated_s: float  # with fitted step times
    real_steps: float | None
    in_steps: Figures | None  # simulated, one nominal time for every step; only on the clock of steps

    @property
    def off(self) -> float | None:
        """By how much the simulated seconds are off, as a part of the real ones."""
        return None if self.real_s is None else self.simulated_s / self.real_s - 1

    @property
    def simulated_steps(self) -> float | None:
        """Mean program latency with steps that are all alike."""
        return None if self.in_steps is None else figure(self.in_steps, "steps.mean")

    @property
    def steps_off(self) -> float | None:
        """Likewise of steps."""
        if self.real_steps is None or self.simulated_steps is None:
            return None
        return self.simulated_steps / self.real_steps - 1


def fit(rounds: Sequence[Round]) -> StepTime:
    """Step times from all steps of all rivals. None is left out: least squares keep their sum, so that the odd slow
    step of a busy machine is spread over all of them.

    Raises:
        SimulationError: too few steps.
    """
    return StepTime.fit(sample for each in rounds for run in each.runs.values() for sample in run.samples)


def compare(settings: BenchSettings, rounds: Sequence[Round], advance: Callable[[], object]) -> list[Agreement]:
    """Simulate every run, and SRPT beside the rivals. Step times are fitted for each round, over all its rivals: a
    shared machine drifts from round to round, but not from one rival's step to the next one's.

    Args:
        advance: told after each.
    """
    found = []
    for round_ in rounds:
        step_time = fit([round_])
        programs = draw_round(settings, round_.load, round_.number, round_.longest_tokens).programs
        for name, run in round_.runs.items():
            policy = RIVALS[name].simulated
            swaps = RIVALS[name].swaps
            simulated = _simulate(
                settings, _as_it_ran(settings, programs, run, step_time), policy, step_time, swaps=swaps
            )
            steps = _in_steps(settings, programs, policy, swaps=swaps)
            real_s = statistics.fmean(program.seconds for program in run.programs)
            real_steps = statistics.fmean(program.steps for program in run.programs)
            found.append(Agreement(round_.load, round_.number, name, real_s, simulated.mean_latency, real_steps, steps))
            advance()
        base = round_.runs[settings.rivals[0]]
        best = _simulate(settings, _as_it_ran(settings, programs, base, step_time), "srpt", step_time)
        steps = _in_steps(settings, programs, "srpt")
        found.append(Agreement(round_.load, round_.number, "srpt", None, best.mean_latency, None, steps))
        advance()
    return found


def _as_it_ran(
    settings: BenchSettings, programs: Sequence[TraceProgram], run: Run, step_time: StepTime
) -> list[TraceProgram]:
    """The programs with times in the simulator's seconds. On the clock of steps, a program arrives when the engine's
    steps up to its arrival are over, had each taken what the simulator's do, and a gap lasts so many mean ones: a
    machine that is now fast and now slow then does not make programs arrive in crowds."""
    if settings.clock == "seconds":
        return list(programs)
    elapsed_s = [0.0, *itertools.accumulate(step_time.step_s(*sample[:3]) for sample in run.samples)]
    mean_s = elapsed_s[-1] / len(run.samples)
    arrived_after = {program.program: program.arrived_after for program in run.programs}

    def arrival_s(program: TraceProgram) -> float:
        after = arrived_after[program.program]
        return elapsed_s[after] + (program.arrival_s / STEP_S - after) * mean_s

    return [
        replace(
            program,
            arrival_s=arrival_s(program),
            calls=tuple(replace(call, gap_s=call.gap_s * mean_s / STEP_S) for call in program.calls),
        )
        for program in programs
    ]


def _in_steps(
    settings: BenchSettings,
    programs: Sequence[TraceProgram],
    policy: PolicyConfig | Literal["priority", "srpt"],
    *,
    swaps: bool = False,
) -> Figures | None:
    """Latencies by the names in `measures.LATENCIES`, on the clock of steps."""
    if settings.clock != "steps":
        return None
    result = _simulate(settings, programs, policy, NOMINAL, swaps=swaps)
    steps = [result.programs[program.program].latency / STEP_S for program in programs]
    per_token = [each / path_tokens(program.calls) for each, program in zip(steps, programs, strict=True)]
    return {"steps": summarise(steps), "steps_per_token": summarise(per_token)}


def _in_blocks(program: TraceProgram) -> TraceProgram:
    """What calls share, down to the whole blocks that vLLM shares; the simulator counts in tokens."""
    calls = (
        replace(call, shared_prefix_tokens=call.shared_prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        for call in program.calls
    )
    return replace(program, calls=tuple(calls))


def _simulate(
    settings: BenchSettings,
    programs: Sequence[TraceProgram],
    policy: PolicyConfig | Literal["priority", "srpt"],
    step_time: StepTime,
    *,
    swaps: bool = False,
) -> SimResult:
    return simulate(
        [_in_blocks(program) for program in programs],
        SimSettings(
            policy=policy,
            batch_size=settings.batch_size,
            kv_tokens=settings.room_tokens,
            chunk_tokens=settings.chunk_tokens,
            preemption="swap" if swaps else "recompute",
            step_time=step_time,
        ),
    )
