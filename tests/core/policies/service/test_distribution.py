"""The distribution of a class's work: Kaplan-Meier by hand, what censoring changes, the tail, and the bounded table."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.policies.service.classes import WINDOW, ServiceTable
from weft.core.policies.service.distribution import AGES, EDGES, SIZES, estimate, kaplan_meier

WORKS = st.lists(st.floats(1, 100_000), max_size=40)


def test_kaplan_meier_agrees_with_the_textbook() -> None:
    """Ends at 1, 3 and 4, and lives of age 2: the one who left at 2 counts at 1 only. By hand: 3/4, 3/8, 0."""
    masses, left = kaplan_meier(np.array([1.0, 3.0, 4.0]), np.array([2.0]))
    assert masses == pytest.approx([1 / 4, 3 / 8, 3 / 8])
    assert left == 0


def test_a_program_of_the_same_age_was_still_at_risk() -> None:
    """A program that lives at age 3 has outlived those that ended with 3, so it counts among those at risk."""
    masses, left = kaplan_meier(np.array([3.0]), np.array([3.0]))
    assert (masses.tolist(), left) == ([0.5], 0.5)


def test_nobody_ended_leaves_everything_beyond() -> None:
    """Programs that live and none that ended say only that the work exceeds their ages."""
    distribution = estimate([], [1000.0, 200.0])
    assert distribution is not None
    assert distribution.mass[SIZES < 900].sum() == 0
    assert distribution.quantile(0.5) > 1000


def test_nothing_is_known_of_nobody() -> None:
    """Without programs there is no distribution, and programs of age 0 have shown nothing."""
    assert estimate([], []) is None
    assert estimate([], [0.0, 0.0]) is None


@given(WORKS, WORKS)
def test_any_programs_have_a_distribution(finished: list[float], ages: list[float]) -> None:
    """The masses add up to one, none is negative, and the expected remaining work is finite and positive."""
    distribution = estimate(finished, ages)
    if distribution is None:
        assert not finished
        assert not ages
        return
    assert distribution.mass.min() >= 0
    assert distribution.mass.sum() == pytest.approx(1)
    assert distribution.log_variance >= 0
    remaining = distribution.mean_remaining()
    assert np.isfinite(remaining).all()
    assert (remaining > 0).all()


def test_censoring_does_not_make_long_programs_rare() -> None:
    """Of exponential work, half of the programs are seen only in part. The median is within a tenth; that of the ended
    ones alone is too short by more than a quarter."""
    rng = random.Random(0)
    finished, ages = [], []
    for _ in range(400):
        work, seen = rng.expovariate(1 / 2000), rng.expovariate(1 / 2000)
        (finished if work <= seen else ages).append(min(work, seen))
    true = 2000 * math.log(2)
    with_ages, without = estimate(finished, ages), estimate(finished, [])
    assert with_ages is not None
    assert without is not None
    assert with_ages.quantile(0.5) == pytest.approx(true, rel=0.1)
    assert without.quantile(0.5) < 0.75 * true


def test_some_mass_lies_beyond_the_largest() -> None:
    """After n programs the next one is the largest with probability 1 / (n + 1), up to three times as large."""
    distribution = estimate([1000.0] * 9, [])
    assert distribution is not None
    assert distribution.mass[SIZES > 3100].sum() == 0
    assert distribution.mass[SIZES > 2000].sum() == pytest.approx(0.1 * math.log(3000 / 2000) / math.log(3), rel=0.2)


def test_the_variance_is_that_of_a_log_normal() -> None:
    """Of log-normal work with deviation 0.5, a variance of 0.25 is found within a sixth; of equal work it is small."""
    rng = random.Random(1)
    varied = estimate([rng.lognormvariate(7, 0.5) for _ in range(400)], [])
    equal = estimate([1000.0] * 400, [])
    assert varied is not None
    assert equal is not None
    assert varied.log_variance == pytest.approx(0.25, rel=1 / 6)
    assert equal.log_variance < 0.01


def test_the_ages_lie_on_the_edges_of_sizes() -> None:
    """Each bucket of ages has whole cells, so the index of an age needs no interpolation."""
    assert len(AGES) == 45
    assert np.isin(AGES.round(6), EDGES.round(6)).all()
    assert AGES[2:] / AGES[1:-1] == pytest.approx(1.25)


def test_the_window_holds_the_latest() -> None:
    """A class remembers the latest 400 programs and counts all."""
    of = ServiceTable().get(None, "a")
    for work in range(WINDOW + 7):
        of.end(float(work))
    assert (len(of.finished), of.finished[0], of.ended) == (400, 7.0, 407)


def test_the_table_forgets_the_class_that_was_used_longest_ago() -> None:
    """The number of classes is bounded, because clients choose names."""
    table = ServiceTable(most=2)
    first, second = table.get(None, "a"), table.get(None, "b")
    assert table.get(None, "a") is first
    table.get(None, "c")
    assert len(table) == 2
    assert table.get(None, "a") is first
    assert table.get(None, "b") is not second
