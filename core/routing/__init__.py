"""Routing: which replica takes a call, which replicas there are, and how many calls are admitted.

To add a balancer, write its module with `@register(...)` and import its class here.
"""

from __future__ import annotations

from typing import Final

from weft.core.routing.balancer import Arrival, AssigningBalancer, Balancer, EngineLoad, Loads
from weft.core.routing.balancers import AdaptiveLocality, Affinity, LeastUsed, Locality, RoundRobinBalancer
from weft.core.routing.registry import DEFAULT_BALANCER, BalancerConfig, register, registration, registrations
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
    "Loads",
    "Locality",
    "RoundRobinBalancer",
    "StealingConfig",
    "register",
    "registration",
    "registrations",
]
