"""Puts spans of time into rows, so that no two spans of a row overlap."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def rows(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return the number of a row for each span: the first row that is free.

    Args:
        spans: start and end of each span in seconds, sorted by start.
    """
    busy: list[tuple[float, int]] = []  # the end of the last span of a row, and the row
    free: list[int] = []
    found = []
    for start_s, end_s in spans:
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end_s, row))
        found.append(row)
    return found
