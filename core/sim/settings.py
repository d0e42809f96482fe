"""What a simulation is of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, cast

from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.routing import BalancerConfig
from weft.core.sim.step_time import UNIT_STEPS, StepTime


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The engines of a simulation. The defaults go with those of `StepTime`: made up, for a mid-size GPU.

    Raises:
        SimulationError: values that make no sense.
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)  # or the name of one
    batch_size: int = 64  # calls that a replica runs at once
    replicas: int = 1
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    kv_tokens: float = 262_144  # that a replica's KV cache holds; math.inf for no bound
    prefix_cache: bool = True
    chunk_tokens: int = 2048  # the most a step computes, a token for each call that decodes first, then prompts
    preemption: Literal["recompute", "swap"] = "recompute"  # what happens to the KV of a call that is preempted
    swap_token_s: float = 5e-6  # swap: to copy a token's KV to or from host memory, which is taken to be unbounded
    step_time: StepTime = field(default_factory=StepTime)
    # Every running call gives a token in each unit of time, and prompts and preemption cost nothing: the small examples
    # of the papers. `step_time`, `kv_tokens` and `prefix_cache` play no part.
    unit_steps: bool = False

    def __post_init__(self) -> None:
        policy = cast("PolicyConfig | str", self.policy)
        if isinstance(policy, str):
            object.__setattr__(self, "policy", PolicyConfig(policy))
        elif not isinstance(policy, PolicyConfig):
            raise SimulationError(f"policy must be a PolicyConfig, or the name of a policy, not {policy!r}.")
        for name, least in (("batch_size", 1), ("replicas", 1), ("chunk_tokens", self.batch_size)):
            if getattr(self, name) < least:
                raise SimulationError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if not self.kv_tokens >= 1:
            raise SimulationError(f"kv_tokens must be at least 1, or math.inf for no bound, not {self.kv_tokens}.")
        if not 0 <= self.swap_token_s < math.inf:
            raise SimulationError(f"swap_token_s must be seconds, 0 or more, not {self.swap_token_s}.")

    @property
    def timing(self) -> StepTime:
        """What steps take."""
        return UNIT_STEPS if self.unit_steps else self.step_time

    @property
    def kv_capacity(self) -> float:
        return math.inf if self.unit_steps else self.kv_tokens

    @property
    def shares_prefixes(self) -> bool:
        return self.prefix_cache and not self.unit_steps

    @property
    def swaps(self) -> bool:
        return self.preemption == "swap" and not self.unit_steps
