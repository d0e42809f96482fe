"""First come, first served: by call, and by program (the plain rival of every policy)."""

from __future__ import annotations

import itertools

from weft.core.policies.policy import Policy, register
from weft.core.policies.view import Call, Rank


@register("fcfs", "first come, first served: vLLM's own order")
class Fcfs(Policy):
    """One queue, no quantum, no promotion, no preemption."""

    ranks_follow_prompts = False
    preempts = False  # a running call stays, even when an earlier call becomes ready after it

    def __init__(self) -> None:
        super().__init__()
        self._order = itertools.count()

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, next(self._order))


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

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, call.program.arrival_order, next(self._order))
