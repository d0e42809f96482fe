"""The simulator and the engines: the same programs, policy, batch size and KV cache, on both."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from weft.bench.baselines import BASELINES
from weft.bench.clock import STEP_S
from weft.bench.measures import Figures, figure, summarise
from weft.bench.records import Round
from weft.bench.session import draw_round
from weft.bench.settings import BLOCK_TOKENS, BenchSettings
from weft.core.policies import PolicyConfig
from weft.core.sim import Batch, SimSettings, StepTime, TraceProgram, simulate
from weft.core.trace.format import path_tokens

NOMINAL: Final = StepTime(STEP_S, 0.0, 0.0, 0.0)


class Agreement(NamedTuple):
    """Mean program latency of a round, on the engine and simulated."""

    load: str
    number: int
    baseline: str  # "srpt" is only simulated
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
    """Step times from all steps of all baselines. None is left out: least squares keep their sum, so that the odd slow
    step of a busy machine is spread over all of them.

    Raises:
        SimulationError: too few steps.
    """
    return StepTime.fit(sample for each in rounds for run in each.runs.values() for sample in run.samples)


def compare(settings: BenchSettings, rounds: Sequence[Round], advance: Callable[[], object]) -> list[Agreement]:
    """Simulate every run, and SRPT with them. Step times are fitted for each round, over all its baselines: a shared
    machine drifts from round to round, but not from one baseline's step to the next one's.

    Args:
        advance: told after each.
    """
    found = []
    for round_ in rounds:
        step_time = fit([round_])
        programs = draw_round(settings, round_.load, round_.number, round_.longest_tokens).programs
        for name, run in round_.runs.items():
            baseline = BASELINES[name]
            simulated = _simulated(settings, programs, baseline.simulated, step_time, swaps=baseline.swaps)
            real_s = statistics.fmean(program.seconds for program in run.programs)
            real_steps = statistics.fmean(program.steps for program in run.programs)
            found.append(Agreement(round_.load, round_.number, name, real_s, simulated[0], real_steps, simulated[1]))
            advance()
        simulated = _simulated(settings, programs, "srpt", step_time)
        found.append(Agreement(round_.load, round_.number, "srpt", None, simulated[0], None, simulated[1]))
        advance()
    return found


def _simulated(
    settings: BenchSettings,
    programs: Sequence[TraceProgram],
    policy: PolicyConfig | Literal["priority", "srpt"],
    step_time: StepTime,
    *,
    swaps: bool = False,
) -> tuple[float, Figures | None]:
    """Mean program latency in seconds; on the clock of steps, which says when calls arrive there, also latencies in
    steps, by the names in `measures.LATENCIES`."""
    by_steps = settings.clock == "steps"
    result = simulate(
        [_in_blocks(program) for program in programs],
        SimSettings(
            policy=policy,
            batch_size=settings.batch_size,
            kv_tokens=settings.room_tokens,
            chunk_tokens=settings.chunk_tokens,
            preemption="swap" if swaps else "recompute",
            step_time=NOMINAL if by_steps else step_time,
        ),
        batches=by_steps,
    )
    if not by_steps:
        return result.mean_latency, None
    rows = [result.programs[program.program] for program in programs]
    elapsed_s = _seconds(result.batches, step_time)
    latency_s = statistics.fmean(elapsed_s(row.finish) - elapsed_s(row.arrival) for row in rows)
    steps = [row.latency / STEP_S for row in rows]
    per_token = [each / path_tokens(program.calls) for each, program in zip(steps, programs, strict=True)]
    return latency_s, {"steps": summarise(steps), "steps_per_token": summarise(per_token)}


def _seconds(batches: Sequence[Batch], step_time: StepTime) -> Callable[[float], float]:
    """From nominal time, in which all steps are alike, to the time that they take; idle steps take the mean."""
    took_s = [batch.took_s(step_time) for batch in batches]
    mean_s = sum(took_s) / sum(batch.steps for batch in batches)
    nominal_s, elapsed_s = [0.0], [0.0]
    for batch, busy_s in zip(batches, took_s, strict=True):
        idle_s = batch.began_s - nominal_s[-1]
        for lasted_s, real_s in ((idle_s, idle_s / STEP_S * mean_s), (batch.steps * STEP_S, busy_s)):
            if lasted_s > 0:
                nominal_s.append(nominal_s[-1] + lasted_s)
                elapsed_s.append(elapsed_s[-1] + real_s)

    def elapsed(at_s: float) -> float:
        after = min(bisect.bisect_left(nominal_s, at_s, lo=1), len(nominal_s) - 1)
        share = (at_s - nominal_s[after - 1]) / (nominal_s[after] - nominal_s[after - 1])
        return elapsed_s[after - 1] + share * (elapsed_s[after] - elapsed_s[after - 1])

    return elapsed


def _in_blocks(program: TraceProgram) -> TraceProgram:
    """What calls share, down to the whole blocks that vLLM shares; the simulator counts in tokens."""
    calls = (
        replace(call, shared_prefix_tokens=call.shared_prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        for call in program.calls
    )
    return replace(program, calls=tuple(calls))
