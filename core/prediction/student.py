"""Quantiles of Student's t distribution, for predictions from a few samples."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist


@lru_cache(maxsize=4096)
def student_quantile(part: float, degrees: int) -> float:
    """The value that a t-distributed variable does not exceed in a part of all cases.

    Exact for 1 and 2 degrees of freedom; otherwise the expansion of Hill (1970, Algorithm 396), whose error is below
    0.1 %.

    Args:
        part: Above 0 and below 1.
        degrees: Degrees of freedom, at least 1.
    """
    if part < 0.5:
        return -student_quantile(1.0 - part, degrees)
    two_sided = 2.0 * (1.0 - part)
    if degrees == 1:
        return 1.0 / math.tan(math.pi * two_sided / 2)
    if degrees == 2:
        return math.sqrt(2.0 / (two_sided * (2.0 - two_sided)) - 2.0)
    a = 1.0 / (degrees - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2) * degrees
    x = d * two_sided
    y = x ** (2.0 / degrees)
    if y > 0.05 + a:  # near the middle: an expansion about the normal distribution
        x = NormalDist().inv_cdf(two_sided / 2)
        y = x * x
        if degrees < 5:
            c += 0.3 * (degrees - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (
                1.0 / (((degrees + 6.0) / (degrees * y) - 0.089 * d - 0.822) * (degrees + 2.0) * 3.0)
                + 0.5 / (degrees + 4.0)
            )
            * y
            - 1.0
        ) * (degrees + 1.0) / (degrees + 2.0) + 1.0 / y
    return math.sqrt(degrees * y)
