"""Multilevel queues with quanta and anti-starvation: Autellix §4.2.2 and Algorithm 1, lines 9-31."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence

from weft.core.errors import PolicyError
from weft.core.policies.base import Call, Policy, Rank
from weft.core.policies.calibration import BoundsCalibration
from weft.core.process_table import Attained


class MultilevelPolicy(Policy):
    """K queues over attained service; a subclass says what a call's attained service is on arrival.

    Queue Q_i holds priorities in the half-open range [lo, hi) between two neighbouring bounds, Q_1 from 0, Q_K up to
    infinity. A call that has run for its queue's quantum moves to the tail of the next queue, from the last queue to
    its own tail.

    Args:
        bounds_s: the K-1 inner bounds, increasing, in seconds of service. Empty: one queue, first come, first served.
        quanta_s: run time in each of the K queues. None: as long as the queue's range is wide, without end in the last
            queue, so that a call leaves a queue about when its program's service leaves the range.
        calibrate: find the bounds anew from the calls that are served; `bounds_s` are where it starts, and how many.
        beta: promote a waiting call to Q_1 once (program wait + call wait) >= beta * (program service + call service).
            None: never.

    Raises:
        PolicyError: bounds that are not positive and increasing, quanta that are not one positive number for each
            queue, or beta <= 0.
    """

    def __init__(
        self,
        bounds_s: Sequence[float] = (),
        beta: float | None = None,
        quanta_s: Sequence[float] | None = None,
        *,
        calibrate: bool = False,
    ) -> None:
        super().__init__()
        edges = (0.0, *bounds_s)
        if not all(math.isfinite(bound) for bound in edges) or any(a >= b for a, b in itertools.pairwise(edges)):
            raise PolicyError(f"queue bounds must be positive, finite and increasing seconds, not {list(bounds_s)}.")
        self._own_quanta = quanta_s is None
        if quanta_s is None:
            quanta_s = _widths(bounds_s)
        if len(quanta_s) != len(edges) or not all(quantum > 0 for quantum in quanta_s):
            raise PolicyError(
                f"quanta must be {len(edges)} positive numbers of seconds, one for each queue, not {list(quanta_s)}."
            )
        if beta is not None and not beta > 0:
            raise PolicyError(f"beta must be > 0, or None to never promote, not {beta}.")
        self.bounds_s = tuple(bounds_s)
        self.quanta_s = tuple(quanta_s)
        self.beta = beta
        self._calibration = BoundsCalibration(len(edges)) if calibrate and bounds_s else None
        self._order = itertools.count()
        self._starving = _Deadlines()

    @abstractmethod
    def attained_service_s(self, call: Call) -> float:
        """The service that ranks an arriving call: `c.service`, line 11."""

    def attained_wait_s(self, call: Call) -> float:
        """The program's part of W_total: `pt[c.pid].wait`, line 24. Over the same calls as `attained_service_s`."""
        return call.program.wait_s

    def level_of(self, service_s: float) -> int:
        """Index of the queue whose range [lo, hi) holds `service_s` (line 12)."""
        return bisect_right(self.bounds_s, service_s)

    def has_level(self, level: int) -> bool:
        return 0 <= level <= len(self.bounds_s)

    def arrive(self, call: Call, now_s: float) -> None:
        call.service_s = self.attained_service_s(call)
        self._enter(call, self.level_of(call.service_s))
        call.waiting_since_s = now_s
        self._wait(call)

    def start(self, call: Call, now_s: float) -> None:
        super().start(call, now_s)
        self._starving.discard(call)

    def preempt(self, call: Call, now_s: float) -> None:
        call.waiting_since_s = now_s
        self._wait(call)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self._starving.discard(call)
        if self._calibration is not None:
            self._set_bounds(self._calibration.observe(call.served_s))

    def _set_bounds(self, bounds_s: Sequence[float] | None) -> None:
        """For calls that arrive from now on; those that are here keep their queue and its quantum until they move."""
        if bounds_s is None:
            return
        self.bounds_s = tuple(bounds_s)
        if self._own_quanta:
            self.quanta_s = _widths(bounds_s)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        del now_s
        call.model_time_s += model_time_s
        call.served_s += model_time_s
        if not recomputed:
            call.quantum_s -= model_time_s
        waiting = call in self.waiting  # its last step came back after it was preempted
        if call.quantum_s <= 0:
            self.waiting.discard(call)
            self._enter(call, call.rank.level + 1)
        if waiting:
            self._wait(call)

    def program_changed(self, program: Attained) -> None:
        for call in self._starving.of(program):
            self._watch(call)

    def promote(self, now_s: float) -> list[Call]:
        starved = self._starving.pop_due(now_s)
        if not starved:
            return starved
        starved.sort(key=lambda call: call.rank)
        for call in starved:
            self.waiting.discard(call)
            self._enter(call, 0)
            call.wait_s, call.model_time_s, call.waiting_since_s = 0.0, 0.0, now_s  # line 29
            self._wait(call)
        return starved

    def next_promotion_s(self) -> float:
        return self._starving.first_s()

    def _enter(self, call: Call, level: int) -> None:
        """Append to a queue, with that queue's quantum (lines 13, 21, 22, 27)."""
        level = min(level, len(self.bounds_s))
        call.rank = Rank(level, next(self._order))
        call.quantum_s = self.quanta_s[level]

    def _wait(self, call: Call) -> None:
        if call not in self.waiting:
            self.waiting.push(call)
        self._watch(call)

    def _watch(self, call: Call) -> None:
        """Note when W_total / T_total will reach beta (lines 24-26): while a call waits, its W grows with the clock and
        its T stands still, so the instant is known. In Q_1 there is nothing to promote to."""
        if self.beta is None or call.rank.level == 0:
            self._starving.discard(call)
            return
        waited_s = self.attained_wait_s(call) + call.wait_s
        served_s = self.attained_service_s(call) + call.model_time_s
        self._starving.set(call, call.waiting_since_s + self.beta * served_s - waited_s)


def _widths(bounds_s: Sequence[float]) -> tuple[float, ...]:
    return (*(hi - lo for lo, hi in itertools.pairwise((0.0, *bounds_s))), math.inf)


class _Deadlines:
    """When each watched call will have starved. O(log n) for each change; nothing is scanned."""

    def __init__(self) -> None:
        self._due_s: dict[Call, float] = {}
        self._heap: list[tuple[float, int, Call]] = []  # an entry counts while it is its call's current one
        self._by_program: dict[int, dict[Call, None]] = {}
        self._pushes = itertools.count()

    def set(self, call: Call, due_s: float) -> None:
        self._due_s[call] = due_s
        self._by_program.setdefault(id(call.program), {})[call] = None
        heapq.heappush(self._heap, (due_s, next(self._pushes), call))

    def discard(self, call: Call) -> None:
        if self._due_s.pop(call, None) is None:
            return
        siblings = self._by_program[id(call.program)]
        del siblings[call]
        if not siblings:
            del self._by_program[id(call.program)]
        if len(self._heap) > 2 * len(self._due_s) + 16:
            self._heap = [(due_s, next(self._pushes), other) for other, due_s in self._due_s.items()]
            heapq.heapify(self._heap)

    def of(self, program: Attained) -> list[Call]:
        return list(self._by_program.get(id(program), ()))

    def first_s(self) -> float:
        """No call is due before this; infinity if none is watched."""
        return self._heap[0][0] if self._heap else math.inf

    def pop_due(self, now_s: float) -> list[Call]:
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, call = heapq.heappop(self._heap)
            if self._due_s.get(call) == due_s:
                due.append(call)
                self.discard(call)
        return due
