"""Stock vLLM's priority scheduling, each call with its program's place as priority: a baseline, for simulation only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from weft.core.policies.base import Call, Policy, Rank


class Priority(Policy):
    """What a user of stock vLLM can do for programs without Weft: a program's calls go before those of programs that
    came later, and among themselves first come, first served.

    Like vLLM's (`--scheduling-policy priority`) it reorders the calls that wait, and preempts only when KV blocks run
    out, the call of the latest program first.

    Args:
        place: of a call's program among the programs, 0 is the earliest; the call's priority.
    """

    name = "priority"

    def __init__(self, place: Callable[[Call], int]) -> None:
        super().__init__()
        self._place = place
        self._order = itertools.count()

    def arrive(self, call: Call, now_s: float) -> None:
        call.rank = Rank(self._place(call), next(self._order))
        call.waiting_since_s = now_s
        self.waiting.push(call)

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        del now_s, recomputed
        call.model_time_s += model_time_s

    def promote(self, now_s: float) -> list[Call]:
        del now_s
        return []

    def victims(self, running: Sequence[Call], free_slots: int, **_room: Any) -> list[Call]:
        """None: vLLM lets a running call stay."""
        del running, free_slots
        return []
