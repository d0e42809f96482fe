"""The sums of queues."""

from __future__ import annotations

from weft.core.policies.queues import MOST_LEVELS, Levels, LevelStats


def test_a_queue_shows_what_it_has_and_what_it_had() -> None:
    """Queues without a call are there as long as one further down is."""
    levels = Levels()
    levels.started(2, 1.5)
    levels.served(2, 4.0)
    assert levels.stats(running=[2], waiting=[0, 0], promotions=3) == (
        (LevelStats(0, 0, 2, 0, 0.0, 0.0), LevelStats(1, 0, 0, 0, 0.0, 0.0), LevelStats(2, 1, 0, 1, 1.5, 4.0)),
        3,
    )


def test_the_queues_that_are_told_apart_have_a_bound() -> None:
    """A policy may have a queue for each program; those far down are one in the figures, so that these do not grow."""
    levels = Levels()
    for level in range(100_000):
        levels.started(level, 1.0)
    found = levels.stats(running=[], waiting=[5, 99_999, 77], promotions=0).levels
    assert len(found) == MOST_LEVELS
    assert sum(each.starts for each in found) == 100_000
    assert (found[5].waiting, found[-1].waiting) == (1, 2)
