"""Tells an engine that is stuck from one in a long step."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

DEFAULT_HANG_TIMEOUT_S: Final = 120.0
# The share of one core above which an engine works. A process that waits for a lock uses less, a slow step uses more.
_BUSY: Final = 0.01
_PERIODS: Final = 10  # observations in one time limit


class ProcessUsage(NamedTuple):
    """What the processes of an engine have used so far."""

    cpu_s: float  # CPU time of all of them, in seconds
    is_stopped: bool  # one of them is stopped, as by SIGSTOP


class Liveness:
    """Decides from observations whether an engine is stuck.

    An engine answers a message between two steps only, so a missing answer alone does not tell a hang from a long step.
    A long step uses CPU time. An engine is stuck when for `timeout_s` seconds it has not answered and its processes
    have used next to no CPU time, or have been stopped.

    Time in which nobody observed does not count: if this process was stopped together with the engine, the engine gets
    the whole time limit again to answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s: float | None = None
        self._last_cpu_s = 0.0
        self._observed_s = 0.0
        self._used_s = 0.0
        # For each observation since the last answer: the observed time and the CPU time until then.
        self._silent: deque[tuple[float, float]] = deque()

    @property
    def period_s(self) -> float:
        """Seconds from one observation to the next."""
        return self._timeout_s / _PERIODS

    def observe(self, now_s: float, usage: ProcessUsage, *, answered: bool) -> bool:
        """Take an observation, and return whether the engine is stuck. `answered`: since the observation before."""
        if self._last_s is not None:
            self._observed_s += min(now_s - self._last_s, 2 * self.period_s)
            if not usage.is_stopped:  # a process that waits for a stopped one may wait busily
                self._used_s += max(0.0, usage.cpu_s - self._last_cpu_s)
        self._last_s, self._last_cpu_s = now_s, usage.cpu_s
        if answered:
            self._silent.clear()
        self._silent.append((self._observed_s, self._used_s))
        begin_s = self._observed_s - self._timeout_s
        while len(self._silent) > 1 and self._silent[1][0] <= begin_s:
            self._silent.popleft()
        first_s, used_s = self._silent[0]
        return first_s <= begin_s and self._used_s - used_s <= _BUSY * self._timeout_s
