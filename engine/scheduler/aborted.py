"""The final accounts of aborted calls, until the front end asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from weft.core.ids import ProgramId
from weft.core.log import get_logger
from weft.engine.wire.control import CallKey
from weft.engine.wire.reports import CallAccount

_MOST_HELD: Final = 10_000  # for a front end that does not ask


class AbortedAccounts:
    """Holds accounts of calls that ended in the front end: by a cancellation, a closed stream or a stop string.

    vLLM sends no output for such a call, so nothing can carry its last account back.

    Args:
        most: How many accounts are held. The oldest are dropped.

    Attributes:
        dropped: How many accounts were dropped so far.
    """

    def __init__(self, most: int = _MOST_HELD) -> None:
        self._most = most
        self._held: dict[CallKey, CallAccount] = {}  # the oldest first
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, call: CallKey, account: CallAccount) -> None:
        """Hold the account of a call that was aborted."""
        self._held[call] = account
        if len(self._held) > self._most:
            del self._held[next(iter(self._held))]
            if self.dropped == 0:
                get_logger().warning("the front end does not ask for the accounts of aborted calls", held=self._most)
            self.dropped += 1

    def take(self, calls: Iterable[CallKey]) -> dict[CallKey, CallAccount]:
        """The accounts of these calls, as far as they are held. They are no longer held."""
        return {call: self._held.pop(call) for call in calls if call in self._held}

    def forget(self, program_ids: Collection[ProgramId]) -> None:
        """Drop the accounts of programs that have ended, whose rows have left the process table."""
        if self._held:
            ended = frozenset(program_ids)
            self._held = {call: account for call, account in self._held.items() if call[0] not in ended}
