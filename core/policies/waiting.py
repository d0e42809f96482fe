"""The waiting calls in rank order: O(log n) to add, take and re-rank a call, O(1) to remove one from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from weft.core.policies.view import Call, Rank


class WaitingCalls:
    """A priority queue by `Call.rank`. After a change of a waiting call's rank, call `update`.

    Removing or re-ranking a call leaves its old heap entry behind. Such an entry is dropped when it reaches the front.
    When more than half of the entries are such, the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: dict[Call, tuple[Rank, int]] = {}  # the valid entry of each call
        self._heap: list[tuple[tuple[Rank, int], Call]] = []
        self._pushes = 0  # breaks ties, so that calls are never compared

    def push(self, call: Call) -> None:
        """Add a call.

        Raises:
            ValueError: The call is already waiting.
        """
        if call in self._entries:
            raise ValueError(f"call {call.key} is already waiting")
        self._add(call)

    def update(self, call: Call) -> None:
        """Sort a call by its present rank. A call that does not wait is ignored."""
        entry = self._entries.get(call)
        if entry is not None and entry[0] != call.rank:
            self._add(call)
            self._compact()

    def peek(self) -> Call:
        """Return the first call and leave it in.

        Raises:
            IndexError: No call is waiting.
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
            IndexError: No call is waiting.
        """
        call = self.peek()
        heapq.heappop(self._heap)
        del self._entries[call]
        return call

    def discard(self, call: Call) -> None:
        """Take a call out, if it waits."""
        if self._entries.pop(call, None) is not None:
            self._compact()

    def check_integrity(self) -> None:
        """Assert that each call is sorted by its present rank. For tests.

        Raises:
            AssertionError: A call is not; the message names it.
        """
        for call, (rank, _) in self._entries.items():
            if rank != call.rank:
                raise AssertionError(f"call {call.key} waits with rank {rank} and has rank {call.rank}")

    def _add(self, call: Call) -> None:
        self._pushes += 1
        entry = (call.rank, self._pushes)
        self._entries[call] = entry
        heapq.heappush(self._heap, (entry, call))

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [(entry, call) for call, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def __contains__(self, call: object) -> bool:
        return call in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Call]:
        """Iterate in rank order, O(log n) for each call: walks down the heap, always to the smallest entry seen.

        The queue must not change during the iteration.
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
