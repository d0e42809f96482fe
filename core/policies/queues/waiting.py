"""Queues in rank order: O(log n) to add, take and re-rank a member, O(1) to remove one from anywhere."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from weft.core.policies.view import Call, Rank


class Ranked(Hashable, Protocol):
    """Something with a rank. The member with the least rank comes first."""

    @property
    def rank(self) -> Rank: ...


T = TypeVar("T", bound=Ranked)


class RankHeap(Generic[T]):
    """A priority queue by rank. After a change of a member's rank, call `update`.

    Removing or re-ranking a member leaves its old heap entry behind. An old entry is dropped when it reaches the front.
    When more than half of the entries are old, the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: dict[T, tuple[Rank, int]] = {}  # the valid entry of each member
        self._heap: list[tuple[tuple[Rank, int], T]] = []
        self._pushes = 0  # breaks ties, so that members are never compared

    def push(self, member: T) -> None:
        """Add a member.

        Raises:
            ValueError: It is already in the queue.
        """
        if member in self._entries:
            raise ValueError(f"already in the queue: {member}")
        self._add(member)

    def update(self, member: T) -> None:
        """Sort a member by its present rank. A member that is not in the queue is ignored."""
        entry = self._entries.get(member)
        if entry is not None and entry[0] != member.rank:
            self._add(member)
            self._compact()

    def peek(self) -> T:
        """Return the first member and leave it in.

        Raises:
            IndexError: The queue is empty.
        """
        while self._heap:
            entry, member = self._heap[0]
            if self._entries.get(member) is entry:
                return member
            heapq.heappop(self._heap)
        raise IndexError("the queue is empty")

    def pop(self) -> T:
        """Take the first member out.

        Raises:
            IndexError: The queue is empty.
        """
        member = self.peek()
        heapq.heappop(self._heap)
        del self._entries[member]
        return member

    def discard(self, member: T) -> None:
        """Take a member out, if it is in the queue."""
        if self._entries.pop(member, None) is not None:
            self._compact()

    def check_integrity(self) -> None:
        """Assert that each member is sorted by its present rank. For tests."""
        for member, (rank, _) in self._entries.items():
            if rank != member.rank:
                raise AssertionError(f"sorted by rank {rank}: {member}")

    def _add(self, member: T) -> None:
        self._pushes += 1
        entry = (member.rank, self._pushes)
        self._entries[member] = entry
        heapq.heappush(self._heap, (entry, member))

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [(entry, member) for member, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def __contains__(self, member: object) -> bool:
        return member in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Iterate in rank order, O(log n) for each member, by walking down the heap to the smallest entry seen so far.

        The queue must not change during the iteration.
        """
        heap, size = self._heap, len(self._heap)
        seen = [(heap[0], 0)] if heap else []
        while seen:
            (entry, member), index = seen[0]
            child = 2 * index + 1
            if child < size:
                heapq.heapreplace(seen, (heap[child], child))
                if child + 1 < size:
                    heapq.heappush(seen, (heap[child + 1], child + 1))
            else:
                heapq.heappop(seen)
            if self._entries.get(member) is entry:
                yield member


class WaitingCalls(RankHeap[Call]):
    """The calls that wait, by `Call.rank`.

    Attributes:
        now_s: The time of the latest report or decision, for orders that change with time.
    """

    now_s = -math.inf
