"""Computes figures from measurements: summaries, paired ratios, throughput at equal latency."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.results.records import Measurement, Outcome, Round
from weft.core.sim.result import percentile

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

# What the time of a call in an engine is made of (Autellix Fig. 17), as `Counts` defines it.
CALL_PARTS: Final = ("waiting", "copying", "scheduling", "computing")

Figures = Mapping[str, Any]  # the figures of one measurement, from `figures_of`
FiguresByLoad = Mapping[str, Mapping[str, Sequence[Figures]]]  # by load and baseline, one for each round


class Spread(NamedTuple):
    """A figure over several rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, by the names in `STATISTICS`."""
    return {"mean": statistics.fmean(values)} | {f"p{p}": percentile(values, p) for p in (50, 95, 99)}


def figures_of(measurement: Measurement) -> dict[str, Any]:
    """All figures of one measurement; those named in `LATENCIES` are dictionaries from `summarise`."""
    counts = measurement.counts
    tokens = sum(program.tokens for program in measurement.programs)
    unloaded = sum(program.unloaded_steps for program in measurement.programs)
    calls = max(1, counts.calls)
    return {
        **{name: summarise([of(program) for program in measurement.programs]) for name, of in LATENCIES.items()},
        # The load factor is a ratio of sums over all programs; `times_unloaded` is a mean of ratios.
        "load_factor": sum(program.steps for program in measurement.programs) / unloaded,
        "makespan_steps": measurement.steps,
        "makespan_seconds": measurement.seconds,
        "tokens_per_step": tokens / measurement.steps,
        "tokens_per_second": tokens / measurement.seconds,
        "step_seconds": statistics.median(sample.step_s for sample in measurement.samples),
        "schedule_seconds_per_step": counts.schedule_s / counts.steps,
        "update_seconds_per_step": counts.update_s / counts.steps,
        "cache_hit_rate": counts.cached_tokens / counts.prompt_tokens,
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.recomputed_tokens,
        "swapped_tokens": counts.swapped_tokens,
        "computed_tokens": counts.computed_tokens,
        "call_steps": {part: getattr(counts, f"{part}_steps") / calls for part in ("waiting", "running")},
        "call_seconds": {part: getattr(counts, f"{part}_s") / calls for part in CALL_PARTS},
    }


def figure(figures: Figures, path: str) -> float:
    """One figure by its path, such as "steps.mean"."""
    found: Any = figures
    for key in path.split("."):
        found = found[key]
    return float(found)


def ratio(numerators: Sequence[Figures], denominators: Sequence[Figures], path: str) -> Spread:
    """The ratio of a figure between two baselines, taken in each round, in which both served the same programs."""
    pairs = zip(numerators, denominators, strict=True)
    return Spread.of([figure(above, path) / figure(below, path) for above, below in pairs])


class EqualLatency(NamedTuple):
    """The rate at which a baseline has the same latency as the base has at `base_rate`."""

    base_rate: float
    latency: float
    rate: float
    is_lower_bound: bool  # The baseline's latency is below this at all replayed rates: it would also be at higher ones.

    @property
    def gain(self) -> float:
        """The baseline's throughput divided by the base's."""
        return self.rate / self.base_rate


def equal_latency(base: Mapping[float, float], baseline: Mapping[float, float]) -> list[EqualLatency]:
    """Throughput at equal latency (Autellix §6.3), for each rate of the base.

    Args:
        base: mean latency per token of the base, by rate.
        baseline: mean latency per token of the baseline, at the same rates.

    Returns:
        The highest rate up to which the baseline's latency stays at or below the base's, interpolated between the
        baseline's rates. A rate of the base is left out if the baseline's latency is higher at all rates, because the
        rate at which it would be equal was not replayed.
    """
    rates = sorted(baseline)
    found = []
    for base_rate, latency in sorted(base.items()):
        fast_enough = [rate for rate in rates if baseline[rate] <= latency]
        if not fast_enough:
            continue
        low = fast_enough[-1]
        above = [rate for rate in rates if rate > low]
        if not above:
            found.append(EqualLatency(base_rate, latency, low, is_lower_bound=True))
            continue
        high = above[0]
        share = (latency - baseline[low]) / (baseline[high] - baseline[low])
        found.append(EqualLatency(base_rate, latency, low + share * (high - low), is_lower_bound=False))
    return found


def rates_of(figures: FiguresByLoad) -> list[str]:
    """The loads that are rates, so neither recorded arrivals nor a closed batch."""
    return [load for load in figures if load not in {AS_RECORDED, CLOSED}]


def gains(base: str, figures: FiguresByLoad) -> dict[str, list[EqualLatency]]:
    """`equal_latency` of every baseline, in medians over rounds of mean steps per token.

    Returns a list for each baseline; an empty dictionary if there are fewer than two rates.
    """
    rates = rates_of(figures)
    if len(rates) < 2:
        return {}
    curves = {
        name: {
            float(load): statistics.median(figure(row, "steps_per_token.mean") for row in figures[load][name])
            for load in rates
        }
        for name in figures[rates[0]]
    }
    return {name: equal_latency(curves[base], curve) for name, curve in curves.items()}


def by_load(rounds: Sequence[Round]) -> FiguresByLoad:
    """The figures of all rounds, by load and baseline."""
    found: dict[str, dict[str, list[Figures]]] = {}
    for round_ in rounds:
        baselines = found.setdefault(round_.load, {})
        for name, measurement in round_.measurements.items():
            baselines.setdefault(name, []).append(figures_of(measurement))
    return found


SLO: Final = 1.5  # times the steps that a program takes alone, its tools included (SAGA §9.1)
ALL: Final = "all"


class InTime(NamedTuple):
    """The programs of a group that are in time."""

    programs: int  # over all rounds
    share: float  # of them
    rounds: Spread  # the shares of the rounds that have programs of the group


def in_time(rounds: Sequence[Round], load: str, baseline: str) -> dict[str, InTime]:
    """The programs in time under one baseline, over the rounds of one load, by group: all programs; then those of each
    name and of each tenant, where there are several."""
    found: dict[str, list[list[bool]]] = {}
    for each in rounds:
        if each.load == load:
            groups: dict[str, list[bool]] = {}
            for program in each.measurements[baseline].programs:
                for group in _groups(program):
                    groups.setdefault(group, []).append(program.steps <= SLO * program.unloaded_steps)
            for group, programs in groups.items():
                found.setdefault(group, []).append(programs)
    return {group: _of(shares) for group, shares in sorted(found.items(), key=_order) if _differs(group, found)}


def _groups(program: Outcome) -> list[str]:
    return [ALL, *filter(None, (program.kind, program.tenant and f"tenant {program.tenant}"))]


def _order(group: tuple[str, object]) -> tuple[bool, bool, str]:
    return group[0] != ALL, group[0].startswith("tenant "), group[0]


def _differs(group: str, found: dict[str, list[list[bool]]]) -> bool:
    """Whether a group is all programs, or only some of them."""
    return group == ALL or sum(map(len, found[group])) < sum(map(len, found[ALL]))


def _of(rounds: list[list[bool]]) -> InTime:
    programs = [each for round_ in rounds for each in round_]
    return InTime(
        len(programs), sum(programs) / len(programs), Spread.of([sum(round_) / len(round_) for round_ in rounds])
    )
