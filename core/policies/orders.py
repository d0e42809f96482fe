"""Policies that are one order of calls, without queues: the plain rivals, and for simulation only those that know the
future, as bounds for what a policy could reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Self

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
class Priority(Fcfs):
    """What a user of stock vLLM can do for programs by giving each call a priority.

    A program's calls go before those of programs that arrived later at this engine. Calls of one program are first
    come, first served.
    Like vLLM's `--scheduling-policy priority`, the policy orders only the waiting calls. Calls are preempted only when
    KV blocks run out, those of the latest program first.
    """

    ranks_follow_time = False

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, call.program.arrival_order, next(self._order))


@register("sjf", "shortest call first, which knows the output lengths", simulation_only=True)
class Sjf(Fcfs):
    """Runs the calls with the least work first, whatever work their programs have left. It does not preempt."""

    ranks_follow_prompts = True

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, call.predicted_own_tokens, next(self._order))


def remaining_work(call: Call) -> float:
    """The remaining work of a call's program in output tokens, less a part of a token for the call itself.

    The part is larger if a longer chain of calls follows the call. Among the calls of a program that call then goes
    first, so that the program ends sooner.
    """
    path = call.predicted_path_tokens
    return call.program.predicted_tokens - path / (1 + path)


@register("srpt", "shortest remaining processing time, which knows the future", simulation_only=True)
class Srpt(Policy):
    """Runs the calls with the least work left first, as if the future were known.

    `remaining` is the work that a call's program, or the call, has left, in output tokens.
    """

    ranks_follow_steps = True

    def __init__(self, remaining: Callable[[Call], float] = remaining_work) -> None:
        super().__init__()
        self._remaining = remaining

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        return cls()

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, self._remaining(call))

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        call.rank = self.rank(call, now_s)
        self.waiting.update(call)
