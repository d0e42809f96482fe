"""Cores and GPUs that each replica has for itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import EngineId
from weft.core.routing.placement import Assignments, largest_share, share_cores, share_gpus

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


@pytest.mark.parametrize(
    ("cores", "shares", "expected"),
    [
        (range(8), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (range(8), 3, [(0, 1), (2, 3), (4, 5)]),
        ([9, 3, 5], 2, [(3,), (5,)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1], 3, []),
    ],
)
def test_cores_are_shared_out(cores: range | list[int], shares: int, expected: list[tuple[int, ...]]) -> None:
    """Each replica gets the same number of cores; if there are fewer cores than replicas, no replica gets any."""
    assert share_cores(cores, shares) == expected


@given(st.sets(st.integers(0, 500), max_size=100), st.integers(1, 20))
def test_no_core_is_given_twice(cores: set[int], shares: int) -> None:
    """Every core that is given is one of the cores of the host."""
    given_out = [core for share in share_cores(cores, shares) for core in share]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= cores


@pytest.mark.parametrize(
    ("gpus", "replicas", "each", "expected"),
    [
        (["0", "1"], 2, 1, ["0", "1"]),
        (["0", "1", "2", "3", "4"], 2, 2, ["0,1", "2,3"]),
        (["5", "GPU-a1", "2"], 3, 1, ["5", "GPU-a1", "2"]),
        (["0", "1", "2"], 2, 2, []),
        ([], 1, 1, []),
    ],
)
def test_gpus_are_shared_out(gpus: list[str], replicas: int, each: int, expected: list[str]) -> None:
    """Each replica gets as many as it needs, in the order of the names; if they do not suffice, no replica gets any."""
    assert share_gpus(gpus, replicas, each) == expected


@pytest.mark.parametrize(
    ("cores", "shares", "expected"),
    [([16, 16], 2, 16), ([16, 16], 3, 8), ([16, 4], 3, 5), ([1, 1, 0], 2, 1), ([1], 3, 1), ([], 1, 1)],
)
def test_the_largest_equal_share(cores: list[int], shares: int, expected: int) -> None:
    """A replica is on one host: the cores left on one host are no help to another."""
    assert largest_share(cores, shares) == expected


def test_a_replica_keeps_its_resource() -> None:
    """It keeps the resource over a restart; the third replica of two resources gets none."""
    assignments = Assignments(["gpu0", "gpu1"])
    assert [assignments.acquire(A), assignments.acquire(B), assignments.acquire(C)] == ["gpu0", "gpu1", None]
    assert assignments.acquire(A) == "gpu0"


def test_the_resource_of_a_removed_replica_goes_to_the_next() -> None:
    """A second release of the same replica frees nothing."""
    assignments = Assignments(["gpu0", "gpu1"])
    assignments.acquire(A)
    assignments.acquire(B)
    assignments.release(A)
    assignments.release(A)
    assignments.release(C)
    assert assignments.acquire(C) == "gpu0"
    assert assignments.acquire(A) is None
