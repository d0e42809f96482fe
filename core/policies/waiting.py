"""The waiting calls in rank order: O(log n) to add and take, O(1) to remove from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.core.policies.base import Call, Rank


class WaitingCalls:
    """A priority queue by `Call.rank`. A call's rank must not change while it is in: take it out and put it back.

    Removal leaves the heap entry behind, to be dropped when it comes up; when more than half of the entries are such,
    the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: dict[Call, tuple[Rank, int]] = {}
        self._heap: list[tuple[tuple[Rank, int], Call]] = []
        self._pushes = 0  # breaks ties, so that calls are never compared

    def push(self, call: Call) -> None:
        """Add a call.

        Raises:
            ValueError: it is already in.
        """
        if call in self._entries:
            raise ValueError(f"call {call.key} is already waiting")
        self._pushes += 1
        entry = (call.rank, self._pushes)
        self._entries[call] = entry
        heapq.heappush(self._heap, (entry, call))

    def peek(self) -> Call:
        """The first call, left in.

        Raises:
            IndexError: nothing waits.
        """
        while self._heap:
            entry, call = self._heap[0]
            if self._entries.get(call) == entry:
                return call
            heapq.heappop(self._heap)
        raise IndexError("no call is waiting")

    def pop(self) -> Call:
        """Take the first call out.

        Raises:
            IndexError: nothing waits.
        """
        call = self.peek()
        heapq.heappop(self._heap)
        del self._entries[call]
        return call

    def discard(self, call: Call) -> None:
        """Take a call out if it is in."""
        if self._entries.pop(call, None) is not None and len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [(entry, other) for other, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def __contains__(self, call: object) -> bool:
        return call in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Call]:
        """In rank order, O(log n) for each call taken: walks down the heap, always the smallest entry seen so far.

        The queue must not change meanwhile.
        """
        heap = self._heap
        seen = [(heap[0], 0)] if heap else []
        while seen:
            (entry, call), index = heapq.heappop(seen)
            if self._entries.get(call) == entry:
                yield call
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(seen, (heap[child], child))
