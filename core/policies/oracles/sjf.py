"""Shortest job first, by call: Astraea's baseline vLLM-SJF, for simulation only."""

from __future__ import annotations

import itertools

from weft.core.policies.base import Policy
from weft.core.policies.registry import register
from weft.core.policies.view import Call, Rank


@register("sjf", "shortest call first, which knows the output lengths", simulation_only=True)
class Sjf(Policy):
    """Runs the calls with the least work first, whatever work their programs have left. It does not preempt."""

    preempts = False

    def __init__(self) -> None:
        super().__init__()
        self._arrivals = itertools.count()

    def arrive(self, call: Call, now_s: float) -> None:
        call.rank = Rank(0, call.predicted_own_tokens, next(self._arrivals))
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        del now_s, recomputed
        call.model_time_s += model_time_s
