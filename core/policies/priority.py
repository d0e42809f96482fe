"""First come, first served by program: stock vLLM's priority scheduling, with a program's arrival as its priority."""

from __future__ import annotations

import itertools

from weft.core.policies.base import Policy
from weft.core.policies.registry import register
from weft.core.policies.view import Call, Rank


@register("priority", "first come, first served by program: a program's calls go before those of later ones")
class Priority(Policy):
    """What a user of stock vLLM can do for programs by giving each call a priority.

    A program's calls go before those of programs that arrived later at this engine. Calls of one program are first
    come, first served.
    Like vLLM's `--scheduling-policy priority`, the policy orders only the waiting calls. Calls are preempted only when
    KV blocks run out, those of the latest program first.
    """

    ranks_follow_prompts = False
    ranks_follow_time = False
    preempts = False

    def __init__(self) -> None:
        super().__init__()
        self._order = itertools.count()

    def arrive(self, call: Call, now_s: float) -> None:
        call.rank = Rank(0, call.program.arrival_order, next(self._order))
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        """Nothing depends on it."""
