"""Queue bounds found from the calls that have been served."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

_WINDOW_CALLS: Final = 512
_EVERY_CALLS: Final = 32


class BoundsCalibration:
    """Says where the bounds should be, from the latest calls.

    The first bound is the 90th percentile of a call's service, and each further bound is twice as far. A narrower first
    queue would demote calls while they run, so that they preempt each other for nothing; a much wider one would hold
    all of a short program and most of a long one, and tell them apart too late. Only calls are counted, never the
    clock, so the same calls give the same bounds.

    Args:
        queues: K, how many queues the bounds part.
    """

    def __init__(self, queues: int) -> None:
        self._queues = queues
        self._services_s: deque[float] = deque(maxlen=_WINDOW_CALLS)
        self._calls = 0

    def observe(self, service_s: float) -> Sequence[float] | None:
        """A call has left after `service_s` seconds of service.

        Returns:
            New bounds in seconds, with every 32nd call; else None.
        """
        if service_s <= 0:  # it was aborted before it ran
            return None
        self._services_s.append(service_s)
        self._calls += 1
        if self._calls % _EVERY_CALLS:
            return None
        first_s = statistics.quantiles(self._services_s, n=10, method="inclusive")[-1]
        return [first_s * 2**n for n in range(self._queues - 1)]
