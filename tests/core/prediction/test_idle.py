"""How long a program may be idle, by what programs of its kind did."""

from __future__ import annotations

import pytest

from weft.core.prediction.times import LONGEST_S, SHORTEST_S, IdleTimes


def learned(*gaps_s: float, times: int = 8) -> IdleTimes:
    found = IdleTimes()
    for gap_s in gaps_s * times:
        found.note("agent", gap_s)
    return found


def test_little_is_concluded_from_few_gaps() -> None:
    """A kind that is hardly known gets the longest time."""
    assert learned(1.0, times=7).timeout_s("agent") == LONGEST_S
    assert learned(1.0).timeout_s("another") == LONGEST_S


@pytest.mark.parametrize(("gap_s", "timeout_s"), [(1.0, SHORTEST_S), (20.0, 80.0), (900.0, LONGEST_S)])
def test_the_longest_gap_counts_within_bounds(gap_s: float, timeout_s: float) -> None:
    """Four times the longest gap, but neither seconds nor hours."""
    assert learned(0.1, gap_s).timeout_s("agent") == timeout_s


def test_old_gaps_are_forgotten() -> None:
    """A kind that has become quicker is given less time."""
    times = learned(100.0)
    for _ in range(64):
        times.note("agent", 10.0)
    assert times.timeout_s("agent") == 40.0


def test_the_kinds_are_bounded() -> None:
    """Clients may make up names without end."""
    times = IdleTimes()
    for number in range(2_000):
        times.note(str(number), 1.0)
    assert len(times) == 1_000
