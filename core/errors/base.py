"""The base class of all errors, which lets an error travel from one process to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _restore(kind: type[WeftError], args: tuple[Any, ...], state: dict[str, Any]) -> WeftError:
    error = kind.__new__(kind, *args)
    error.args = args  # TimeoutError is an OSError, whose __new__ leaves args to __init__
    error.__dict__.update(state)
    return error


def restored(kind: type[WeftError], message: str, attributes: Mapping[str, Any]) -> WeftError:
    """Rebuild an error that another process has raised.

    Args:
        kind: the class of the error.
        message: its finished message.
        attributes: its other attributes, by name.
    """
    return _restore(kind, (message,), dict(attributes))


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished message, because the arguments of a subclass's `__init__` are not `args`."""
        return _restore, (type(self), self.args, self.__dict__)
