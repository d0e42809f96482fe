"""The registry of balancers: names for users, parameters for validation, summaries for help texts and docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.core.errors import BalancerError
from weft.core.routing.balancer import Balancer
from weft.core.routing.parameters import NoParameters

B = TypeVar("B", bound=Balancer)


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered balancer.

    Attributes:
        name: the name that users write.
        summary: one line for help texts and docs.
        balancer: the class.
        parameters: a frozen dataclass that validates itself.
    """

    name: str
    summary: str
    balancer: type[Balancer]
    parameters: type[Any]


_registrations: dict[str, Registration] = {}


def register(name: str, summary: str, parameters: type[Any] = NoParameters) -> Callable[[type[B]], type[B]]:
    """Register a balancer class under a name; used as a decorator.

    The module must be imported in `weft.core.routing`. Nothing else names the balancer: the CLI's choices, the
    benchmarks and the validation of `BalancerConfig` read the registry.

    Args:
        name: the name that users write.
        summary: one line for help texts and docs.
        parameters: a frozen dataclass whose fields all have defaults and which raises `BalancerError` for values that
            the balancer cannot use.

    Raises:
        ValueError: the name is taken.
    """

    def add(balancer: type[B]) -> type[B]:
        if name in _registrations:
            raise ValueError(f"a balancer named {name!r} is registered already")
        balancer.name = name
        _registrations[name] = Registration(name, summary, balancer, parameters)
        return balancer

    return add


def registration(name: str) -> Registration:
    """Return the registration of a name.

    Raises:
        BalancerError: no balancer has this name. The message lists the names.
    """
    found = _registrations.get(name)
    if found is None:
        known = ", ".join(each.name for each in registrations())
        raise BalancerError(f"unknown balancer {name!r}; choose one of {known}.")
    return found


def registrations() -> list[Registration]:
    """Return all registrations, sorted by name."""
    return [_registrations[name] for name in sorted(_registrations)]
