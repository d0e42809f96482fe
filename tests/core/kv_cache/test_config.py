"""The swap's configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

import weft
from weft.core.errors import SwapArgumentError


def test_the_memory_in_bytes() -> None:
    """`space_gib` is in units of 2**30 bytes."""
    assert weft.SwapConfig(space_gib=0.5).space_bytes == 2**29


@pytest.mark.parametrize("values", [
    {"space_gib": 0}, {"space_gib": -1.0}, {"space_gib": math.inf}, {"space_gib": math.nan}, {"min_tokens": -1},
])  # fmt: skip
def test_values_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    """The error names the value."""
    ((name, value),) = values.items()
    with pytest.raises(SwapArgumentError, match=f"{name} is {value}"):
        weft.SwapConfig(**values)
