"""Cores and GPUs of their own for replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.ids import EngineId
from weft.core.routing.placement import Assignments, largest_share, share_cores

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
    """As many to each; too few for all, and nobody gets any."""
    assert share_cores(cores, shares) == expected


@given(st.sets(st.integers(0, 500), max_size=100), st.integers(1, 20))
def test_no_core_is_given_twice(cores: set[int], shares: int) -> None:
    """And none that is not there."""
    given_out = [core for share in share_cores(cores, shares) for core in share]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= cores


@pytest.mark.parametrize(
    ("rooms", "shares", "expected"),
    [([16, 16], 2, 16), ([16, 16], 3, 8), ([16, 4], 3, 5), ([1, 1, 0], 2, 1), ([1], 3, 1), ([], 1, 1)],
)
def test_the_largest_equal_share(rooms: list[int], shares: int, expected: int) -> None:
    """Whole replicas only: what is left on one host helps no other."""
    assert largest_share(rooms, shares) == expected


def test_a_replica_keeps_its_place() -> None:
    """Also over a restart; one too many gets none."""
    places = Assignments(["gpu0", "gpu1"])
    assert [places.take(A), places.take(B), places.take(C)] == ["gpu0", "gpu1", None]
    assert places.take(A) == "gpu0"


def test_the_place_of_a_removed_replica_goes_to_the_next() -> None:
    """Once."""
    places = Assignments(["gpu0", "gpu1"])
    places.take(A)
    places.take(B)
    places.release(A)
    places.release(A)
    places.release(C)
    assert places.take(C) == "gpu0"
    assert places.take(A) is None
