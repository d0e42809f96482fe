"""Where each of several replicas on one host runs: CPU cores, or GPUs, of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from weft.core.ids import EngineId

T = TypeVar("T")


def share_cores(cores: Iterable[int], shares: int) -> list[tuple[int, ...]]:
    """Disjoint sets of cores, as many in each, neighbours together.

    Two engines whose threads share cores spend their time waiting for each other at every OpenMP barrier.

    Args:
        cores: the cores to share out; some may be left over.
        shares: how many sets.

    Returns:
        The sets; none at all if there are fewer cores than sets.
    """
    ordered = sorted(set(cores))
    size = len(ordered) // shares
    return [tuple(ordered[n * size : (n + 1) * size]) for n in range(shares)] if size else []


def largest_share(rooms: Iterable[int], shares: int) -> int:
    """As many cores for each of several replicas as the hosts allow, if all get the same.

    Args:
        rooms: how many cores each host has.
        shares: how many replicas there are to be; one needs its cores on one host.

    Returns:
        Cores, at least 1, even if there is no room for all.
    """
    found = list(rooms)
    sizes = range(max(found, default=1), 0, -1)
    return next((size for size in sizes if sum(room // size for room in found) >= shares), 1)


class Assignments(Generic[T]):
    """Hands each replica a place of its own for as long as it exists, as far as they go.

    Args:
        places: e.g. sets of cores, or the names of GPUs.
    """

    def __init__(self, places: Iterable[T]) -> None:
        self._free = list(places)
        self._taken: dict[EngineId, T] = {}

    def take(self, engine_id: EngineId) -> T | None:
        """A replica's place, the same each time; None if there is none left, and it runs wherever it can."""
        if engine_id not in self._taken and self._free:
            self._taken[engine_id] = self._free.pop(0)
        return self._taken.get(engine_id)

    def release(self, engine_id: EngineId) -> None:
        """A replica is gone for good: the next one may have its place."""
        if engine_id in self._taken:
            self._free.append(self._taken.pop(engine_id))
