"""Shortest remaining processing time: the clairvoyant bound, for simulation only."""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.core.policies.base import Call, Policy, Rank


class Srpt(Policy):
    """Runs the calls with the least work left first, as if the future were known.

    Args:
        remaining_s: the work left in seconds, of the call's program or of the call, as the simulation likes.
    """

    name = "srpt"

    def __init__(self, remaining_s: Callable[[Call], float]) -> None:
        super().__init__()
        self._remaining_s = remaining_s

    def arrive(self, call: Call, now_s: float) -> None:
        call.rank = Rank(0, self._remaining_s(call))
        call.quantum_s = math.inf
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        del now_s, recomputed
        waiting = call in self.waiting
        self.waiting.discard(call)
        call.model_time_s += model_time_s
        call.rank = Rank(0, self._remaining_s(call))
        if waiting:
            self.waiting.push(call)

    def promote(self, now_s: float) -> list[Call]:
        del now_s
        return []
