"""The schedulers that `weft bench` compares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from weft.core.errors import BenchError
from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import DEFAULT_POLICY, POLICIES, PolicyConfig
from weft.core.sim import SimSettings
from weft.engine.wire.scheduler_config import SchedulerConfig, encode_config


@dataclass(frozen=True, slots=True)
class Baseline:
    """How an engine schedules: with vLLM's own scheduler, or with Weft's under one of its policies."""

    stock: Literal["fcfs", "priority"] | None = None  # vLLM's `scheduling_policy`
    policy: PolicyConfig | None = None
    swaps: bool = False  # There is host memory: for every preempted call, and as a KV policy says between calls.
    kv_policy: KvPolicyConfig | None = None  # What is evicted next. None leaves that to the policy.
    plain: bool = False  # No call finds a prefix of another, and a prompt is computed in one step.

    @property
    def offloads(self) -> bool:
        """Whether vLLM itself keeps KV in host memory; it does not swap."""
        return self.swaps and self.stock is not None

    @property
    def simulated(self) -> PolicyConfig:
        """The policy with which the simulator schedules the same way."""
        if self.policy is not None:
            return self.policy
        return PolicyConfig("priority" if self.stock == "priority" else "fcfs")

    def config(self) -> dict[str, Any]:
        """What Weft's scheduler reads of vLLM's `additional_config`. vLLM's own scheduler has none."""
        if self.policy is None:
            return {}
        return {"weft": encode_config(SchedulerConfig(self.policy, trust_clients=True, kv_policy=self.kv_policy))}

    def simulated_on(self, engine: SimSettings) -> SimSettings:
        """A simulated engine that schedules the same way. Its host memory is never full."""
        keeps = self.swaps and self.kv_policy and (self.offloads or not self.kv_policy.follows_use)
        return replace(
            engine,
            policy=self.simulated,
            chunked_prefill=not self.plain,
            prefix_cache=not self.plain,
            preemption="swap" if self.swaps and not self.offloads else "recompute",
            kv_policy=self.kv_policy,
            host_kv_tokens=math.inf if keeps else 0,
        )


BASELINES: Final[dict[str, Baseline]] = {
    "stock-fcfs": Baseline(stock="fcfs"),
    "stock-again": Baseline(stock="fcfs"),  # The difference between it and stock-fcfs is noise.
    "stock-offload": Baseline(stock="fcfs", swaps=True, kv_policy=KvPolicyConfig("lru")),  # vLLM's own, on a GPU
    "stock-plain": Baseline(stock="fcfs", plain=True),
    # A user of stock vLLM can give a program's position in the order of arrival as the priority of its calls.
    "stock-priority": Baseline(stock="priority"),
    **{name: Baseline(policy=PolicyConfig(name)) for name in POLICIES},
    **{f"{name}-swap": Baseline(policy=PolicyConfig(name), swaps=True) for name in ("fcfs", "mlfq", "atlas", "auto")},
    # What `weft.Engine` does by default. Without its host memory it is the baseline of its policy.
    "default": Baseline(policy=PolicyConfig(DEFAULT_POLICY), swaps=True, kv_policy=KvPolicyConfig("next-use")),
}
DEFAULT_BASELINES: Final = ("stock-fcfs", "stock-priority", "mlfq", "plas", "atlas", DEFAULT_POLICY, "default")
HOST_GIB: Final = 1.0  # host memory of an engine that swaps, which the tiny model never fills


_WITH: Final = "+"  # between a baseline and what it is combined with, as in atlas+next-use
_GATES: Final = {"gate": True, "no-gate": False}


def baseline_of(name: str) -> Baseline:
    """A baseline by its name, with the gate and the KV policy that the name may have: `auto+no-gate+next-use`.
    Raises BenchError if there is none, a part is there twice, or vLLM's own scheduler is to have one."""
    scheduler, *parts = name.split(_WITH)
    baseline = BASELINES.get(scheduler)
    if baseline is None:
        raise BenchError(f"there is no baseline {scheduler!r}; choose from {', '.join(BASELINES)}.")
    has_gate = has_kv_policy = False
    for part in parts:
        if part not in _GATES and part not in KV_POLICIES:
            raise BenchError(f"there is no KV policy {part!r}; choose from {', '.join(KV_POLICIES)}.")
        if baseline.policy is None:
            what = "gate" if part in _GATES else "KV policy"
            raise BenchError(f"{scheduler} is vLLM's own scheduler, which takes no {what}; take fcfs{_WITH}{part}.")
        if has_gate if part in _GATES else has_kv_policy:
            raise BenchError(f"{name} has two parts of one kind; write at most gate or no-gate and one KV policy.")
        if part in _GATES:
            has_gate = True
            gated = PolicyConfig.from_dict(baseline.policy.to_dict() | {"gate": _GATES[part]})
            baseline = replace(baseline, policy=gated)
        else:
            has_kv_policy = True
            baseline = replace(baseline, kv_policy=KvPolicyConfig(part))
    return baseline


def check_baselines(names: Sequence[str]) -> None:
    """Raise BenchError unless these baselines can be compared: there are some, all known, each named once."""
    if not names:
        raise BenchError(f"there is no baseline to compare; choose from {', '.join(BASELINES)}.")
    for name in names:
        baseline_of(name)
    if len(set(names)) < len(names):
        raise BenchError(
            f"--baselines is {','.join(names)}, in which a baseline is named twice; name each once (stock-again "
            "schedules like stock-fcfs)."
        )
