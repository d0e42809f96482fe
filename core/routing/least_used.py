"""The engine with the fewest calls in flight, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival, Balancer, EngineLoad
from weft.core.routing.registry import register


@register("least_used", "the engine with the fewest calls in flight, those in its queue included")
class LeastUsed(Balancer):
    """Chooses the engine with the fewest calls in flight."""

    def decide(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> EngineId:
        del arrival
        return self.least_used(loads)
