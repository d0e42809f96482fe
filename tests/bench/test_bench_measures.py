"""Figures of measurements, ratios between baselines, and throughput at equal latency, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_data import measurement, outcome, rounds

from weft.bench.results.measures import EqualLatency, equal_latency, figures_of, gains, ratio
from weft.core.sim.result import percentile


def test_figures_of_a_measurement() -> None:
    """Two programs of 20 and 60 steps, with 10 and 20 tokens, of which 5 and 20 are on the critical path."""
    found = figures_of(measurement(outcome(20, 10, 5), outcome(60, 20, 20), cached_tokens=4, schedule_s=0.1))
    assert found["steps"] == {"mean": 40, "p50": 40, "p95": 58, "p99": pytest.approx(59.6)}
    assert found["steps_per_token"]["mean"] == (20 / 5 + 60 / 20) / 2
    assert found["seconds_per_token_of_all"]["mean"] == (10 / 10 + 30 / 20) / 2
    assert (found["load_factor"], found["times_unloaded"]["mean"]) == (80 / 20, 4)
    assert (found["tokens_per_step"], found["cache_hit_rate"]) == (0.3, 0.4)
    assert found["schedule_seconds_per_step"] == 0.002
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0


def test_ratios_are_taken_in_each_round() -> None:
    """The ratios 20/40, 30/30 and 60/20 have a median of 1, from 0.5 to 3. It is not the ratio of the medians."""
    replayed = rounds(base=[40, 30, 20], ours=[20, 30, 60])
    ours, base = ([figures_of(round_.measurements[name]) for round_ in replayed] for name in ("ours", "base"))
    assert ratio(ours, base, "steps.mean") == (1.0, 0.5, 3.0)


def test_throughput_at_equal_latency() -> None:
    """Between 2 and 4 programs per second, the baseline's latency rises from 3 to 5, so it has the base's latency of 4
    at 3 per second. It never has the base's latency of 9."""
    base, baseline = {1.0: 2.0, 2.0: 4.0, 4.0: 9.0}, {1.0: 2.5, 2.0: 3.0, 4.0: 5.0}
    assert equal_latency(base, baseline) == [
        EqualLatency(2.0, 4.0, 3.0, is_lower_bound=False),
        EqualLatency(4.0, 9.0, 4.0, is_lower_bound=True),
    ]
    assert equal_latency(base, baseline)[0].gain == 1.5
    assert [each.gain for each in equal_latency(base, base)] == [1.0, 1.0, 1.0]


def test_gains_need_two_rates() -> None:
    """One rate cannot be interpolated. With two rates, medians over rounds are used."""
    replayed = rounds(base=[10, 30, 20], ours=[10, 10, 10])
    by_rate = {"1": replayed, "2": [replace(each, load="2") for each in replayed]}
    figures = {
        rate: {name: [figures_of(each.measurements[name]) for each in several] for name in ("base", "ours")}
        for rate, several in by_rate.items()
    }
    assert gains("base", {"1": figures["1"]}) == {}
    assert gains("base", figures)["ours"] == [EqualLatency(rate, 2.0, 2.0, is_lower_bound=True) for rate in (1.0, 2.0)]
