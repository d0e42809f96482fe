"""Rows for pieces of time, so that none overlaps another in its row."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def rows(spans: Iterable[tuple[float, float]]) -> list[int]:
    """For each span, the number of its row; rows are filled from the first.

    Args:
        spans: starts and ends, in seconds, the earliest start first.
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
