"""What the parameter dataclasses of policies have in common."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import PolicyError


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a policy that has none."""


def check_number(value: object, what: str) -> float:
    """Return a number as it is.

    Raises:
        PolicyError: The value is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{what} must be a number, not {value!r:.60}.")
    return value
