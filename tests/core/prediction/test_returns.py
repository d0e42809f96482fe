"""How long a program's place is kept: ski rental with known gaps."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.prediction.times import ReturnTimes, best_wait_s

_GAPS = st.lists(st.one_of(st.floats(0.01, 100), st.just(math.inf)), min_size=1, max_size=20).map(sorted)


def cost_s(gaps_s: list[float], wait_s: float, price_s: float) -> float:
    """What a wait costs over all gaps, counted one by one."""
    return sum(gap_s if gap_s <= wait_s else wait_s + (price_s if math.isfinite(gap_s) else 0.0) for gap_s in gaps_s)


@given(gaps_s=_GAPS, price_s=st.floats(0.1, 100))
def test_no_other_wait_costs_less(gaps_s: list[float], price_s: float) -> None:
    """The wait is as good as the best of nothing and every gap, and what it adds to the last gap costs nothing."""
    waits_s = [0.0, *filter(math.isfinite, gaps_s)]
    least_s = min(cost_s(gaps_s, wait_s, price_s) for wait_s in waits_s)
    assert cost_s(gaps_s, best_wait_s(gaps_s, price_s), price_s) == pytest.approx(least_s)


@pytest.mark.parametrize(
    ("gaps_s", "wait_s"),
    [
        ([1.0] * 9, 5.0),  # all return long before the price is reached: the wait is the price
        ([60.0] * 9, 0.0),  # nobody returns in time
        ([1.0] * 9 + [60.0], 1.0),  # one does not
        ([1.0] * 5 + [math.inf] * 5, 1.0),  # half never do
        ([math.inf] * 9, 0.0),
    ],
)
def test_waits(gaps_s: list[float], wait_s: float) -> None:
    """Some waits for a price of five seconds."""
    assert best_wait_s(gaps_s, 5.0) == wait_s


def test_until_eight_gaps_are_known_the_price_counts() -> None:
    """The ninth and later gaps change the wait again."""
    returns = ReturnTimes()
    for number in range(8):
        assert returns.best_wait_s("a", 5.0) == 5.0, number
        returns.observe("a", 60.0)
    assert returns.best_wait_s("a", 5.0) == 0.0
    for _ in range(64):
        returns.observe("a", 1.0)
    assert returns.best_wait_s("a", 5.0) == 1.0
    assert returns.best_wait_s("b", 5.0) == 5.0


def test_a_program_that_came_back_is_not_gone_for_good() -> None:
    """Its gap takes the place of the one that never ended, and a return that nobody waits for changes nothing."""
    returns = ReturnTimes()
    for gap_s in [1.0] * 8 + [math.inf] * 8:
        returns.observe("a", gap_s)
    assert returns.best_wait_s("a", 5.0) == 1.0  # half of them never return, so nobody waits for longer
    for _ in range(9):
        returns.came_back("a")
        returns.came_back("unknown")
        returns.observe("a", 1.0)
    assert returns.best_wait_s("a", 5.0) == 5.0
    (gaps,) = returns._names.values()
    assert list(gaps.latest) == gaps.ordered == [1.0] * 17


def test_names_and_gaps_are_bounded() -> None:
    """A client that makes up names drives out those that were used longest ago, and memory stays."""
    returns = ReturnTimes()
    for number in range(3000):
        returns.observe(("tenant", f"name {number}"), 1.0)
    assert len(returns) == 1024
    for number in itertools.islice(itertools.count(), 2000):
        returns.observe("one", float(number))
    (gaps,) = (each for name, each in returns._names.items() if name == "one")
    assert len(gaps.latest) == len(gaps.ordered) == 256
    assert gaps.ordered == sorted(gaps.latest)
