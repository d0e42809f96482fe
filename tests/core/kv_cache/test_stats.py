"""Figures of the swap."""

from __future__ import annotations

from weft.core.kv_cache.stats import SwapStats


def test_figures_of_several_engines() -> None:
    """The counts add up; the highest threshold and the lowest known speeds stand for all engines."""
    one = SwapStats(10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 20.0, 900.0, None, 4.0)
    other = SwapStats(20, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 30.0, 700.0, None, None)
    assert SwapStats.together([one, other]) == (30, 3, 4, 5, 6, 7, 8, 9, 10, 11, 4, 30.0, 700.0, None, 4.0)
    assert SwapStats.together([]) is None
