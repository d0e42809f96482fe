"""How long calls wait in an engine's queues, and how often the next one gets its turn."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

_SHARE: Final = 0.05  # of the latest call in the averages; more of the first ones
_MOST_LEVELS: Final = 64
_WINDOW: Final = 128  # calls, for the median


class Waits:
    """Waits of the latest calls, in seconds.

    Where the policy orders calls, most start at once and a few wait for long. The mean is then right for none, and the
    median is what a call that has not arrived is expected to wait.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0  # mean
        self.median_s = 0.0
        self.turn_s = 0.0  # from the start of one call to that of the next, while calls wait
        self._began_s = -math.inf
        self._calls = 0
        self._latest: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, now_s: float, waited_s: float) -> None:
        """A call starts to run, and has waited for so long."""
        self._calls += 1
        share = max(_SHARE, 1 / self._calls)
        self.mean_s += share * (waited_s - self.mean_s)
        self.turn_s += share * (min(now_s - self._began_s, waited_s) - self.turn_s)
        self._began_s = now_s
        self._latest.append(waited_s)
        self.median_s = statistics.median(self._latest)


class WaitsByLevel:
    """The waits in each of a scheduling policy's queues.

    Least-served-first starts calls of its first queue at once, and lets those of its last one wait for minutes. So an
    average over all calls is wrong for each.
    """

    def __init__(self) -> None:
        self._levels: dict[int, Waits] = {}

    def of(self, level: int) -> Waits:
        """The waits of calls in a queue, from now on as well."""
        return self._levels.setdefault(min(level, _MOST_LEVELS - 1), Waits())
