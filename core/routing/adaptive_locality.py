"""Adaptive locality, the default balancer: Autellix's data locality with a threshold that follows the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId
from weft.core.registry import check_number
from weft.core.routing.balancer import Arrival, AssigningBalancer, EngineLoad
from weft.core.routing.registry import register

_IDLE_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class AdaptiveLocalityParameters:
    """The parameter of adaptive locality.

    Args:
        idle_tokens: the prompt tokens that are worth computing again on an idle engine to be ahead of one call. The
            default was chosen in simulation, on other seeds than those of the results; 512 differs little.

    Raises:
        BalancerError: the number is negative, infinite or not a number.
    """

    idle_tokens: float = _IDLE_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= check_number(self.idle_tokens, "idle_tokens", BalancerError) < math.inf:
            raise BalancerError(f"idle_tokens must be a finite number, 0 or more, not {self.idle_tokens}.")


@register("adaptive_locality", "the program's engine, unless it is too busy for the prompt", AdaptiveLocalityParameters)
class AdaptiveLocality(AssigningBalancer[ProgramId]):
    """Algorithm 2 of Autellix with a threshold that follows the load.

    Algorithm 2 sends every short prompt to the least used engine. That pays if waiting costs more than computing the
    prompt again, and a fixed threshold sees neither cost. Here it is ::

        idle_tokens * (calls of the program's engine - calls of the least used one) / (1 + calls of the least used one)

    The difference stands for the calls that this call would wait for. The divisor stands for the calls that would wait
    while its prompt is computed again: none on an idle engine, and many on a busy one. At equal load the threshold is
    0, and programs stay. A program whose call goes to the least used engine is assigned to that engine, which then has
    its whole prompt.

    Args:
        idle_tokens: the prompt tokens that are worth computing again on an idle engine to be ahead of one call.
    """

    def __init__(self, idle_tokens: float = _IDLE_TOKENS) -> None:
        super().__init__()
        self._idle_tokens = idle_tokens

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        least = self.least_used(loads)
        calls = {load.engine_id: load.calls for load in loads}
        assigned = self._assigned.get(arrival.program_id)
        if assigned is not None and assigned not in calls:  # the engine is full: only this call goes elsewhere
            return least
        if assigned is not None:
            threshold_tokens = self._idle_tokens * (calls[assigned] - calls[least]) / (1 + calls[least])
            if arrival.prompt_tokens > threshold_tokens:
                return assigned
        self._assigned[arrival.program_id] = least
        return least

    def end_program(self, program_id: ProgramId) -> None:
        self._assigned.pop(program_id, None)
