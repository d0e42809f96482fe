"""Queue bounds that are learned from the calls that have been served."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

# Where calibration starts. The first bound should exceed the service of a typical call. Otherwise calls are demoted
# while they run, and preempt each other to no purpose: in the demo a call takes 2 to 3 s, and with a first bound of
# 0.5 s each call was preempted once. Bounds that double tell programs apart over a wide range. The last of the five
# queues is first come, first served. With seven queues, its bound was so large that all long programs ended late.
DEFAULT_BOUNDS_S: Final = (4.0, 8.0, 16.0, 32.0)
_WINDOW_CALLS: Final = 512  # the latest calls, from which the bounds follow
_EVERY_CALLS: Final = 32  # the bounds are computed again after so many calls


class BoundsCalibration:
    """Learns the queue bounds from the latest calls.

    The first bound is the 90th percentile of a call's service, and each further bound is twice the one before. With a
    narrower first queue, calls would be demoted while they run, and preempt each other to no purpose. A much wider one
    would hold all of a short program and most of a long one, and tell them apart too late. The same calls give the same
    bounds, because only calls are counted and no clock is read.

    Args:
        queues: K, the number of queues.
    """

    def __init__(self, queues: int) -> None:
        self._queues = queues
        self._services_s: deque[float] = deque(maxlen=_WINDOW_CALLS)
        self._calls = 0

    def observe(self, service_s: float) -> Sequence[float] | None:
        """Observe a call that has left after `service_s` of service, in seconds or in any other unit.

        Returns the K-1 new bounds in the same unit after every 32nd call, otherwise None.
        """
        if service_s <= 0:  # the call was aborted before it ran
            return None
        self._services_s.append(service_s)
        self._calls += 1
        if self._calls % _EVERY_CALLS:
            return None
        first_s = statistics.quantiles(self._services_s, n=10, method="inclusive")[-1]
        return [first_s * 2**n for n in range(self._queues - 1)]
