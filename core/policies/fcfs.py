"""First come, first served: stock vLLM's order, as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.policies.base import Call
from weft.core.policies.multilevel import MultilevelPolicy


class Fcfs(MultilevelPolicy):
    """One queue, no quantum, no promotion: never preempts."""

    name = "fcfs"

    def __init__(self) -> None:
        super().__init__(bounds_s=(), beta=None)

    def attained_service_s(self, call: Call) -> float:
        del call
        return 0.0

    def victims(self, running: Sequence[Call], free_slots: int, **_room: Any) -> list[Call]:
        """None: a running call stays, even when an earlier one becomes ready only now."""
        del running, free_slots
        return []
