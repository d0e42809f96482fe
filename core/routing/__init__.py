"""Routing: which replica takes a call, which replicas there are, and how many calls are admitted.

To add a balancer, write its module with `@register(...)` and import its class here.
"""

from __future__ import annotations

from typing import Final

from weft.core.routing.adaptive_locality import AdaptiveLocality
from weft.core.routing.affinity import Affinity
from weft.core.routing.balancer import Arrival, AssigningBalancer, Balancer, EngineLoad
from weft.core.routing.config import DEFAULT_BALANCER, BalancerConfig
from weft.core.routing.least_used import LeastUsed
from weft.core.routing.locality import Locality
from weft.core.routing.registry import register, registration, registrations
from weft.core.routing.round_robin import RoundRobin
from weft.core.routing.stealing import StealingConfig

BALANCERS: Final = tuple(each.name for each in registrations())

__all__ = [
    "BALANCERS",
    "DEFAULT_BALANCER",
    "AdaptiveLocality",
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
    "registration",
    "registrations",
]
