"""Data locality for programs: Algorithm 2 of Autellix (§4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId
from weft.core.registry import check_number
from weft.core.routing.balancer import Arrival, AssigningBalancer, EngineLoad
from weft.core.routing.registry import register

_THRESHOLD_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True)
class LocalityParameters:
    """The parameter of Algorithm 2.

    Args:
        threshold_tokens: the longest prompt that counts as short, in tokens (line 2).

    Raises:
        BalancerError: the threshold is negative or not a number.
    """

    threshold_tokens: int = _THRESHOLD_TOKENS

    def __post_init__(self) -> None:
        if not check_number(self.threshold_tokens, "threshold_tokens", BalancerError) >= 0:
            raise BalancerError(f"threshold_tokens must be 0 or more, not {self.threshold_tokens}.")


@register("locality", "Autellix: short prompts to the least used engine, others to their program's", LocalityParameters)
class Locality(AssigningBalancer[ProgramId]):
    """Sends short calls to the least used engine and long calls to the engine of their program.

    A short prompt is mostly a system prompt, which every engine has cached. A long prompt shares most of its prefix
    with its own program only.

    Args:
        threshold_tokens: the longest prompt that counts as short, in tokens (line 2).
    """

    def __init__(self, threshold_tokens: int = _THRESHOLD_TOKENS) -> None:
        super().__init__()
        self._threshold_tokens = threshold_tokens

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        if arrival.prompt_tokens <= self._threshold_tokens:  # line 2
            return self.least_used(loads)  # line 3
        engine_id = self._assigned.get(arrival.program_id)
        if engine_id is None:
            engine_id = self._assigned[arrival.program_id] = self.least_used(loads)  # lines 9-10
        if all(load.engine_id != engine_id for load in loads):  # the engine is full: only this call goes elsewhere
            return self.least_used(loads)
        return engine_id  # line 6

    def end_program(self, program_id: ProgramId) -> None:
        self._assigned.pop(program_id, None)
