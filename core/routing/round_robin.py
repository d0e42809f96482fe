"""Round robin over engines, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival, Balancer, EngineLoad
from weft.core.routing.registry import register


@register("round_robin", "one engine after another")
class RoundRobin(Balancer):
    """Chooses one engine after another, for any call and any load."""

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        del arrival
        return min(loads, key=self.last_choice).engine_id
