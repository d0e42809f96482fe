"""Reads the documents that a server has sent."""

from __future__ import annotations

from typing import Final, TypeVar

from pydantic import TypeAdapter

from weft.core.errors import StateError
from weft.core.show import LiveState, Timeline

_STATE: Final = TypeAdapter(LiveState)
_TIMELINE: Final = TypeAdapter(Timeline)

T = TypeVar("T")


def from_json(text: str | bytes) -> LiveState:
    """Read the state of an engine. Fields that are unknown here, as of a newer server, are left out.

    Raises:
        StateError: The text is not such a document.
    """
    return _read(_STATE, text, "state of a Weft engine")


def timeline_from_json(text: str | bytes) -> Timeline:
    """Read the timeline of a program. Fields that are unknown here are left out.

    Raises:
        StateError: The text is not such a document.
    """
    return _read(_TIMELINE, text, "timeline of a program")


def _read(adapter: TypeAdapter[T], text: str | bytes, what: str) -> T:
    try:
        return adapter.validate_json(text)
    except ValueError as error:  # pydantic's, which lists every field
        raise StateError(f"this is no {what}: {str(error).splitlines()[0]:.200}.") from error
