"""Multilevel queues with quanta and anti-starvation: Autellix §4.2.2 and Algorithm 1, lines 9-31."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

from weft.core.errors import PolicyError
from weft.core.policies.base import Call, Policy, Rank


class MultilevelPolicy(Policy):
    """K queues over attained service; a subclass says what a call's attained service is on arrival.

    Queue Q_i holds priorities in the half-open range [lo, hi) between two neighbouring bounds, Q_1 from 0, Q_K up to
    infinity. A call that has run for its queue's quantum moves to the tail of the next queue. A quantum is as long as
    its queue's range is wide, so a call leaves a queue about when its program's service leaves the range.

    Args:
        bounds_s: the K-1 inner bounds, increasing, in seconds of service. Empty: one queue, first come, first served.
        beta: promote a waiting call to Q_1 once (program wait + call wait) >= beta * (program service + call service).
            None: never.

    Raises:
        PolicyError: bounds that are not positive and increasing, or beta <= 0.
    """

    def __init__(self, bounds_s: Sequence[float] = (), beta: float | None = None) -> None:
        super().__init__()
        edges = (0.0, *bounds_s)
        if not all(math.isfinite(bound) for bound in edges) or any(a >= b for a, b in itertools.pairwise(edges)):
            raise PolicyError(f"queue bounds must be positive, finite and increasing seconds, not {list(bounds_s)}.")
        if beta is not None and not beta > 0:
            raise PolicyError(f"beta must be > 0, or None to never promote, not {beta}.")
        self.bounds_s = tuple(bounds_s)
        self.quanta_s = (*(hi - lo for lo, hi in itertools.pairwise(edges)), math.inf)
        self.beta = beta
        self._order = itertools.count()

    @abstractmethod
    def attained_service_s(self, call: Call) -> float:
        """The service that ranks an arriving call: `c.service`, line 11."""

    def level_of(self, service_s: float) -> int:
        """Index of the queue whose range [lo, hi) holds `service_s` (line 12)."""
        return bisect_right(self.bounds_s, service_s)

    def arrive(self, call: Call, now_s: float) -> None:
        call.service_s = self.attained_service_s(call)
        self._enter(call, self.level_of(call.service_s))
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float) -> None:
        del now_s
        call.model_time_s += model_time_s
        call.quantum_s -= model_time_s
        if call.quantum_s > 0:
            return
        waiting = call in self.waiting  # its last step came back after it was preempted
        self.waiting.discard(call)
        self._enter(call, call.rank.level + 1)
        if waiting:
            self.waiting.push(call)

    def promote(self, now_s: float) -> list[Call]:
        if self.beta is None:
            return []
        # Every waiting call is asked anew, as in the algorithm: a sibling that leaves changes the program's ratio.
        starved = [call for call in self.waiting.unordered() if call.rank.level > 0 and self._starves(call, now_s)]
        starved.sort(key=lambda call: call.rank)
        for call in starved:
            self.waiting.discard(call)
            self._enter(call, 0)
            call.wait_s, call.model_time_s, call.waiting_since_s = 0.0, 0.0, now_s  # line 29
            self.waiting.push(call)
        return starved

    def _enter(self, call: Call, level: int) -> None:
        """Append to a queue, with that queue's quantum (lines 13, 21, 22, 27)."""
        level = min(level, len(self.bounds_s))
        call.rank = Rank(level, next(self._order))
        call.quantum_s = self.quanta_s[level]

    def _starves(self, call: Call, now_s: float) -> bool:
        """Whether W_total / T_total has reached beta (lines 24-26)."""
        waited_s = call.program.wait_s + call.wait_s + now_s - call.waiting_since_s
        served_s = self.attained_service_s(call) + call.model_time_s
        return self.beta is not None and waited_s >= self.beta * served_s
