"""The registry of balancers.

A balancer's module must be imported in `weft.core.routing`. Nothing else names the balancer: the CLI's choices, the
benchmarks, the docs' table and the validation of `BalancerConfig` read the registry.
"""

from __future__ import annotations

from typing import Final

from weft.core.errors import BalancerError
from weft.core.registry import Registry
from weft.core.routing.balancer import Balancer

REGISTRY: Final = Registry[Balancer]("balancer", BalancerError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations
