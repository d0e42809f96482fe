"""`PolicyConfig`: which policy an engine or a simulation uses, and the policy's own parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from weft.core.errors import PolicyError
from weft.core.policies.gate.gated import Gated
from weft.core.policies.policy import Policy, registration
from weft.core.registries import check_number

DEFAULT_POLICY = "auto"


@dataclass(frozen=True, slots=True, init=False)
class PolicyConfig:
    """A policy by name, with parameters: `PolicyConfig("atlas", beta=4)`.

    Args:
        name: One of `weft.core.policies.POLICIES`, in simulation also one of `SIMULATED_POLICIES`.
        *values, **parameters: The policy's own parameters (docs/reference/policies.md).
        decide_every: Engine steps from one promotion and preemption to the next (Autellix §4.2.2, multi-step
            scheduling).
        token_s: Count service in tokens instead of time: this many seconds for each token of prompt or output that is
            computed for the first time. The time of a step depends on what else is in the batch, and its tokens do not
            (Astraea §4.3). None: count time on the model executor.
        gate: Whether to open no more programs than the KV cache holds (docs/reference/policies.md). None: only under
            `auto`, and under `fair` with `auto` inside.

    Raises:
        PolicyError: The name is unknown, the policy does not have a parameter, or a value makes no sense.
    """

    name: str
    parameters: Any  # the policy's own frozen dataclass
    decide_every: int
    token_s: float | None
    gate: bool

    def __init__(
        self,
        name: str = DEFAULT_POLICY,
        *values: Any,
        decide_every: int = 1,
        token_s: float | None = None,
        gate: bool | None = None,
        **parameters: Any,
    ) -> None:
        registered = registration(name)
        kind = registered.parameters
        allowed = [each.name for each in fields(kind)]
        unknown = [key for key in parameters if key not in allowed]
        if unknown or len(values) > len(allowed):
            what = repr(unknown[0]) if unknown else f"number {len(values)}"
            has = f"it has {', '.join(allowed)}" if allowed else "it has none of its own"
            raise PolicyError(
                f"policy {name!r} has no parameter {what}; {has}, and all policies have decide_every, token_s, gate."
            )
        given = {**dict(zip(allowed, values, strict=False)), **parameters}
        if type(decide_every) is not int or decide_every < 1:
            raise PolicyError(f"decide_every must be a whole number of steps, at least 1, not {decide_every!r}.")
        if token_s is not None and not 0 < check_number(token_s, "token_s", PolicyError) < math.inf:
            raise PolicyError(f"token_s must be positive seconds, or None to count time, not {token_s}.")
        # JSON has lists where Python has tuples.
        own = kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})
        if gate is None:
            gate = registered.kind.is_gated(own)
        if not isinstance(gate, bool):
            raise PolicyError(f"gate must be true or false, not {gate!r:.60}.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameters", own)
        object.__setattr__(self, "decide_every", decide_every)
        object.__setattr__(self, "token_s", token_s)
        object.__setattr__(self, "gate", gate)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote, or what a user gave as JSON.

        Raises:
            PolicyError: As for the constructor.
        """
        if not all(isinstance(key, str) for key in data):
            raise PolicyError(f"the parameters of a policy have names, not {list(data)!r:.80}.")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON scalars and tuples."""
        own = {each.name: getattr(self.parameters, each.name) for each in fields(self.parameters)}
        common = {"decide_every": self.decide_every, "token_s": self.token_s, "gate": self.gate}
        return {"name": self.name, **own, **common}

    def check_live(self) -> Self:
        """Return this configuration if an engine can run it.

        Raises:
            PolicyError: The policy runs in simulation only.
        """
        if registration(self.name).simulation_only:
            raise PolicyError(
                f"policy {self.name!r} needs what only a simulation knows. Compare with it by `weft sim`, and start an "
                "engine with another one."
            )
        return self

    def make(self) -> Policy:
        """Make a new policy object, for one engine."""
        policy = registration(self.name).kind.from_parameters(self.parameters)
        return Gated(policy) if self.gate else policy
