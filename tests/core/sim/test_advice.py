"""Advice: the ways to serve, intervals of changes, and what the outcomes say."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.sim import SimSettings, simulate
from weft.core.sim.study.advice import (
    STOCK,
    STOCK_HOST,
    WEFT,
    WEFT_HOST,
    Advice,
    Way,
    WayOutcome,
    change_of_mean,
    outcomes,
    ways,
)
from weft.core.trace.workloads import generate, poisson

ENGINE = SimSettings(kv_tokens=32_768, batch_size=8)


def test_the_ways_to_serve() -> None:
    """Stock vLLM is first, and each size of host memory is tried with stock vLLM and with Weft."""
    found = ways([64, 16, 64])
    assert [each.name for each in found] == [
        "stock vLLM",
        "a plain gate",
        "Weft",
        "stock vLLM + 16 GiB host",
        "Weft + 16 GiB host",
        "stock vLLM + 64 GiB host",
        "Weft + 64 GiB host",
    ]
    host = Way(STOCK_HOST, 16).settings(ENGINE, 1000)
    assert (host.host_kv_tokens, Way(STOCK).settings(ENGINE, 1000).host_kv_tokens) == (1000, 0)


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=60), st.integers(0, 2**32))
def test_an_interval_holds_its_value(pairs: list[tuple[float, float]], seed: int) -> None:
    """The change is that of the means, and lies in the interval. The same seed gives the same interval."""
    base, other = map(list, zip(*pairs, strict=True))
    change = change_of_mean(base, other, random.Random(seed))
    assert change.value == pytest.approx(sum(other) / sum(base) - 1)
    assert change.low <= change.value <= change.high
    assert change == change_of_mean(base, other, random.Random(seed))


def test_the_error_of_the_simulator_is_a_part_of_the_interval() -> None:
    """Where programs leave no doubt it is all of it: 95 % of a normal distribution lie within 1.96 deviations."""
    base = [random.Random(7).uniform(1, 100) for _ in range(50)]
    change = change_of_mean(base, [value / 2 for value in base], random.Random(0), error=0.1)
    assert change.value == pytest.approx(-0.5)
    assert (change.low, change.high) == pytest.approx((0.5 * math.exp(-0.196) - 1, 0.5 * math.exp(0.196) - 1), abs=0.02)


def test_a_change_that_is_the_same_for_all_programs_has_no_interval() -> None:
    """If each program takes half as long, any resample says so."""
    base = [random.Random(7).uniform(1, 100) for _ in range(50)]
    change = change_of_mean(base, [value / 2 for value in base], random.Random(0))
    assert change == pytest.approx((-0.5, -0.5, -0.5))
    assert change.is_gain
    same = change_of_mean(base, base, random.Random(0))
    assert not same.is_gain
    assert not same.is_loss


def test_intervals_cover_the_true_change() -> None:
    """Of 200 samples of 100 programs from one distribution, at least nine tenths cover the change of its means.

    Neighbours resemble each other, as programs that wait for the same crowd do.
    """
    draws, covered = random.Random(11), 0
    for _ in range(200):
        base, other, crowd = [], [], 0.0
        for _ in range(100):
            crowd = 0.5 * crowd + draws.gauss(0, 0.3)
            base.append(10 + 5 * abs(crowd) + draws.expovariate(0.2))
            other.append(0.7 * base[-1] * draws.lognormvariate(-0.125, 0.5))
        change = change_of_mean(base, other, random.Random(draws.random()))
        covered += change.low <= -0.3 <= change.high
    assert covered >= 180


def test_outcomes_are_those_of_the_simulations() -> None:
    """Means, percentiles and changes against stock vLLM."""
    programs = generate("tools", 20, poisson(random.Random("arrivals"), 8.0), random.Random("programs"))
    results = {way: simulate(programs, way.settings(ENGINE, 100_000)) for way in ways([16])}
    rows = list(outcomes(results, random.Random(0)))
    assert [each.way for each in rows] == list(results)
    for each in rows:
        result = results[each.way]
        assert (each.mean_s, each.p99_s) == (pytest.approx(result.mean_latency), pytest.approx(result.latency(99)))
        assert each.mean_change.value == pytest.approx(result.mean_latency / rows[0].mean_s - 1)
    assert rows[0].mean_change == pytest.approx((0, 0, 0))


def advice(means_s: Mapping[str, float], host_gib: Sequence[float] = (16, 64)) -> Advice:
    """The advice where the ways to serve have these means, and stock vLLM's is 100 for each of 40 programs."""

    def outcome(way: Way) -> WayOutcome:
        mean_s = means_s.get(way.name, 100.0)
        change = change_of_mean([100.0] * 40, [mean_s] * 40, random.Random(0))
        return WayOutcome(way, mean_s, mean_s, mean_s, change, change.value, 0.5, 0)

    return Advice.of([outcome(way) for way in ways(host_gib)])


@pytest.mark.parametrize(
    ("means_s", "best"),
    [
        ({}, Way(STOCK)),
        ({"Weft": 99.5, "stock vLLM + 64 GiB host": 99.2}, Way(STOCK)),
        ({"Weft": 70.0}, Way(WEFT)),
        ({"Weft": 120.0}, Way(STOCK)),
        ({"Weft": 70.0, "Weft + 16 GiB host": 68.0, "Weft + 64 GiB host": 67.0}, Way(WEFT)),
        ({"Weft": 70.0, "Weft + 16 GiB host": 41.0, "Weft + 64 GiB host": 40.0}, Way(WEFT_HOST, 16)),
        ({"Weft": 70.0, "Weft + 64 GiB host": 45.0, "stock vLLM + 64 GiB host": 40.0}, Way(STOCK_HOST, 64)),
    ],
)
def test_the_cheapest_way_that_is_nearly_the_best_is_advised(means_s: dict[str, float], best: Way) -> None:
    """A gain of less than a percent is none, and more host memory has to pay for itself."""
    assert advice(means_s).best.way == best


def test_the_least_host_memory_that_helps_stands_for_all_sizes() -> None:
    """Of the sizes, the least one within 5 % of the best is compared."""
    found = advice({"Weft + 16 GiB host": 41.0, "Weft + 64 GiB host": 40.0, "stock vLLM + 64 GiB host": 50.0})
    assert found.weft_host is not None
    assert found.stock_host is not None
    assert (found.weft_host.way, found.stock_host.way) == (Way(WEFT_HOST, 16), Way(STOCK_HOST, 64))


def test_the_default_has_the_most_host_memory_that_was_tried() -> None:
    """An engine takes what its host has free. Where no host memory is tried, it has none."""
    assert advice({}).default.way == Way(WEFT_HOST, 64)
    assert advice({}, host_gib=()).default.way == Way(WEFT)
