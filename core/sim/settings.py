"""The settings of a simulation: policy, engines, KV cache and step times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final, Literal, NamedTuple, cast

from weft.core.errors import SimulationError
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.routing import BalancerConfig, StealingConfig

# -- the duration of an engine step as a linear function of its tokens, and its fit to measured steps


class StepSample(NamedTuple):
    """A measured step."""

    decode_tokens: int  # one for each call that decoded
    prefill_tokens: int  # prompt tokens that were computed
    context_tokens: int  # tokens in the KV cache that the calls attended to, summed over the calls
    step_s: float
    copied_tokens: int = 0  # whose KV was copied to host memory or back


@dataclass(frozen=True, slots=True)
class StepTime:
    """The coefficients of a step's duration, in seconds.

    The defaults are made up. They resemble an 8-billion-parameter model on one mid-size GPU: the weights are read in
    8 ms, 10,000 prompt tokens are computed a second, 128 KiB of KV for each token are read at 2 TB/s, and copied to
    host memory or back at 26 GB/s, for which the step waits. `fit` finds the coefficients of measured steps.

    Raises:
        SimulationError: A coefficient is negative or not finite, or a step that only decodes would take no time.
    """

    fixed_s: float = 8e-3
    decode_token_s: float = 2e-5
    prefill_token_s: float = 1e-4
    context_token_s: float = 6.5e-8
    copy_token_s: float = 5e-6

    def __post_init__(self) -> None:
        values = astuple(self)
        if not all(0 <= value < math.inf for value in values) or self.fixed_s + self.decode_token_s <= 0:
            raise SimulationError(
                f"the coefficients are {values}; give seconds of at least 0, and fixed_s + decode_token_s above 0."
            )

    def step_s(self, decode_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        """The duration of one step without copies in seconds, for numbers of tokens as in `StepSample`."""
        return (
            self.fixed_s
            + self.decode_token_s * decode_tokens
            + self.prefill_token_s * prefill_tokens
            + self.context_token_s * context_tokens
        )

    @classmethod
    def fit(cls, samples: Iterable[StepSample]) -> StepTime:
        """Fit the coefficients to measured steps by least squares, with no coefficient below zero.

        The most negative coefficient is set to zero and the others are fitted again, until none is negative. A number
        of tokens that is the same in all samples cannot be distinguished from `fixed_s`, so its coefficient is zero.
        If a few very slow steps leave neither `fixed_s` nor `decode_token_s`, every step takes the mean duration.

        Raises:
            SimulationError: There are fewer than two samples, a sample is not finite, or the steps took no time.
        """
        rows = [(1.0, *map(float, (*each[:3], each.copied_tokens)), each.step_s) for each in samples]
        if len(rows) < 2 or not all(map(math.isfinite, (value for row in rows for value in row))):
            raise SimulationError(
                f"step times cannot be fitted to {len(rows)} samples; measure at least two steps, with finite values."
            )
        used = [0, *(column for column in (1, 2, 3, 4) if len({row[column] for row in rows}) > 1)]
        while True:
            fitted = dict(zip(used, _least_squares(rows, used), strict=True))
            lowest = min(fitted, key=fitted.__getitem__)
            if fitted[lowest] >= 0:
                break
            used.remove(lowest)
        if not fitted.get(0) and not fitted.get(1):
            return cls(math.fsum(row[-1] for row in rows) / len(rows), 0.0, 0.0, 0.0, 0.0)
        return cls(*(fitted.get(column, 0.0) for column in range(5)))


def _least_squares(rows: Sequence[tuple[float, ...]], columns: Sequence[int]) -> list[float]:
    """Solve the normal equations by elimination. The columns are scaled; a column that depends on others gets 0.

    Args:
        rows: The values of the columns, and last the value to be fitted.
        columns: The columns to fit.
    """
    scale = {column: math.sqrt(sum(row[column] ** 2 for row in rows)) or 1.0 for column in columns}
    matrix = [
        [sum(row[a] * row[b] for row in rows) / (scale[a] * scale[b]) for b in columns]
        + [sum(row[a] * row[-1] for row in rows) / scale[a]]
        for a in columns
    ]
    size, pivots = len(columns), []
    for i in range(size):
        if abs(matrix[i][i]) < _SINGULAR:
            continue
        pivots.append(i)
        matrix[i] = [value / matrix[i][i] for value in matrix[i]]
        for j in range(size):
            if j != i:
                factor = matrix[j][i]
                matrix[j] = [value - factor * pivot for value, pivot in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][-1] / scale[columns[i]] if i in pivots else 0.0 for i in range(size)]


_SINGULAR: Final = 1e-9
UNIT_STEPS: Final = StepTime(
    fixed_s=1.0, decode_token_s=0.0, prefill_token_s=0.0, context_token_s=0.0, copy_token_s=0.0
)


# -- the settings


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
