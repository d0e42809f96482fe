"""Multi-level queues by attained service: MLFQ by call, PLAS and ATLAS by program (Autellix §4.2)."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from weft.core.errors import PolicyError
from weft.core.policies.policy import Policy, PolicyEvent, register
from weft.core.policies.queues import DEFAULT_BOUNDS_S, BoundsCalibration
from weft.core.policies.view import Call, ProgramChanged, ProgramView, Rank
from weft.core.registries import check_number

DEFAULT_BETA: Final = 8.0


@dataclass(frozen=True, slots=True)
class MultilevelParameters:
    """The parameters of PLAS, ATLAS and MLFQ.

    Args:
        bounds_s: The inner bounds of the queues, increasing, in seconds of service. "auto": start with
            `DEFAULT_BOUNDS_S` and learn from the calls that are served.
        beta: Promote a waiting call to Q_1 at this ratio of wait to service. None: never.
        quanta_s: Run time in each queue, in seconds. None: the width of the queue's range.

    Raises:
        PolicyError: The bounds are not positive and increasing, there is not one positive quantum for each queue, or
            beta is not positive.
    """

    bounds_s: tuple[float, ...] | Literal["auto"] = "auto"
    beta: float | None = DEFAULT_BETA
    quanta_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bounds_s, str) and self.bounds_s != "auto":
            raise PolicyError(f'bounds_s must be increasing seconds, or "auto", not {self.bounds_s!r}.')
        check_parameters(self.first_bounds_s, self.beta, self.quanta_s)

    @property
    def first_bounds_s(self) -> tuple[float, ...]:
        """The bounds to start with, in seconds."""
        return DEFAULT_BOUNDS_S if isinstance(self.bounds_s, str) else self.bounds_s


def check_parameters(bounds_s: object, beta: object, quanta_s: object) -> None:
    """Raise PolicyError for bounds, quanta and a beta that make no sense."""
    edges = (0.0, *_seconds(bounds_s, "bounds_s"))
    if not all(math.isfinite(bound) for bound in edges) or any(a >= b for a, b in itertools.pairwise(edges)):
        raise PolicyError(f"queue bounds must be positive, finite and increasing seconds, not {list(edges[1:])}.")
    if quanta_s is not None:
        quanta = _seconds(quanta_s, "quanta_s")
        if len(quanta) != len(edges) or not all(quantum > 0 for quantum in quanta):
            raise PolicyError(
                f"quanta must be {len(edges)} positive numbers of seconds, one for each queue, not {list(quanta)}."
            )
    if beta is not None and not check_number(beta, "beta", PolicyError) > 0:
        raise PolicyError(f"beta must be > 0, or None to never promote, not {beta}.")


def _seconds(values: object, what: str) -> list[float]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PolicyError(f"{what} must be a list of seconds, not {values!r:.60}.")
    return [check_number(value, f"each of {what}", PolicyError) for value in values]


class MultilevelPolicy(Policy):
    """K queues over attained service. A subclass defines the attained service of an arriving call.

    Queue Q_i holds the half-open range [lo, hi) between two neighbouring bounds, Q_1 from 0, Q_K up to infinity. A call
    that has run for its queue's quantum moves to the tail of the next queue, and from the last queue to its own tail.

    Args:
        bounds_s: The K-1 inner bounds, increasing, in seconds of service. Empty: one queue, first come, first served.
        beta: Promote a waiting call to Q_1 once (program wait + call wait) >= beta * (program service + call service).
            None: never.
        quanta_s: Run time in each of the K queues. None: the width of the queue's range, unlimited in the last queue,
            so that a call leaves a queue about when its program's service leaves the range.
        calibrate: Learn the bounds from the calls that are served. `bounds_s` are then the first bounds and fix K.

    Raises:
        PolicyError: See `MultilevelParameters`.
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
        check_parameters(bounds_s, beta, quanta_s)
        self.bounds_s = tuple(bounds_s)
        self.levels = len(self.bounds_s) + 1
        self.quanta_s = _widths(bounds_s) if quanta_s is None else tuple(quanta_s)
        self.beta = beta
        self._quanta_follow_bounds = quanta_s is None
        self._calibration = BoundsCalibration(len(bounds_s) + 1) if calibrate and bounds_s else None
        self._order = itertools.count()
        self._starvation = Starvation(beta)

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        calibrate = parameters.bounds_s == "auto"
        return cls(parameters.first_bounds_s, parameters.beta, parameters.quanta_s, calibrate=calibrate)

    def attained_service_s(self, call: Call) -> float:
        """The service that ranks an arriving call: `c.service`, line 11. By default 0: its program does not count."""
        return 0.0

    def attained_wait_s(self, call: Call) -> float:
        """The program's part of W_total: `pt[c.pid].wait`, line 24. It is of the same calls as `attained_service_s`."""
        return call.program.attained.wait_s

    def level_of(self, service_s: float) -> int:
        """Index of the queue whose range [lo, hi) holds `service_s` (line 12)."""
        return bisect_right(self.bounds_s, service_s)

    def rank(self, call: Call, now_s: float) -> Rank:
        call.service_s = self.attained_service_s(call)
        return self._enter(call, self.level_of(call.service_s))

    def wait(self, call: Call, now_s: float) -> None:
        super().wait(call, now_s)
        self._watch(call)

    def start(self, call: Call, now_s: float) -> None:
        super().start(call, now_s)
        self._starvation.discard(call)

    def stall(self, call: Call, now_s: float) -> None:
        super().stall(call, now_s)
        self._watch(call)

    def go_on(self, call: Call, now_s: float) -> None:
        super().go_on(call, now_s)
        self._starvation.discard(call)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self._starvation.discard(call)
        if self._calibration is not None:
            self._set_bounds(self._calibration.observe(call.served_s))

    def _set_bounds(self, bounds_s: Sequence[float] | None) -> None:
        """Use new bounds for calls that arrive from now on. Other calls keep queue and quantum until they move."""
        if bounds_s is None:
            return
        self.bounds_s = tuple(bounds_s)
        if self._quanta_follow_bounds:
            self.quanta_s = _widths(bounds_s)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        call.model_time_s += model_time_s
        call.served_s += model_time_s
        if not recomputed:
            call.quantum_s -= model_time_s
        if call.quantum_s <= 0:
            call.rank = self._enter(call, call.rank.level + 1)
        if not math.isnan(call.waiting_since_s):  # it waits: the step is reported after a preemption or a stall
            self.waiting.update(call)
            self._watch(call)

    def on_event(self, event: PolicyEvent) -> None:
        if isinstance(event, ProgramChanged):
            for call in self._starvation.calls_of(event.program):
                self._watch(call)

    def promote(self, now_s: float) -> list[Call]:
        starved = self._starvation.pop_starved(now_s)
        starved.sort(key=lambda call: call.rank)
        for call in starved:
            call.rank = self._enter(call, 0)
            call.wait_s, call.model_time_s, call.waiting_since_s = 0.0, 0.0, now_s  # line 29
            self.waiting.update(call)
        return starved

    def next_change_s(self) -> float:
        return self._starvation.next_s()

    def _enter(self, call: Call, level: int) -> Rank:
        """Append a call to a queue and give it that queue's quantum (lines 13, 21, 22, 27). Returns its rank there."""
        level = min(level, len(self.bounds_s))
        call.quantum_s = self.quanta_s[level]
        return Rank(level, next(self._order))

    def _watch(self, call: Call) -> None:
        """Set the timer of a call that waits or has stalled. A call in Q_1 has none, because it cannot be promoted."""
        if call.rank.level == 0:
            self._starvation.discard(call)
            return
        self._starvation.watch(
            call,
            waited_s=self.attained_wait_s(call) + call.wait_s,
            served_s=self.attained_service_s(call) + call.model_time_s,
        )


