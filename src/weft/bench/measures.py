"""What came of a session: summaries, paired ratios, throughput at equal latency."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.records import Outcome, Round, Run
from weft.core.sim.simulator import percentile

STATISTICS: Final = ("mean", "p50", "p95", "p99")

# Latency per token is response time divided by the output tokens on the program's critical path. Autellix divides by
# the tokens of all threads (§6.2, footnote 2), which is the same for programs of one thread.
LATENCIES: Final[dict[str, Callable[[Outcome], float]]] = {
    "steps": lambda program: float(program.steps),
    "seconds": lambda program: float(program.seconds),
    "steps_per_token": lambda program: program.steps / program.path_tokens,
    "seconds_per_token": lambda program: program.seconds / program.path_tokens,
    "steps_per_token_of_all": lambda program: program.steps / program.tokens,
    "seconds_per_token_of_all": lambda program: program.seconds / program.tokens,
    "times_unloaded": lambda program: program.steps / program.unloaded_steps,
}


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, by the names in `STATISTICS`."""
    return {"mean": statistics.fmean(values)} | {f"p{p}": percentile(values, p) for p in (50, 95, 99)}


def measure(run: Run) -> dict[str, Any]:
    """All figures of one baseline's play of a round."""
    counts = run.counts
    tokens = sum(program.tokens for program in run.programs)
    unloaded = sum(program.unloaded_steps for program in run.programs)
    return {
        **{name: summarise([of(program) for program in run.programs]) for name, of in LATENCIES.items()},
        # Of all programs together; `times_unloaded` is the mean of each one's own.
        "load_factor": sum(program.steps for program in run.programs) / unloaded,
        "makespan_steps": run.steps,
        "makespan_seconds": run.seconds,
        "tokens_per_step": tokens / run.steps,
        "tokens_per_second": tokens / run.seconds,
        "step_seconds": statistics.median(sample.step_s for sample in run.samples),
        "schedule_seconds_per_step": counts.schedule_s / counts.steps,
        "update_seconds_per_step": counts.update_s / counts.steps,
        "cache_hit_rate": counts.cached_tokens / counts.prompt_tokens,
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.recomputed_tokens,
        "swapped_tokens": counts.swapped_tokens,
        "computed_tokens": counts.computed_tokens,
    }


Figures = Mapping[str, Any]  # of a run, as `measure` gives them
Measured = Mapping[str, Mapping[str, Sequence[Figures]]]  # by load, baseline and round


def figure(figures: Figures, path: str) -> float:
    """One of them, such as "steps.mean"."""
    found: Any = figures
    for key in path.split("."):
        found = found[key]
    return float(found)


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], path: str) -> Spread:
    """A figure of ours divided by theirs, round by round: both played the same programs in turns."""
    pairs = zip(ours, theirs, strict=True)
    return Spread.of([figure(our, path) / figure(their, path) for our, their in pairs])


class EqualLatency(NamedTuple):
    """At which rate a baseline has the latency that the base has at its own."""

    base_rate: float
    latency: float
    rate: float
    is_bound: bool  # the baseline is below that latency at all rates that were played: it is this rate or more

    @property
    def gain(self) -> float:
        """How many times the base's throughput."""
        return self.rate / self.base_rate


def equal_latency(base: Mapping[float, float], baseline: Mapping[float, float]) -> list[EqualLatency]:
    """Throughput at equal latency (Autellix §6.3), for each rate of the base.

    Args:
        base: mean latency per token by rate.
        baseline: the baseline's, at the same rates.

    Returns:
        By interpolation between the baseline's rates: the highest rate up to which it keeps the base's latency. A rate
        at which the baseline is above it at all rates is left out: where it would reach it was not played.
    """
    rates = sorted(baseline)
    found = []
    for base_rate, latency in sorted(base.items()):
        kept = [rate for rate in rates if baseline[rate] <= latency]
        if not kept:
            continue
        low = kept[-1]
        above = [rate for rate in rates if rate > low]
        if not above:
            found.append(EqualLatency(base_rate, latency, low, is_bound=True))
            continue
        high = above[0]
        share = (latency - baseline[low]) / (baseline[high] - baseline[low])
        found.append(EqualLatency(base_rate, latency, low + share * (high - low), is_bound=False))
    return found


def gains(base: str, measured: Measured) -> dict[str, list[EqualLatency]]:
    """`equal_latency` of every baseline, in steps a token, medians over rounds; empty with fewer than two rates."""
    rates = [load for load in measured if load not in {AS_RECORDED, CLOSED}]
    if len(rates) < 2:
        return {}
    curves = {
        name: {
            float(load): statistics.median(figure(row, "steps_per_token.mean") for row in measured[load][name])
            for load in rates
        }
        for name in measured[rates[0]]
    }
    return {name: equal_latency(curves[base], curve) for name, curve in curves.items()}


def by_load(rounds: Sequence[Round]) -> Measured:
    """Figures by load, baseline and round."""
    found: dict[str, dict[str, list[Figures]]] = {}
    for round_ in rounds:
        baselines = found.setdefault(round_.load, {})
        for name, run in round_.runs.items():
            baselines.setdefault(name, []).append(measure(run))
    return found
