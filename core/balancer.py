"""The public path of the balancers in `weft.core.routing`."""

from __future__ import annotations

from weft.core.routing import (
    BALANCERS,
    Affinity,
    Arrival,
    AssigningBalancer,
    Balancer,
    BalancerConfig,
    EngineLoad,
    LeastUsed,
    Locality,
    RoundRobin,
    StealingConfig,
    register,
)

__all__ = [
    "BALANCERS",
    "Affinity",
    "Arrival",
    "AssigningBalancer",
    "Balancer",
    "BalancerConfig",
    "EngineLoad",
    "LeastUsed",
    "Locality",
    "RoundRobin",
    "StealingConfig",
    "register",
]
