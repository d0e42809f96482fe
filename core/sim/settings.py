"""The settings of a simulation: policy, engines, KV cache and step times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from weft.core.errors import SimulationError
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.routing import BalancerConfig, StealingConfig
from weft.core.sim.step_time import UNIT_STEPS, StepTime

MOST_REPLICAS: Final = 10_000  # each takes memory, and a look at every arrival


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The settings of a simulation. The defaults are made up, as in `StepTime`; they resemble one mid-size GPU.

    Raises:
        SimulationError: A value is out of range, or the policy is neither a PolicyConfig nor a name.
        PolicyError: No policy has this name.
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)  # or the name of a policy
    batch_size: int = 64  # the most calls that a replica runs at once
    replicas: int = 1
    balancer: BalancerConfig = field(default_factory=BalancerConfig)
    stealing: StealingConfig | None = None  # when calls that wait move to another replica; None: never
    kv_tokens: float = 262_144  # capacity of each replica's KV cache; math.inf for no bound
    prefix_cache: bool = True
    # 1: the KV cache is counted in tokens, and a further call starts if the next step fits and a hundredth stays free.
    # More: it is counted in blocks of this many tokens, as vLLM does. Calls find full blocks only.
    block_tokens: int = 1
    # What is evicted next if the KV cache is bounded and keeps prefixes. None: what was used longest ago, but KV of
    # ended programs first if the scheduling policy says so. With host memory, the default is next-use.
    kv_policy: KvPolicyConfig | None = None
    host_kv_tokens: float = 0  # host memory of each replica, for contexts of programs between calls
    kv_token_bytes: int = 128 << 10  # of a token; a step copies only so many bytes ahead of need
    fetches_ahead: bool = True  # whether copies begin before the call that needs them starts; False for comparisons
    moves_kv: bool = True  # whether replicas read each other's host memory; False for comparisons
    copies_beside: bool = True  # whether copies run beside steps where that is possible, as on GPUs; False: steps wait
    knows_pauses: bool = False  # KV policies are oracles: they know the time of each tool and which context continues
    chunk_tokens: int = 2048  # the most tokens in a step: one for each call that decodes, the rest for prompts
    # False: a prompt waits until a step has room for all of it. Then a step should have room for the longest call.
    chunked_prefill: bool = True
    # What happens to the KV of a preempted call. Swapped KV has no limit in host memory.
    preemption: Literal["recompute", "swap"] = "recompute"
    step_time: StepTime = field(default_factory=StepTime)
    # The programs that run at once in a closed loop: the next one arrives when one ends, and all arrival times are
    # ignored. None: programs arrive at their times.
    concurrency: int | None = None
    # For the papers' small examples: every running call generates one token in each unit of time, and prompts and
    # preemption take no time. `step_time`, `kv_tokens` and `prefix_cache` then have no effect.
    unit_steps: bool = False

    def __post_init__(self) -> None:
        policy = cast("PolicyConfig | str", self.policy)
        if isinstance(policy, str):
            object.__setattr__(self, "policy", PolicyConfig(policy))
        elif not isinstance(policy, PolicyConfig):
            raise SimulationError(f"policy must be a PolicyConfig, or the name of a policy, not {policy!r}.")
        for name, least in (("batch_size", 1), ("replicas", 1), ("block_tokens", 1), ("chunk_tokens", self.batch_size)):
            if getattr(self, name) < least:
                raise SimulationError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.concurrency is not None and self.concurrency < 1:
            raise SimulationError(f"concurrency must be at least 1, not {self.concurrency}.")
        if self.replicas > MOST_REPLICAS:
            raise SimulationError(f"replicas must be at most {MOST_REPLICAS}, not {self.replicas}.")
        if not self.kv_tokens >= 1:
            raise SimulationError(f"kv_tokens must be at least 1, or math.inf for no bound, not {self.kv_tokens}.")
        if not self.host_kv_tokens >= 0:
            raise SimulationError(f"host_kv_tokens must be tokens, 0 or more, not {self.host_kv_tokens}.")
        if self.host_kv_tokens and self.kv_policy is None:
            object.__setattr__(self, "kv_policy", KvPolicyConfig("next-use"))
        if self.kv_token_bytes < 1:
            raise SimulationError(f"kv_token_bytes must be at least 1, not {self.kv_token_bytes}.")

    @property
    def evicts_as_scheduled(self) -> bool:
        """Whether the scheduling policy says what is evicted next."""
        return self.kv_policy is None

    @property
    def evicts_by(self) -> KvPolicyConfig | None:
        """The KV policy that says what is evicted next; None if the engine has none, or nothing to evict."""
        return self.kv_policy if self.shares_prefixes and self.kv_capacity < math.inf else None

    @property
    def timing(self) -> StepTime:
        """The duration of steps; with `unit_steps` one unit of time each."""
        return UNIT_STEPS if self.unit_steps else self.step_time

    @property
    def kv_capacity(self) -> float:
        """Capacity of each replica's KV cache in tokens, of full blocks; math.inf for no bound."""
        if self.unit_steps or math.isinf(self.kv_tokens):
            return math.inf
        return self.kv_tokens // self.block_tokens * self.block_tokens

    @property
    def shares_prefixes(self) -> bool:
        """Whether calls find prefixes in the KV cache."""
        return self.prefix_cache and not self.unit_steps

    @property
    def swaps(self) -> bool:
        """Whether the KV of preempted calls is copied to host memory."""
        return self.preemption == "swap" and not self.unit_steps
