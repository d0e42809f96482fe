"""The registry of policies.

A policy's module must be imported in `weft.core.policies`. Nothing else names the policy: the CLI's choices, the
simulator, `weft bench`, the docs' table and the validation of `PolicyConfig` read the registry.
"""

from __future__ import annotations

from typing import Final

from weft.core.errors import PolicyError
from weft.core.policies.policy import Policy
from weft.core.registries import Registry

REGISTRY: Final = Registry[Policy]("policy", PolicyError)

register = REGISTRY.register
registration = REGISTRY.registration
registrations = REGISTRY.registrations
