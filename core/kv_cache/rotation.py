"""Spreads periodic work on many items evenly over the period."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    """Hands out every item once in each period, a few at a time.

    Args:
        items: Returns all items. It is called at the start of each period.
        period_s: The period in seconds of the caller's clock.
        most_a_s: Of more items than so many for each second of the period, the period is longer.
    """

    def __init__(self, items: Callable[[], Iterable[T]], period_s: float, most_a_s: float = math.inf) -> None:
        self._make = items
        self._least_s = self._period_s = period_s
        self._most_a_s = most_a_s
        self._items: list[T] = []
        self._done = 0
        self._began_s = self._asked_s = -math.inf

    def due(self, now_s: float) -> list[T]:
        """The items whose turn has come since the previous call; all items if that was a period ago or more."""
        is_late, self._asked_s = now_s >= self._asked_s + self._period_s, now_s
        rest: list[T] = []
        if is_late or now_s >= self._began_s + self._period_s:
            rest = [] if is_late else self._items[self._done :]
            self._items, self._done, self._began_s = list(self._make()), 0, now_s
            self._period_s = max(self._least_s, len(self._items) / self._most_a_s)
        share = 1.0 if is_late else (now_s - self._began_s) / self._period_s
        until = math.ceil(share * len(self._items))
        part = self._items[self._done : until]
        self._done = max(self._done, until)
        return rest + part
