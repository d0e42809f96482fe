"""Anti-starvation: when each waiting call will have waited too long (Autellix, Algorithm 1, lines 24-30)."""

from __future__ import annotations

import heapq
import itertools
import math

from weft.core.policies.view import Call, ProgramView


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
