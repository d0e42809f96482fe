"""First come, first served: stock vLLM's order, as the baseline."""

from __future__ import annotations

from typing import Any, Self

from weft.core.policies.multilevel import MultilevelPolicy
from weft.core.policies.registry import register
from weft.core.policies.view import Call


@register("fcfs", "first come, first served: vLLM's own order")
class Fcfs(MultilevelPolicy):
    """One queue, no quantum, no promotion, no preemption."""

    ranks_follow_prompts = False
    preempts = False  # a running call stays, even when an earlier call becomes ready after it

    def __init__(self) -> None:
        super().__init__(bounds_s=(), beta=None)

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        del parameters
        return cls()

    def attained_service_s(self, call: Call) -> float:
        del call
        return 0.0