def _widths(bounds_s: Sequence[float]) -> tuple[float, ...]:
    return (*(hi - lo for lo, hi in itertools.pairwise((0.0, *bounds_s))), math.inf)


@register("mlfq", "a multi-level feedback queue over single calls, without programs", MultilevelParameters)
class Mlfq(MultilevelPolicy):
    """Every new call starts in Q_1. Only its own wait and run time count for anti-starvation."""

    def attained_wait_s(self, call: Call) -> float:
        return 0.0


@register("plas", "least attained service first, summed over all calls of a program", MultilevelParameters)
class Plas(MultilevelPolicy):
    """Ranks a call by the total run time of its program's earlier calls."""

    def attained_service_s(self, call: Call) -> float:
        return call.program.attained.total_service_s

    def attained_wait_s(self, call: Call) -> float:
        return call.program.attained.total_wait_s


@register("atlas", "least attained service first, along a program's critical path", MultilevelParameters)
class Atlas(MultilevelPolicy):
    """Ranks a call by the longest critical path that its program has shown so far.

    Parallel calls of a program inherit the same scalar and therefore rank equally. Unlike under PLAS, a wide program is
    not penalised for its width.
    """

    def attained_service_s(self, call: Call) -> float:
        return call.program.attained.service_s


@register("atlas_by_program", "ATLAS, each queue in the order of programs", MultilevelParameters, simulation_only=True)
class AtlasByProgram(Atlas):
    """ATLAS whose queues are first come, first served by program and not by call.

    This is not Algorithm 1. It shows how much of another policy's gain over ATLAS comes from this order alone.
    """

    def _enter(self, call: Call, level: int) -> Rank:
        entered = super()._enter(call, level)
        return Rank(entered.level, call.program.arrival_order, int(entered.order))


