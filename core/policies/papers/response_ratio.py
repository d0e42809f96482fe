"""Waiting calls by queue, and in a queue by response ratio: HRRN (Astraea §4.3.3, eq. 4).

The ratio of a call's wait to its service grows faster for short calls, so the order changes while calls wait. Calls of
about the same service are in one bucket. Inside a bucket they go by their waits, an order that does not change, so only
the first calls of the buckets have to be compared.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Final

from weft.core.policies.queues.waiting import RankQueue, WaitingCalls
from weft.core.policies.view import Call, Rank

_WIDTH: Final = math.log(1.1)  # of a bucket, in which a call may go before another whose ratio is up to 10 % higher


class ByResponseRatio(WaitingCalls):
    """Waiting calls: those of the first queue first, and in a queue the call with the highest response ratio.

    A call's rank is its queue, the time since which it counts as waiting, and its arrival. Its `predicted_service_s`
    must not change while it waits here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[int, dict[int, RankQueue[Call]]] = {}  # by level, then by bucket; none is empty
        self._places: dict[Call, tuple[int, int]] = {}

    def push(self, member: Call) -> None:
        if member in self._places:
            raise ValueError(f"already in the queue: {member}")
        bucket = math.floor(math.log(member.predicted_service_s) / _WIDTH)
        place = self._places[member] = member.rank.level, bucket
        self._queues.setdefault(place[0], {}).setdefault(bucket, RankQueue()).push(member)

    def update(self, member: Call) -> None:
        if member in self._places:
            self.discard(member)
            self.push(member)

    def discard(self, member: Call) -> None:
        place = self._places.pop(member, None)
        if place is None:
            return
        level, bucket = place
        buckets = self._queues[level]
        buckets[bucket].discard(member)
        if not buckets[bucket]:
            del buckets[bucket]
            if not buckets:
                del self._queues[level]

    def peek(self) -> Call:
        if not self._queues:
            raise IndexError("the queue is empty")
        buckets = self._queues[min(self._queues)]
        return min((heap.peek() for heap in buckets.values()), key=self._key)

    def pop(self) -> Call:
        member = self.peek()
        self.discard(member)
        return member

    def check_integrity(self) -> None:
        for heap in (heap for buckets in self._queues.values() for heap in buckets.values()):
            heap.check_integrity()
        for member, (level, _) in self._places.items():
            if level != member.rank.level:
                raise AssertionError(f"in queue {level}: {member}")

    def _key(self, call: Call) -> tuple[float, Rank]:
        return (call.rank.order - self.now_s) / call.predicted_service_s, call.rank

    def __contains__(self, member: object) -> bool:
        return member in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Call]:
        for level in sorted(self._queues):
            numbers = itertools.count()  # so that calls are never compared
            heads = [
                (self._key(call), next(numbers), call, rest)
                for rest in map(iter, self._queues[level].values())
                for call in itertools.islice(rest, 1)
            ]
            heapq.heapify(heads)
            while heads:
                _, _, call, rest = heads[0]
                yield call
                following = next(rest, None)
                if following is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (self._key(following), next(numbers), following, rest))
