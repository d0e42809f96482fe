"""The registry of KV policies, and `KvPolicyConfig`: one of them by name, with its parameters.

A KV policy's module must be imported in `weft.core.kv_cache.policies`. Nothing else names the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from weft.core.errors import KvPolicyError
from weft.core.kv_cache.policies.decisions import KvPolicy
from weft.core.registries import Registry, check_number

REGISTRY: Final = Registry[KvPolicy]("KV policy", KvPolicyError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations


def check_range(what: str, value: object, low: float, high: float) -> float:
    """Return a parameter's value if it is in range.

    Raises:
        KvPolicyError: It is not a number from `low` to `high`.
    """
    number = check_number(value, what, KvPolicyError)
    if not low <= number <= high:
        raise KvPolicyError(f"{what} must be from {low:g} to {high:g}, not {value!r}.")
    return number


@dataclass(frozen=True, slots=True, init=False)
class KvPolicyConfig:
    """A KV policy by name, with parameters: `KvPolicyConfig("ttl", quantile=0.9)`.

    Args:
        name: One of `weft.core.kv_cache.policies.KV_POLICIES`.
        **parameters: The policy's own parameters.

    Raises:
        KvPolicyError: The name is unknown, the policy does not have a parameter, or it refuses a value.
    """

    name: str
    parameters: Any  # the policy's own frozen dataclass

    def __init__(self, name: str = "ended-first", **parameters: Any) -> None:
        object.__setattr__(self, "parameters", REGISTRY.parameters(name, parameters))
        object.__setattr__(self, "name", name)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON scalars."""
        own = {each.name: getattr(self.parameters, each.name) for each in fields(self.parameters)}
        return {"name": self.name, **own}

    @property
    def follows_use(self) -> bool:
        """Whether the policy predicts nothing: see `KvPolicy.follows_use`."""
        return registration(self.name).kind.follows_use

    def make(self) -> KvPolicy:
        """Make a policy that has seen nothing yet."""
        return registration(self.name).kind.from_parameters(self.parameters)


def as_kv_config(given: object) -> KvPolicyConfig | None:
    """Check the KV policy of an engine or of its scheduler's settings: a name, a configuration, or its `to_dict`.

    Returns:
        The configuration; None for None.

    Raises:
        KvPolicyError: It is something else, or `KvPolicyConfig` refuses it.
    """
    if given is None or isinstance(given, KvPolicyConfig):
        return given
    if isinstance(given, str):
        return KvPolicyConfig(given)
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return KvPolicyConfig(**{str(key): value for key, value in given.items()})
    raise KvPolicyError(f'a KV policy is a name, such as "next-use", or a KvPolicyConfig, not {given!r:.80}.')
