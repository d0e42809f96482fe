"""Back-pressure: how many calls are admitted at once, when a refused call should retry, and deadlines."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from weft.core.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidRequestError,
    KeyLimitError,
    OverloadedError,
    ReplicaError,
    WeftError,
)
from weft.core.locks import fork_safe

DEFAULT_MAX_CALLS: Final = 256  # calls in flight on one vLLM engine, its queue included

_WINDOW: Final = 32  # the latest departures, from which the rate of departures is estimated
_DEFAULT_RETRY_S: Final = 1.0  # while no call has left
_SHORTEST_GAP_S: Final = 0.001
_LONGEST_RETRY_S: Final = 60.0


class Admission:
    """Admits a bounded number of calls. May be used from any thread.

    Args:
        limit: returns how many calls may be in flight at once. The value may change.

    Attributes:
        refusals: how many calls were refused so far.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._lock = fork_safe(threading.Lock())
        self._calls = 0
        self.refusals = 0
        self._refused = 0  # calls that were refused, less one for each departure since
        self._departures_s: deque[float] = deque(maxlen=_WINDOW)

    @property
    def calls(self) -> int:
        """The number of admitted calls that have not left."""
        return self._calls

    @property
    def limit(self) -> int:
        """How many calls may be in flight at once now."""
        return self._limit()

    def enter(self, now_s: float) -> None:
        """Admit a call, until `leave`. At the limit it raises OverloadedError, whose `retry_after_s` estimates when the
        call can be admitted if the calls that were refused before it come back first."""
        with self._lock:
            limit = self._limit()
            if self._calls >= limit:
                self._refused += 1
                self.refusals += 1
                raise OverloadedError(self._calls, limit, self._retry_after_s(now_s))
            self._calls += 1

    def leave(self, now_s: float) -> None:
        """Note that an admitted call has ended."""
        with self._lock:
            self._calls -= 1
            self._refused = max(0, self._refused - 1)
            self._departures_s.append(now_s)

    def _retry_after_s(self, now_s: float) -> float:
        """The mean time between recent departures, times the calls that were refused and wait for a departure."""
        if not self._departures_s:
            return _DEFAULT_RETRY_S
        gap_s = (now_s - self._departures_s[0]) / len(self._departures_s)
        return min(max(gap_s, _SHORTEST_GAP_S) * self._refused, _LONGEST_RETRY_S)


def check_max_calls(value: object) -> int:
    """Return `value`, or raise ReplicaError unless it is a whole number of calls above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ReplicaError(f"max_calls is {value!r:.80}; each vLLM engine must be allowed 1 call or more.")
    return value


class Deadline(NamedTuple):
    """The time until which one call must finish."""

    at_s: float  # seconds of the engine's clock; infinite for no deadline
    allowed_s: float  # seconds from the start of the call, or of its program, to `at_s`
    scope: str  # "call" or "program": the one that set the deadline

    def error(self, delivered_tokens: int) -> DeadlineError:
        """The error that the caller gets when the deadline has passed.

        Args:
            delivered_tokens: output tokens that the caller has received.
        """
        return DeadlineError(self.scope, self.allowed_s, delivered_tokens)


def deadline(now_s: float, call_s: float | None, program_start_s: float, program_s: float | None) -> Deadline:
    """Return the earlier of a call's own deadline and its program's.

    Args:
        now_s: when the call begins, in seconds of the engine's clock.
        call_s: seconds that the call may take; None: no limit.
        program_start_s: when the program made its first call.
        program_s: seconds that the program may take from then on; None: no limit.

    Raises:
        DeadlineError: the program's deadline has passed already.
    """
    of_call = Deadline(now_s + call_s if call_s is not None else math.inf, call_s or math.inf, "call")
    if program_s is None:
        return of_call
    of_program = Deadline(program_start_s + program_s, program_s, "program")
    if of_program.at_s <= now_s:
        raise of_program.error(0)
    return min(of_call, of_program)


def check_timeout(value: object, what: str) -> float | None:
    """Return `value`, or raise InvalidRequestError unless it is a finite number of seconds above 0, or None for no
    limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidRequestError(f"{what} must be a number of seconds above 0, not {value!r:.80}.")
    return float(value)


class Refused(StrEnum):
    """Why a request was refused. The limits of an API key have their names in the file of keys."""

    NO_API_KEY = "no_api_key"
    WRONG_API_KEY = "wrong_api_key"
    FOREIGN_PAGE = "foreign_page"  # the server has no keys, and a page of another site may have sent the request
    MAX_CALLS = "max_calls"
    MAX_PROGRAMS = "max_programs"
    MAX_BODY_BYTES = "max_body_bytes"  # of the key or of the server
    OVERLOADED = "overloaded"  # the server has as many calls, or holds as much of arriving requests, as it takes
    SLOW = "slow"  # the body was not complete in time
    MALFORMED = "malformed"  # the fields that Weft reads
    STOPPING = "stopping"  # the server


def refused_by(error: WeftError) -> Refused:
    """The reason that an error stands for."""
    if isinstance(error, KeyLimitError):
        return Refused(error.limit_name)
    if isinstance(error, OverloadedError):
        return Refused.OVERLOADED
    return Refused.STOPPING if isinstance(error, EngineClosedError) else Refused.MALFORMED
