"""Shared parts of the parameter dataclasses of balancers."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import BalancerError


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a balancer that has none."""


def check_number(value: object, what: str) -> float:
    """Return a number as it is.

    Args:
        value: the value of a parameter.
        what: the parameter's name, for the error.

    Raises:
        BalancerError: the value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BalancerError(f"{what} must be a number, not {value!r:.60}.")
    return value
