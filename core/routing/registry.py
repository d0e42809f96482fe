"""The registry of balancers.

A balancer's module must be imported in `weft.core.routing`. Nothing else names the balancer: the CLI's choices, the
benchmarks, the docs' table and the validation of `BalancerConfig` read the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from weft.core.errors import BalancerError
from weft.core.registries import Registry
from weft.core.routing.balancer import Balancer

REGISTRY: Final = Registry[Balancer]("balancer", BalancerError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations


DEFAULT_BALANCER: Final = "adaptive_locality"  # by measurement: docs/results/balancers.md


@dataclass(frozen=True, slots=True, init=False)
class BalancerConfig:
    """A balancer by name, with parameters: `BalancerConfig("locality", threshold_tokens=512)`.

    Args:
        name: one of `weft.core.routing.BALANCERS`.
        **parameters: the balancer's own parameters: e.g. `threshold_tokens` of `locality`.

    Raises:
        BalancerError: the name is unknown, the balancer does not have a parameter, or it refuses a value.
    """

    name: str
    parameters: Any  # the balancer's own frozen dataclass

    def __init__(self, name: str = DEFAULT_BALANCER, **parameters: Any) -> None:
        object.__setattr__(self, "parameters", REGISTRY.parameters(name, parameters))
        object.__setattr__(self, "name", name)

    def make(self) -> Balancer:
        """Make a balancer that has assigned nothing yet."""
        return REGISTRY.registration(self.name).kind.from_parameters(self.parameters)
