"""Whether Weft would pay for a user's own programs: stock vLLM, host memory, a plain gate and Weft side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, NamedTuple

from weft.core.sim.result import SimResult, percentile
from weft.core.sim.settings import SimSettings
from weft.core.sim.study.leaderboard import DEFAULT, HOST_LRU, NO_HOST, Rival

RESAMPLES: Final = 1000
_PART: Final = 0.025  # of the resamples, below the interval and above it
SMALL: Final = 0.01  # a smaller change of a mean is no gain
# How far a simulated ratio of means is from that of engines: the root mean square of the logarithm in ten live runs of
# the tiny model, on the step times of `weft profile` (docs/results/advice.md).
MODEL_ERROR: Final = 0.056
NEARLY: Final = 0.05  # an option within so much of the best is as good, if it costs less

STOCK: Final = Rival("fcfs", False, NO_HOST)
GATE: Final = Rival("priority", True, NO_HOST)
STOCK_HOST: Final = Rival("fcfs", False, HOST_LRU)
WEFT: Final = DEFAULT.without_host()
WEFT_HOST: Final = DEFAULT


class Way(NamedTuple):
    """A way to serve: a rival, and the GiB of host memory that it has."""

    rival: Rival
    host_gib: float = 0.0

    @property
    def is_weft(self) -> bool:
        """Whether it is Weft's default, with host memory or without."""
        return self.rival in {WEFT, WEFT_HOST}

    @property
    def name(self) -> str:
        """Its name in tables."""
        names = {STOCK: "stock vLLM", GATE: "a plain gate", STOCK_HOST: "stock vLLM", WEFT: "Weft", WEFT_HOST: "Weft"}
        return f"{names[self.rival]}{f' + {self.host_gib:g} GiB host' if self.host_gib else ''}"

    def settings(self, engine: SimSettings, host_tokens: int) -> SimSettings:
        """The settings of an engine that serves so. `host_tokens` are the tokens that its host memory holds."""
        return self.rival.settings(replace(engine, host_kv_tokens=host_tokens))


def ways(host_gib: Sequence[float]) -> list[Way]:
    """All ways to serve that advice compares, stock vLLM first.

    Args:
        host_gib: Sizes of host memory in GiB.
    """
    hosts = [Way(rival, gib) for gib in sorted(set(host_gib)) for rival in (STOCK_HOST, WEFT_HOST)]
    return [Way(STOCK), Way(GATE), Way(WEFT), *hosts]


class Change(NamedTuple):
    """A ratio of means less 1, with the interval that holds 95 % of its draws."""

    value: float
    low: float
    high: float

    @property
    def is_gain(self) -> bool:
        """Whether the mean falls by more than `SMALL`, and the interval does not reach 0."""
        return self.value < -SMALL and self.high < 0

    @property
    def is_loss(self) -> bool:
        """Whether the mean rises by more than `SMALL`, and the interval does not reach 0."""
        return self.value > SMALL and self.low > 0


def change_of_mean(base: Sequence[float], other: Sequence[float], random: Random, error: float = 0.0) -> Change:
    """How a mean over programs changes, by a circular block bootstrap over programs in their order of arrival.

    Programs that run at the same time delay each other, so blocks of consecutive ones are drawn: the square root of
    their number.

    Args:
        base: A value above 0 for each program.
        other: The values to compare, of the same programs.
        error: The standard deviation of the logarithm of an error of the ratio, which each draw has as well.
    """
    count = len(base)
    length = max(1, math.isqrt(count))
    sums = [_sums(values, length) for values in (base, other)]
    blocks = max(1, round(count / length))
    found = []
    for _ in range(RESAMPLES):
        starts = random.choices(range(count), k=blocks)
        before, after = (sum(map(each.__getitem__, starts)) for each in sums)
        found.append(after / before * math.exp(random.gauss(0.0, error)) - 1)
    value = sum(other) / sum(base) - 1
    low, high = (percentile(found, 100 * part) for part in (_PART, 1 - _PART))
    return Change(value, min(low, value), max(high, value))


def _sums(values: Sequence[float], length: int) -> list[float]:
    """The sums of all runs of `length` consecutive values. After the last value, a run goes on at the first one."""
    doubled = [*values, *values[: length - 1]]
    return [sum(doubled[start : start + length]) for start in range(len(values))]


@dataclass(frozen=True, slots=True)
class WayOutcome:
    """What one way to serve makes of the programs. Times are in seconds."""

    way: Way
    mean_s: float
    p95_s: float
    p99_s: float
    mean_change: Change  # of the mean completion time, to stock vLLM
    p99_change: float  # of the 99th percentile
    prefix_hits: float  # the share of prompt tokens that were in the KV cache or in host memory
    recomputed_tokens: int  # computed again: after preemptions, or although an earlier call of the program had them


def outcomes(results: Mapping[Way, SimResult], random: Random) -> Iterator[WayOutcome]:
    """What the ways to serve make of the programs, in the order of `results`.

    Args:
        results: The simulations of the same programs. That of stock vLLM must be among them.
    """
    stock, stock_p99_s = results[Way(STOCK)].programs, results[Way(STOCK)].latency(99)
    order = sorted(stock, key=lambda name: stock[name].arrival)
    base = [stock[name].latency for name in order]
    for way, result in results.items():
        latencies = [result.programs[name].latency for name in order]
        p99_s = result.latency(99)
        yield WayOutcome(
            way,
            result.mean_latency,
            result.latency(95),
            p99_s,
            change_of_mean(base, latencies, random, 0.0 if way.rival == STOCK else MODEL_ERROR),
            p99_s / stock_p99_s - 1,
            result.prefix_hit_rate + result.host_hit_rate,
            result.counts.again + result.counts.recomputed,
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """What the outcomes say."""

    stock: WayOutcome
    gate: WayOutcome
    weft: WayOutcome  # Weft's default without host memory
    default: WayOutcome  # Weft's default with the most host memory that was tried
    stock_host: WayOutcome | None  # the least host memory within `NEARLY` of the best stock vLLM with host memory
    weft_host: WayOutcome | None  # the same of Weft
    best: WayOutcome  # the cheapest way within `NEARLY` of the best one; stock vLLM if nothing is a gain

    @classmethod
    def of(cls, found: Sequence[WayOutcome]) -> Advice:
        by_way = {each.way: each for each in found}
        stock_host, weft_host = (
            _least_host([each for each in found if each.way.rival == rival]) for rival in (STOCK_HOST, WEFT_HOST)
        )
        gains = [each for each in found if each.mean_change.is_gain]
        least_s = min((each.mean_s for each in gains), default=math.inf)
        good = [each for each in gains if each.mean_s <= least_s * (1 + NEARLY)]
        default = max((each for each in found if each.way.is_weft), key=lambda each: each.way.host_gib)
        best = min(good, key=lambda each: (each.way.host_gib, each.mean_s), default=by_way[Way(STOCK)])
        return cls(by_way[Way(STOCK)], by_way[Way(GATE)], by_way[Way(WEFT)], default, stock_host, weft_host, best)


def _least_host(found: Sequence[WayOutcome]) -> WayOutcome | None:
    if not found:
        return None
    least_s = min(each.mean_s for each in found)
    return min((each for each in found if each.mean_s <= least_s * (1 + NEARLY)), key=lambda each: each.way.host_gib)
