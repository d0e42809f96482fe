"""Back-pressure: how many calls are let in at once, when to come again, and until when a call may take."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from weft.core.errors import DeadlineError, InvalidRequestError, OverloadedError

_REMEMBERED: Final = 32  # departures, for the rate
_FIRST_HINT_S: Final = 1.0  # before anything is known of the rate
_LONGEST_HINT_S: Final = 60.0


class Admission:
    """Lets a bounded number of calls in. May be used from any thread.

    Args:
        limit: tells how many calls may be in at once; it may change. `math.inf` for no bound.
    """

    def __init__(self, limit: Callable[[], float] = lambda: math.inf) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._calls = 0
        self._refused = 0  # since the last departure
        self._departures_s: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def calls(self) -> int:
        """How many are in."""
        return self._calls

    def enter(self, now_s: float) -> None:
        """Let a call in; `leave` ends it.

        Raises:
            OverloadedError: there are as many in as may be. `retry_after_s` says when one place more than those already
                promised to others is likely to be free.
        """
        with self._lock:
            limit = self._limit()
            if self._calls >= limit:
                self._refused += 1
                raise OverloadedError(self._calls, int(limit), self._hint_s(now_s))
            self._calls += 1

    def leave(self, now_s: float) -> None:
        """A call that was let in is over."""
        with self._lock:
            self._calls -= 1
            self._refused = max(0, self._refused - 1)
            self._departures_s.append(now_s)

    def _hint_s(self, now_s: float) -> float:
        """The time between two departures, as seen lately, for each call that was sent away since."""
        if not self._departures_s:
            return _FIRST_HINT_S
        gap_s = (now_s - self._departures_s[0]) / len(self._departures_s)
        return min(max(gap_s, 0.001) * self._refused, _LONGEST_HINT_S)


class Deadline(NamedTuple):
    """When a call has to be done."""

    at_s: float  # of the engine's clock; infinite for never
    allowed_s: float  # how long that was from its beginning
    whose: str  # "call" or "program"

    def error(self, delivered_tokens: int) -> DeadlineError:
        """What its caller is told when it passes."""
        return DeadlineError(self.whose, self.allowed_s, delivered_tokens)


def deadline(now_s: float, call_s: float | None, program_start_s: float, program_s: float | None) -> Deadline:
    """The earlier of a call's own deadline and its program's.

    Args:
        now_s: when the call begins.
        call_s: seconds it may take, None for any.
        program_start_s: when its program made its first call.
        program_s: seconds the program may take from then, None for any.

    Raises:
        DeadlineError: the program's has passed already.
    """
    own = Deadline(now_s + call_s if call_s is not None else math.inf, call_s or math.inf, "call")
    if program_s is None:
        return own
    of_program = Deadline(program_start_s + program_s, program_s, "program")
    if of_program.at_s <= now_s:
        raise of_program.error(0)
    return min(own, of_program)


def check_timeout(value: object, what: str) -> float | None:
    """Return a number of seconds as it stands, None for no limit.

    Raises:
        InvalidRequestError: it is no number, or not above 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidRequestError(f"{what} must be a number of seconds above 0, not {value!r:.80}.")
    return float(value)
