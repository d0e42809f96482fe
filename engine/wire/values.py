"""Values that another process sent. They are read without an error, because one would end the engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

MAX_FIGURE: Final = 10**8  # of seconds, three years, and of calls; sums with it stay exact to less than a microsecond


def strings(values: object) -> Iterable[str]:
    """The strings of a list; none if the value is no list."""
    return (value for value in values if isinstance(value, str)) if isinstance(values, list | tuple) else ()


def seconds(value: object) -> float:
    """A number of seconds; 0 if the value is none."""
    if type(value) is float and 0 <= value <= MAX_FIGURE:  # what Weft sends
        return value
    # An int may be too large for a float. A comparison takes it, and min returns the smaller value.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(min(value, MAX_FIGURE))
    return 0.0


def seconds_or_inf(value: object) -> float:
    """Like `seconds`, but 0 is a time, and inf unknown."""
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return 0.0 if is_zero else seconds(value) or math.inf


def count(value: object) -> int:
    """A number of calls; 0 if the value is none."""
    return min(value, MAX_FIGURE) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
