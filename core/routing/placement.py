"""The CPU cores, or GPUs, that each of several replicas on one host has for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from weft.core.ids import EngineId

T = TypeVar("T")


def share_cores(cores: Iterable[int], shares: int) -> list[tuple[int, ...]]:
    """Divide cores into disjoint sets of equal size, each of neighbouring numbers, and leave out the remainder. There
    are no sets if there are fewer cores than sets.

    Two engines whose threads share cores spend their time waiting for each other at every OpenMP barrier.
    """
    ordered = sorted(set(cores))
    size = len(ordered) // shares
    return [tuple(ordered[n * size : (n + 1) * size]) for n in range(shares)] if size else []


def share_gpus(gpus: Sequence[str], replicas: int, each: int) -> list[str]:
    """Divide the GPUs of a host among replicas, `each` to a replica, in the order given. The names are those of
    CUDA_VISIBLE_DEVICES, and so are the results; there are none if there are too few GPUs."""
    if len(gpus) < replicas * each:
        return []
    return [",".join(gpus[n * each : (n + 1) * each]) for n in range(replicas)]


def largest_share(cores: Iterable[int], shares: int) -> int:
    """Return the largest number of cores that each of `shares` replicas can have, if all get the same number and those
    of one replica are on one host. It is at least 1, even if the hosts cannot hold all replicas."""
    per_host = list(cores)
    sizes = range(max(per_host, default=1), 0, -1)
    return next((size for size in sizes if sum(count // size for count in per_host) >= shares), 1)


class Assignments(Generic[T]):
    """Assigns each replica one resource for as long as the replica exists, until none is left.

    Args:
        resources: e.g. sets of cores, or the names of GPUs.
    """

    def __init__(self, resources: Iterable[T]) -> None:
        self._free = list(resources)
        self._assigned: dict[EngineId, T] = {}

    def acquire(self, engine_id: EngineId) -> T | None:
        """Return the replica's resource, the same each time.

        None means that no resource is left. The replica then runs on any core or GPU.
        """
        if engine_id not in self._assigned and self._free:
            self._assigned[engine_id] = self._free.pop(0)
        return self._assigned.get(engine_id)

    def release(self, engine_id: EngineId) -> None:
        """Free the resource of a replica that will not be started again, for the next replica."""
        if engine_id in self._assigned:
            self._free.append(self._assigned.pop(engine_id))
