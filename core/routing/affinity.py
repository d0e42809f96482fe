"""Affinity with a load guard: SAGA §5.1, eq. 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import BalancerError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.registry import check_number
from weft.core.routing.balancer import Arrival, AssigningBalancer, EngineLoad
from weft.core.routing.registry import register

By = Literal["program", "session"]

_THRESHOLD: Final = 0.8  # SAGA's theta, "20 % headroom"


@dataclass(frozen=True, slots=True)
class AffinityParameters:
    """The parameters of affinity.

    Args:
        threshold: the load from which an engine counts as overloaded, as a share of its capacity. Both are calls: those
            in flight, and the most that the engine runs at once.
        by: what stays on an engine: a "session" as in the paper, or a "program", of which a session may have several.

    Raises:
        BalancerError: the threshold is 0 or less or not a number, or `by` is neither.
    """

    threshold: float = _THRESHOLD
    by: By = "session"

    def __post_init__(self) -> None:
        if not check_number(self.threshold, "threshold", BalancerError) > 0:
            raise BalancerError(f"threshold must be above 0, a share of an engine's capacity, not {self.threshold}.")
        if self.by not in ("program", "session"):
            raise BalancerError(f'by must be "program" or "session", not {self.by!r:.60}.')


@register("affinity", "SAGA: the session's engine, unless it is overloaded", AffinityParameters)
class Affinity(AssigningBalancer[ProgramId | SessionId]):
    """Sends a call to the engine that has its session's cache, unless that engine is overloaded (eq. 7).

    A call whose engine is overloaded goes to the least loaded engine. Its session is assigned to that engine from then
    on, because that engine has computed the whole prompt.

    The paper defines neither load nor capacity, and does not say whether a session whose call went elsewhere returns.
    Here load is the number of calls in flight, and capacity the number of calls that an engine runs at once, because a
    balancer knows both without asking. An engine that is short of KV with fewer calls does not count as overloaded.

    Args:
        threshold: the load from which an engine counts as overloaded, as a share of its capacity.
        by: what stays on an engine, a "session" or a "program".
    """

    def __init__(self, threshold: float = _THRESHOLD, by: By = "session") -> None:
        super().__init__()
        self._threshold = threshold
        self._by = by

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        key = arrival.program_id if self._by == "program" else arrival.session_id
        assigned = self._assigned.get(key)
        own = next((load for load in loads if load.engine_id == assigned), None)
        if own is not None and own.calls < self._threshold * own.capacity:
            return own.engine_id
        chosen = self._assigned[key] = self.least_used(loads)
        return chosen

    def end_program(self, program_id: ProgramId) -> None:
        if self._by == "program":
            self._assigned.pop(program_id, None)

    def end_session(self, session_id: SessionId) -> None:
        if self._by == "session":
            self._assigned.pop(session_id, None)
