"""The limits that an API key has of its own."""

from __future__ import annotations

from weft.core.errors import KeyLimitError, OverloadedError
from weft.core.routing.admission import Admission
from weft.engine.serve.keys import ApiKey


class CallsOfKeys:
    """Counts the calls in flight of keys that have a limit. Use it on the engine's event loop."""

    def __init__(self) -> None:
        self._admissions: dict[str, Admission] = {}  # by scope; no more than there are keys

    def enter(self, key: ApiKey, now_s: float) -> None:
        """Admit a call; `leave` ends it.

        Args:
            key: Of the request.
            now_s: Seconds of the engine's clock.

        Raises:
            KeyLimitError: The key has as many calls in flight as it may.
        """
        limit = key.max_calls
        if limit is None:
            return
        admission = self._admissions.get(key.scope)
        if admission is None:
            admission = self._admissions[key.scope] = Admission(lambda: limit)
        try:
            admission.enter(now_s)
        except OverloadedError as error:
            raise KeyLimitError("max_calls", limit, error.retry_after_s) from None

    def leave(self, key: ApiKey, now_s: float) -> None:
        """A call that was admitted has ended."""
        if key.max_calls is not None:
            self._admissions[key.scope].leave(now_s)

    def count(self, key: ApiKey) -> int:
        """The calls in flight of a key; 0 if it has no limit."""
        admission = self._admissions.get(key.scope)
        return admission.calls if admission is not None else 0
