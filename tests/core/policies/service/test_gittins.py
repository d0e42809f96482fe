"""The Gittins index against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from weft.core.policies.service.distribution import AGES, EDGES, SIZES, Array, Distribution, gittins_index


def of(survival: Callable[[Array], Array]) -> Distribution:
    """A distribution by its survival function; what lies beyond the grid is in the last cell."""
    at_edges = survival(EDGES)
    at_edges[-1] = 0.0
    return Distribution(-np.diff(at_edges), 1.0)


def test_exponential_work_has_a_constant_index() -> None:
    """Exponential work has no memory: at every age the index is the mean. (Beyond 5 means almost nobody is left.)"""
    index = gittins_index(of(lambda x: np.exp(-x / 3000)))
    assert index[AGES < 15_000] == pytest.approx(3000, rel=0.01)


def test_a_falling_hazard_gives_least_attained_service() -> None:
    """Pareto work with shape 2 and scale 100 has the hazard 2 / (100 + x). The best d is 0, so the index is
    (100 + a) / 2: it grows with age."""
    index = gittins_index(of(lambda x: (1 + x / 100) ** -2.0))
    inside = (AGES > 50) & (AGES < 50_000)
    assert index[inside] == pytest.approx((100 + AGES[inside]) / 2, rel=0.05)  # d is at least one cell, 6 % of a
    assert (np.diff(index[inside]) > 0).all()


def test_uniform_work_gives_first_come() -> None:
    """Uniform work on [0, b] is best served to its end: (b - a) / 2 falls with age, so the worst rank so far is b / 2,
    and no newcomer overtakes."""
    largest = float(EDGES[150])
    index = gittins_index(of(lambda x: np.clip(1 - x / largest, 0, 1)))
    assert index == pytest.approx(largest / 2, rel=0.01)


def test_constant_work_gives_first_come() -> None:
    """Work of exactly c has the index c - a, which falls; the worst rank so far is c."""
    mass = np.zeros(len(SIZES))
    mass[100] = 1.0
    index = gittins_index(Distribution(mass, 0.0))
    assert index == pytest.approx(SIZES[100], rel=0.04)  # a cell is 6 % wide


def test_ages_that_nobody_reached_keep_the_rank() -> None:
    """Beyond the largest size nothing is known, and the rank stays as it was."""
    mass = np.zeros(len(SIZES))
    mass[40] = 1.0
    index = gittins_index(Distribution(mass, 0.0))
    assert (index[EDGES[41] < AGES] == index[0]).all()
