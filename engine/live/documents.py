"""Reads the document of an engine's state that a server has sent."""

from __future__ import annotations

from typing import Final

from pydantic import TypeAdapter

from weft.core.errors import StateError
from weft.core.live import LiveState

_ADAPTER: Final = TypeAdapter(LiveState)


def from_json(text: str | bytes) -> LiveState:
    """Read a document. Fields that are unknown here, as of a newer server, are left out.

    Raises:
        StateError: It is no such document.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValueError as error:  # pydantic's, which lists every field
        raise StateError(f"this is no state of a Weft engine: {str(error).splitlines()[0]:.200}.") from error
