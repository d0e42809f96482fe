"""Compares the simulator with the engines, on the same programs, policies, batch sizes and KV caches."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from weft.bench.baselines import Baseline, baseline_of
from weft.bench.clock import STEP_S
from weft.bench.results.measures import Figures, figure, summarise
from weft.bench.results.records import Round
from weft.bench.rounds import EQUAL_STEPS, programs_of_round
from weft.bench.settings import BLOCK_TOKENS, BenchSettings
from weft.core.policies import PolicyConfig
from weft.core.sim import Batch, SimSettings, StepTime, TraceProgram, simulate
from weft.core.trace.format import path_tokens

_SRPT: Final = Baseline(policy=PolicyConfig("srpt"))


class SimComparison(NamedTuple):
    """Mean program latency of one baseline in one round, on the engine and simulated."""

    load: str
    number: int
    baseline: str  # "srpt" is simulated only
    engine_s: float | None
    simulated_s: float  # with fitted step times
    engine_steps: float | None
    simulated_figures: Figures | None  # latencies in steps, as `LATENCIES` names them; None on the clock of seconds

    @property
    def seconds_error(self) -> float | None:
        """The relative error of the simulated seconds."""
        return None if self.engine_s is None else self.simulated_s / self.engine_s - 1

    @property
    def simulated_steps(self) -> float | None:
        """Simulated with steps of equal length."""
        return None if self.simulated_figures is None else figure(self.simulated_figures, "steps.mean")

    @property
    def steps_error(self) -> float | None:
        """The relative error of the simulated steps."""
        if self.engine_steps is None or self.simulated_steps is None:
            return None
        return self.simulated_steps / self.engine_steps - 1


def fit_step_time(rounds: Sequence[Round]) -> StepTime:
    """Fit step times to all steps of all baselines, of which there must be enough (SimulationError).

    No step is left out as an outlier: least squares keep the sum of the steps, so the few slow steps of a busy machine
    are spread over all steps.
    """
    return StepTime.fit(
        sample for each in rounds for measurement in each.measurements.values() for sample in measurement.samples
    )


def compare(settings: BenchSettings, rounds: Sequence[Round], advance: Callable[[], object]) -> list[SimComparison]:
    """Simulate each measurement, and SRPT for each round.

    Step times are fitted for each round, over all its baselines: the speed of a shared machine changes from round to
    round, but hardly between the alternating steps of a round's baselines. `advance` is called after each simulation.
    """
    comparisons = []
    for round_ in rounds:
        step_time = fit_step_time([round_])
        programs = programs_of_round(settings, round_.load, round_.number, round_.max_call_tokens).programs
        for name, measurement in round_.measurements.items():
            simulated_s, figures = _simulate(settings, round_, programs, baseline_of(name), step_time)
            engine_s = statistics.fmean(program.seconds for program in measurement.programs)
            engine_steps = statistics.fmean(program.steps for program in measurement.programs)
            comparisons.append(
                SimComparison(round_.load, round_.number, name, engine_s, simulated_s, engine_steps, figures)
            )
            advance()
        simulated_s, figures = _simulate(settings, round_, programs, _SRPT, step_time)
        comparisons.append(SimComparison(round_.load, round_.number, "srpt", None, simulated_s, None, figures))
        advance()
    return comparisons


def _simulate(
    settings: BenchSettings, round_: Round, programs: Sequence[TraceProgram], baseline: Baseline, step_time: StepTime
) -> tuple[float, Figures | None]:
    """Simulate a round.

    On the clock of steps, calls arrive by steps of equal length, so the simulation has such steps. Afterwards they are
    converted to seconds.

    Returns:
        The mean program latency in seconds. On the clock of steps also the latencies in steps, as `LATENCIES` names
        them, otherwise None.
    """
    by_steps = settings.clock == "steps"
    engine = simulated_engine(settings, baseline, EQUAL_STEPS if by_steps else step_time, round_.max_call_tokens)
    result = simulate(programs, engine, batches=by_steps)
    if not by_steps:
        return result.mean_latency, None
    rows = [result.programs[program.program] for program in programs]
    to_seconds = _seconds_of_steps(result.batches, step_time)
    latency_s = statistics.fmean(to_seconds(row.finish) - to_seconds(row.arrival) for row in rows)
    steps = [row.latency / STEP_S for row in rows]
    per_token = [each / path_tokens(program.calls) for each, program in zip(steps, programs, strict=True)]
    return latency_s, {"steps": summarise(steps), "steps_per_token": summarise(per_token)}


def simulated_engine(
    settings: BenchSettings, baseline: Baseline, step_time: StepTime, max_call_tokens: int
) -> SimSettings:
    """The engine of a baseline as the simulator has it. KV is as small as that of the tiny model, so a step copies all
    that is due, and waits for it, because the engine is on a CPU.

    Args:
        max_call_tokens: the most tokens of a call, which without chunks is the least that a step can compute.
    """
    engine = SimSettings(
        batch_size=settings.batch_size,
        kv_tokens=settings.kv_capacity_tokens,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=max(settings.chunk_tokens, max_call_tokens) if baseline.plain else settings.chunk_tokens,
        copies_beside=False,
        kv_token_bytes=1,
        step_time=step_time,
    )
    return baseline.simulated_on(engine)


def _seconds_of_steps(batches: Sequence[Batch], step_time: StepTime) -> Callable[[float], float]:
    """A function from a time in steps of equal length to the time in steps of fitted length, both in seconds.

    A step without work takes the mean time of the others.
    """
    fitted_s = [batch.took_s(step_time) for batch in batches]
    mean_s = sum(fitted_s) / sum(batch.steps for batch in batches)
    # Points of a piecewise linear function: x in steps of equal length, y in steps of fitted length.
    xs, ys = [0.0], [0.0]
    for batch, busy_s in zip(batches, fitted_s, strict=True):
        idle_s = batch.began_s - xs[-1]
        for x_length, y_length in ((idle_s, idle_s / STEP_S * mean_s), (batch.steps * STEP_S, busy_s)):
            if x_length > 0:
                xs.append(xs[-1] + x_length)
                ys.append(ys[-1] + y_length)

    def to_seconds(x: float) -> float:
        after = min(bisect.bisect_left(xs, x, lo=1), len(xs) - 1)
        share = (x - xs[after - 1]) / (xs[after] - xs[after - 1])
        return ys[after - 1] + share * (ys[after] - ys[after - 1])

    return to_seconds
