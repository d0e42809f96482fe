"""Session affinity with a load guard: SAGA §5.1, eq. 7."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, SessionId
from weft.core.registry import check_number
from weft.core.routing.balancer import Arrival, AssigningBalancer, EngineLoad
from weft.core.routing.registry import register

_LOAD_RATIO: Final = 2.0


@dataclass(frozen=True, slots=True)
class AffinityParameters:
    """The parameter of session affinity.

    Args:
        load_ratio: the most calls in flight on a session's engine, as a multiple of those on the least loaded engine.

    Raises:
        BalancerError: the ratio is below 1, infinite or not a number.
    """

    load_ratio: float = _LOAD_RATIO

    def __post_init__(self) -> None:
        if not 1 <= check_number(self.load_ratio, "load_ratio", BalancerError) < math.inf:
            raise BalancerError(f"load_ratio must be a finite number, 1 or more, not {self.load_ratio}.")


@register("affinity", "SAGA: the session's engine, unless it is overloaded", AffinityParameters)
class Affinity(AssigningBalancer[SessionId]):
    """Sends a call to the engine that has its session's cache, unless that engine is overloaded (eq. 7).

    A call whose engine is overloaded goes to the least loaded engine, and its session is assigned to that engine from
    then on (§5.2, step 4).

    The available text of the paper lacks the formula of eq. 7. The definition of an overloaded engine is taken from
    Table 9: its load is more than `load_ratio` times the load of the least loaded engine, default 2.0. An idle engine
    counts as having one call, because no load is below a multiple of 0.

    Args:
        load_ratio: the most calls in flight on a session's engine, as a multiple of those on the least loaded engine.
    """

    def __init__(self, load_ratio: float = _LOAD_RATIO) -> None:
        super().__init__()
        self._load_ratio = load_ratio

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        assigned = self._assigned.get(arrival.session_id)
        calls = next((load.calls for load in loads if load.engine_id == assigned), None)
        least = min(load.calls for load in loads)
        if assigned is not None and calls is not None and calls <= self._load_ratio * max(1, least):
            return assigned
        chosen = self.least_used(loads)
        self._assigned[arrival.session_id] = chosen
        return chosen

    def end_session(self, session_id: SessionId) -> None:
        self._assigned.pop(session_id, None)
