"""The rule that judges a soak finds leaks and takes noise for what it is."""

from __future__ import annotations

import random

import pytest
from soak_judge import Limit, judge, theil_sen

LIMIT = Limit(per_hour=4.0, at_least=6.0)  # MB
HOURS = 4
TIMES_S = [5.0 * number for number in range(HOURS * 720)]


def noise(seed: int, spread: float = 3.0) -> list[float]:
    """A process of 500 MB with garbage: it grows by a few MB and falls when the garbage is collected."""
    rng = random.Random(seed)
    period_s = rng.uniform(20, 90)
    return [500 + spread * (time_s % period_s) / period_s + rng.gauss(0, spread / 3) for time_s in TIMES_S]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat(seed: int) -> None:
    """Garbage that comes and goes is no growth."""
    verdict = judge(TIMES_S, noise(seed), LIMIT)
    assert verdict.is_flat
    assert abs(verdict.slope_per_hour) < 0.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leak", [6.0, 20.0])
def test_a_steady_leak_is_found_in_noise(seed: int, leak: float) -> None:
    """A leak of some MB an hour is found, and its slope is right, although the noise of a minute is as large."""
    values = [value + leak * time_s / 3600 for time_s, value in zip(TIMES_S, noise(seed), strict=True)]
    verdict = judge(TIMES_S, values, LIMIT)
    assert not verdict.is_flat
    assert verdict.slope_per_hour == pytest.approx(leak, abs=0.5)


def test_a_leak_that_begins_late_is_found() -> None:
    """A leak in the last fifth of the time does not move the median slope, but the end lies above the start."""
    late_s = TIMES_S[-1] * 0.8
    values = [value + max(0.0, time_s - late_s) / 60 for time_s, value in zip(TIMES_S, noise(0), strict=True)]
    assert not judge(TIMES_S, values, LIMIT).is_flat


def test_the_warm_up_is_not_judged() -> None:
    """Caches that fill during the first third do not count as a leak."""
    end_s = TIMES_S[-1] / 3
    values = [value + min(time_s, end_s) / 10 for time_s, value in zip(TIMES_S, noise(0), strict=True)]
    assert judge(TIMES_S, values, LIMIT).is_flat


def test_one_wild_sample_changes_nothing() -> None:
    """A sample during a peak of a second does not change the verdict."""
    values = noise(0)
    values[-10] += 10_000
    assert judge(TIMES_S, values, LIMIT).is_flat


def test_a_short_soak_may_grow_a_little() -> None:
    """An hour's limit, scaled down to minutes, would be less than the noise."""
    times_s = TIMES_S[:60]
    values = [500 + time_s / 100 for time_s in times_s]  # 3 MB in 5 minutes
    verdict = judge(times_s, values, LIMIT)
    assert verdict.slope_per_hour > LIMIT.per_hour
    assert verdict.is_flat
    assert not judge(times_s, [500 + time_s / 10 for time_s in times_s], LIMIT).is_flat


def test_too_few_samples_are_refused() -> None:
    """A soak that ended at once proves nothing."""
    with pytest.raises(ValueError, match="3 samples"):
        judge([0.0, 5.0, 10.0, 15.0], [1.0] * 4, LIMIT)
    with pytest.raises(ValueError, match="0 samples"):
        judge([], [], LIMIT)


def test_the_slope_of_a_line_is_exact() -> None:
    """With one point in a bin and with many."""
    for count in (20, 1000):
        assert theil_sen(range(count), [3.0 * n + 1 for n in range(count)]) == pytest.approx(3.0)