@dataclass(frozen=True, slots=True)
class RoundRobinParameters:
    """The parameter of round robin.

    Args:
        quanta_s: The quantum of the one queue, in seconds of run time.

    Raises:
        PolicyError: There is not exactly one quantum, or it is not positive.
    """

    quanta_s: tuple[float, ...] = (DEFAULT_BOUNDS_S[0],)

    def __post_init__(self) -> None:
        check_parameters((), None, self.quanta_s)
        if self.quanta_s is None:
            raise PolicyError("round robin needs a quantum, such as quanta_s=(2.0,).")


@register("rr", "round robin: calls take turns, a quantum each", RoundRobinParameters)
class RoundRobin(MultilevelPolicy):
    """One queue. A call that has run for the quantum goes to its tail.

    Args:
        quantum_s: The quantum, in seconds of run time.
    """

    def __init__(self, quantum_s: float) -> None:
        super().__init__(bounds_s=(), beta=None, quanta_s=(quantum_s,))

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        return cls(*parameters.quanta_s)


# -- anti-starvation: when each waiting call will have waited too long (Autellix, Algorithm 1, lines 24-30)


class Starvation:
    """Finds the calls that have starved. O(log n) for each change; waiting calls are never scanned.

    A call has starved once W_total >= beta * T_total (line 26), where W_total is the wait and T_total the service of
    its program and of the call itself. While a call waits, W_total grows with the clock and T_total stands still. The
    time at which the call will have starved is therefore known in advance, and a timer for each call is enough.

    Args:
        beta: The ratio. None: no call ever starves.
    """

    def __init__(self, beta: float | None) -> None:
        self.beta = beta
        self._due_s: dict[Call, float] = {}
        self._heap: list[tuple[float, int, Call]] = []  # an entry is valid while `_due_s` holds the same time
        self._by_program: dict[ProgramView, dict[Call, None]] = {}
        self._pushes = itertools.count()

    def watch(self, call: Call, waited_s: float, served_s: float) -> None:
        """Set the timer of a waiting call.

        Args:
            waited_s: W_total without the call's current wait.
            served_s: T_total.
        """
        if self.beta is not None:
            self._set(call, call.waiting_since_s + self.beta * served_s - waited_s)

    def discard(self, call: Call) -> None:
        """Remove the timer of a call, if the call has one."""
        if self._due_s.pop(call, None) is None:
            return
        siblings = self._by_program[call.program]
        del siblings[call]
        if not siblings:
            del self._by_program[call.program]
        if len(self._heap) > 2 * len(self._due_s) + 16:
            self._heap = [(due_s, next(self._pushes), other) for other, due_s in self._due_s.items()]
            heapq.heapify(self._heap)

    def calls_of(self, program: ProgramView) -> list[Call]:
        return list(self._by_program.get(program, ()))

    def next_s(self) -> float:
        """The time before which no call starves; inf if no call is watched."""
        return self._heap[0][0] if self._heap else math.inf

    def pop_starved(self, now_s: float) -> list[Call]:
        """Return the calls that have starved, and remove their timers."""
        starved = []
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, call = heapq.heappop(self._heap)
            if self._due_s.get(call) == due_s:
                starved.append(call)
                self.discard(call)
        return starved

    def _set(self, call: Call, due_s: float) -> None:
        self._due_s[call] = due_s
        self._by_program.setdefault(call.program, {})[call] = None
        heapq.heappush(self._heap, (due_s, next(self._pushes), call))
