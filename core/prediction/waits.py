"""How long calls wait in an engine's queues, and how often the next one gets its turn."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

_SHARE: Final = 0.05  # the weight of the latest call in the averages; the first calls have more
_MOST_LEVELS: Final = 64
_WINDOW: Final = 128  # the latest calls, of which the median is taken


class Waits:
    """Waits of the latest calls, in seconds.

    Under most policies many calls start at once and a few wait for long. The mean then fits no call. The median is what
    a call that has not arrived is expected to wait.

    Attributes:
        mean_s: The mean wait.
        median_s: The median wait.
        turn_s: The mean time from the start of one call to the start of the next, while calls wait.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.median_s = 0.0
        self.turn_s = 0.0
        self._began_s = -math.inf
        self._calls = 0
        self._latest: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, now_s: float, waited_s: float) -> None:
        """A call starts to run after a wait of `waited_s`."""
        self._calls += 1
        share = max(_SHARE, 1 / self._calls)
        self.mean_s += share * (waited_s - self.mean_s)
        self.turn_s += share * (min(now_s - self._began_s, waited_s) - self.turn_s)
        self._began_s = now_s
        self._latest.append(waited_s)
        self.median_s = statistics.median(self._latest)


class WaitsByLevel:
    """The waits in each of a scheduling policy's queues.

    Under ATLAS, calls of the first queue start at once, and those of the last queue may wait for minutes. An average
    over all calls would be wrong for each of them.
    """

    def __init__(self) -> None:
        self._levels: dict[int, Waits] = {}

    def of(self, level: int) -> Waits:
        """The waits of calls in a queue. The object follows later calls, too."""
        level = min(level, _MOST_LEVELS - 1)
        waits = self._levels.get(level)
        if waits is None:
            waits = self._levels[level] = Waits()
        return waits
