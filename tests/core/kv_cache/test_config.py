"""The swap's configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

import weft
from weft.core.errors import SwapArgumentError
from weft.core.kv_cache.config import auto_gib, space_bytes


def test_the_memory_in_bytes() -> None:
    """A number of GiB counts as it is. "auto" is bound by what the host has free, and by four times the KV cache."""
    assert space_bytes(0.5, 8.0, 2**20) == 2**29
    assert space_bytes("auto", 8.0, 2**30) == 4 * 2**30
    assert space_bytes("auto", 3.0, 2**30) == 3 * 2**30


def test_the_workers_share_half_of_what_is_free() -> None:
    """A share that is too small to be of use is none."""
    assert auto_gib(16 * 2**30, 2) == 4.0
    assert auto_gib(2**30, 8) == 1 / 16
    assert auto_gib(2**30, 9) == auto_gib(0, 1) == 0.0


@pytest.mark.parametrize("values", [
    {"space_gib": "much"}, {"space_gib": True}, {"space_gib": None}, {"space_gib": 0}, {"space_gib": -1.0},
    {"space_gib": math.inf}, {"space_gib": math.nan}, {"min_tokens": -1},
])  # fmt: skip
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    """The error names the value."""
    ((name, value),) = values.items()
    with pytest.raises(SwapArgumentError, match=f"{name} is {value!r}"):
        weft.SwapConfig(**values)
