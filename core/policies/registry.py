"""The registry of policies: names for users, parameters for validation, summaries for help texts and docs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.core.errors import PolicyError
from weft.core.policies.base import Policy
from weft.core.policies.parameters import NoParameters

P = TypeVar("P", bound=Policy)


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered policy.

    Attributes:
        name: What users write.
        summary: One line for help texts and docs.
        policy: The class.
        parameters: A frozen dataclass that validates itself.
        simulation_only: Whether the policy needs what only a simulator knows.
    """

    name: str
    summary: str
    policy: type[Policy]
    parameters: type[Any]
    simulation_only: bool


_registrations: dict[str, Registration] = {}


def register(
    name: str, summary: str, parameters: type[Any] = NoParameters, *, simulation_only: bool = False
) -> Callable[[type[P]], type[P]]:
    """Register a policy class under a name; used as a decorator.

    The module must be imported in `weft.core.policies`. Nothing else names the policy: the CLI's choices, the
    simulator, `weft bench`, the docs' table and the validation of `PolicyConfig` read the registry.

    Raises:
        ValueError: The name is taken.
    """

    def add(policy: type[P]) -> type[P]:
        if name in _registrations:
            raise ValueError(f"a policy named {name!r} is registered already")
        policy.name = name
        _registrations[name] = Registration(name, summary, policy, parameters, simulation_only)
        return policy

    return add


def registration(name: object) -> Registration:
    """The registration of a name.

    Raises:
        PolicyError: There is none. The message lists the names that an engine takes.
    """
    found = _registrations.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(each.name for each in registrations() if not each.simulation_only)
        raise PolicyError(f"unknown policy {name!r}; choose one of {known}.")
    return found


def registrations() -> list[Registration]:
    """All registrations by name."""
    return [_registrations[name] for name in sorted(_registrations)]
