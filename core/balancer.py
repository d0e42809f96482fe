"""The public path of `weft.core.routing.balancer`."""

from __future__ import annotations

from weft.core.routing.balancer import (
    BALANCERS,
    Affinity,
    Arrival,
    Balancer,
    BalancerConfig,
    EngineLoad,
    LeastUsed,
    Locality,
    RoundRobin,
)

__all__ = [
    "BALANCERS",
    "Affinity",
    "Arrival",
    "Balancer",
    "BalancerConfig",
    "EngineLoad",
    "LeastUsed",
    "Locality",
    "RoundRobin",
]
