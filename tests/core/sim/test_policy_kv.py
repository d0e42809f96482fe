"""KV policies in the simulator: every one serves all programs, and what is expected next stays."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import ClassVar

import pytest

from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig, Memory
from weft.core.kv_cache.retention import Retention
from weft.core.policies import Policy, PolicyConfig
from weft.core.sim import SimSettings, StepTime, simulate
from weft.core.sim.kv_cache.policy_cache import PolicyKvCache
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.workloads import generate, poisson


def programs_of(workload: str, count: int) -> list[TraceProgram]:
    return generate(workload, count, poisson(random.Random("arrivals 0"), 2.0), random.Random("programs 0"))


@pytest.mark.parametrize("scheduling", ["fcfs", "atlas"])
@pytest.mark.parametrize("name", KV_POLICIES)
def test_every_policy_serves_all_programs(name: str, scheduling: str) -> None:
    """In a cache so small that calls are preempted, nothing hangs and no token is lost from the counts."""
    programs = programs_of("mixed", 6)
    settings = SimSettings(PolicyConfig(scheduling), kv_tokens=20_480, kv_policy=KvPolicyConfig(name))
    assert len(simulate(programs, settings).programs) == 6


def test_without_eviction_the_policy_does_not_matter() -> None:
    """A cache that holds everything gives the same schedule under each policy as without one."""
    programs = programs_of("tools", 6)
    plain = simulate(programs, SimSettings(PolicyConfig("fcfs"), kv_tokens=10**7)).to_dict()
    for name in KV_POLICIES:
        settings = SimSettings(PolicyConfig("fcfs"), kv_tokens=10**7, kv_policy=KvPolicyConfig(name))
        assert simulate(programs, settings).to_dict() == plain


def test_a_call_that_fills_no_block_leaves_nothing_to_evict() -> None:
    """What is before it in the cache is then a leaf, as in engines, and can be evicted in its turn."""
    calls = (TraceCall("a", (), 1, 64), TraceCall("b", ("a",), 1, 70, shared_prefix_tokens=64))
    program = SimProgram(TraceProgram("p", calls), 0)
    program.open(0.0, 0)
    cache = PolicyKvCache(SimSettings(kv_tokens=1024, block_tokens=16), KvPolicyConfig("next-use").make())
    for index, spec in enumerate(calls):
        view = program.view
        call = SimCall(
            spec.call_id, view, spec.prompt_tokens, spec=spec, owner=program, index=index, inherited=view.attained
        )
        own = cache.reserve_call(call, *cache.find(call.prefixes()), spec.prompt_tokens)
        cache.trim(own, spec.prompt_tokens % 16)
        cache.release(own)
        cache.call_left(call, own, has_ended=True)
    assert [leaf.tokens for leaf in cache._leaves] == [64]


def test_engines_and_simulator_learn_the_same_from_the_same_calls() -> None:
    """A tool loop, once with the simulator's segments and once with the blocks of engines: both know a context by the
    same name, expect the same pause and the same new tokens, and give it the same chance."""
    calls = (
        TraceCall("a", (), 10, 1_590, tool=None),
        TraceCall("b", ("a",), 10, 1_910, gap_s=2.0, tool="grep", shared_prefix_tokens=1_600),
        TraceCall("c", ("b",), 10, 2_230, gap_s=2.0, tool="grep", shared_prefix_tokens=1_920),
    )
    program = SimProgram(TraceProgram("p", calls, name="agent"), 0)
    program.open(0.0, 0)
    cache = PolicyKvCache(SimSettings(kv_tokens=100_000), KvPolicyConfig("next-use").make())
    blocks = Retention(KvPolicyConfig("next-use").make(), 16, Memory(0.0, 0, SimSettings().timing.prefill_token_s))
    for index, spec in enumerate(calls):
        now_s = 3.0 * index
        call = SimCall(
            spec.call_id,
            program.view,
            spec.prompt_tokens,
            spec=spec,
            owner=program,
            index=index,
            inherited=program.view.attained,
        )
        cache.tick(now_s)
        cache.call_arrived(call)
        cache.call_began(call, 0.5)
        chain = range((spec.prompt_tokens + spec.output_tokens) // 16)
        blocks.call_arrived("p", chain[: spec.prompt_tokens // 16], now_s)
        running = blocks.call_began("p", "agent", chain[: spec.prompt_tokens // 16], now_s, waited_s=0.5)
        own = cache.reserve_call(call, *cache.find(call.prefixes()), spec.prompt_tokens)
        cache.release(own)
        cache.tick(now_s + 1.0)
        cache.call_left(call, own, has_ended=True)
        blocks.call_grew(running, chain, now_s + 1.0)
        blocks.call_ended(running, now_s + 1.0, tool=calls[index + 1].tool if index < 2 else None)
    (simulated,), (engine,) = cache._contexts.call_of, blocks.tree.contexts_of("p")
    assert simulated.pause.mean_s == engine.pause.mean_s
    assert (simulated.name, simulated.tool, simulated.chance) == (engine.name, engine.tool, engine.chance)
    assert simulated.new_tokens == pytest.approx(engine.new_tokens, rel=0.1)  # blocks are not divided
    assert simulated.expected_s(cache.memory(), 8.0) == engine.expected_s(blocks.memory, 8.0)


def test_known_pauses_find_no_less() -> None:
    """An oracle of the tools' times and of what is continued: it helps a search most, whose branches are given up."""
    programs = programs_of("search", 6)
    settings = SimSettings(PolicyConfig("fcfs"), kv_tokens=24_576, kv_policy=KvPolicyConfig("next-use"))
    expected, known = simulate(programs, settings), simulate(programs, replace(settings, knows_pauses=True))
    assert known.prefix_hit_rate > expected.prefix_hit_rate


def test_expecting_the_next_use_finds_more() -> None:
    """Tool loops whose contexts do not fit: next-use finds more of the prompts than LRU, and programs end sooner."""
    programs = programs_of("tools", 40)
    lru, next_use = (
        simulate(programs, SimSettings(PolicyConfig("fcfs"), kv_tokens=65_536, kv_policy=KvPolicyConfig(name)))
        for name in ("lru", "next-use")
    )
    assert next_use.prefix_hit_rate > lru.prefix_hit_rate
    assert next_use.mean_latency < lru.mean_latency


class _Kept(PolicyConfig):
    """A configuration that keeps the policy objects that it has made."""

    made: ClassVar[list[Policy]] = []

    def make(self) -> Policy:
        self.made.append(super().make())
        return self.made[-1]


@pytest.mark.parametrize("kv_policy", [None, "lru"])
def test_what_is_computed_again_is_no_work_of_a_program(kv_policy: str | None) -> None:
    """Where contexts evict each other, a policy learns the same work of each program as where all of them fit.

    Otherwise programs would look the longer the more the KV cache thrashes, and those that have lost most go last.
    """
    steps = StepTime(fixed_s=0.0)  # a prompt token then weighs the same, however many calls run at once
    config = KvPolicyConfig(kv_policy) if kv_policy is not None else None
    work, again = [], []
    for kv_tokens in (49_152, math.inf):
        settings = SimSettings(
            _Kept("learned", gate=False), step_time=steps, kv_tokens=kv_tokens, kv_policy=config, block_tokens=1
        )
        again.append(simulate(programs_of("tools", 40), settings).counts.again)
        work.append(sorted((end.name, end.work_tokens) for end in _Kept.made.pop().take_ends()))
    assert again[0] > 0 == again[1]
    assert work[0] == work[1]
