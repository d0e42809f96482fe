"""KV policies in the simulator: every one serves all programs, and what is expected next stays."""

from __future__ import annotations

import random

import pytest

from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate
from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads import generate, poisson


def programs_of(workload: str, count: int) -> list[TraceProgram]:
    return generate(workload, count, poisson(random.Random("arrivals 0"), 2.0), random.Random("programs 0"))


@pytest.mark.parametrize("scheduling", ["fcfs", "atlas"])
@pytest.mark.parametrize("name", KV_POLICIES)
def test_every_policy_serves_all_programs(name: str, scheduling: str) -> None:
    """In a cache so small that calls are preempted, nothing hangs and no token is lost from the counts."""
    programs = programs_of("mixed", 6)
    settings = SimSettings(PolicyConfig(scheduling), kv_tokens=20_480, kv_policy=KvPolicyConfig(name))
    result = simulate(programs, settings)
    assert len(result.programs) == 6
    assert simulate(programs, settings).to_dict() == result.to_dict()  # nothing is random


def test_without_eviction_the_policy_does_not_matter() -> None:
    """A cache that holds everything gives the same schedule under each policy as without one."""
    programs = programs_of("tools", 6)
    plain = simulate(programs, SimSettings(PolicyConfig("fcfs"), kv_tokens=10**7)).to_dict()
    for name in KV_POLICIES:
        settings = SimSettings(PolicyConfig("fcfs"), kv_tokens=10**7, kv_policy=KvPolicyConfig(name))
        assert simulate(programs, settings).to_dict() == plain


def test_expecting_the_next_use_finds_more() -> None:
    """Tool loops whose contexts do not fit: next-use finds more of the prompts than LRU, and programs end sooner."""
    programs = programs_of("tools", 40)
    lru, next_use = (
        simulate(programs, SimSettings(PolicyConfig("fcfs"), kv_tokens=65_536, kv_policy=KvPolicyConfig(name)))
        for name in ("lru", "next-use")
    )
    assert next_use.prefix_hit_rate > lru.prefix_hit_rate
    assert next_use.mean_latency < lru.mean_latency
