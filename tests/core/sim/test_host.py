"""Host memory in the simulator: what is spilled comes back without computation, and not before its copy is done."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from weft.core.errors import SimulationError
from weft.core.kv_cache.policies import KV_POLICIES, KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.routing import BalancerConfig
from weft.core.sim import SimResult, SimSettings, StepTime, TraceCall, TraceProgram, simulate
from weft.core.trace.workloads import generate, poisson


def programs_of(workload: str, count: int) -> list[TraceProgram]:
    return generate(workload, count, poisson(random.Random("arrivals 0"), 2.0), random.Random("programs 0"))


def run(programs: list[TraceProgram], host_kv_tokens: float, *, name: str = "next-use", **more: float) -> SimResult:
    settings = SimSettings(
        PolicyConfig("fcfs"),
        kv_tokens=more.get("kv_tokens", 65_536),
        kv_policy=KvPolicyConfig(name),
        host_kv_tokens=host_kv_tokens,
        step_time=StepTime(copy_token_s=more.get("copy_token_s", 5e-6)),
        copies_beside=bool(more.get("copies_beside", True)),
    )
    return simulate(programs, settings)


@pytest.mark.parametrize("scheduling", ["fcfs", "atlas"])
@pytest.mark.parametrize("name", KV_POLICIES)
def test_every_policy_serves_all_programs_with_little_host_memory(name: str, scheduling: str) -> None:
    """Where both memories are so small that copies are evicted, fetched and cancelled all the time, nothing hangs."""
    settings = SimSettings(
        PolicyConfig(scheduling), kv_tokens=20_480, kv_policy=KvPolicyConfig(name), host_kv_tokens=24_000
    )
    assert len(simulate(programs_of("mixed", 6), settings).programs) == 6


@pytest.mark.parametrize("name", ["next-use", "lru", "ended-first"])
def test_what_was_spilled_is_not_computed_again(name: str) -> None:
    """Tool loops whose contexts do not fit: with enough host memory each prompt token is computed once."""
    programs = programs_of("tools", 40)
    alone, with_host = run(programs, 0, name=name), run(programs, math.inf, name=name)
    assert alone.counts.again > 0
    assert with_host.counts.again == 0
    assert with_host.mean_latency < alone.mean_latency
    assert with_host.host_hit_rate > alone.host_hit_rate == 0
    everything = run(programs, 0, name=name, kv_tokens=10_000_000)
    assert with_host.prefix_hit_rate + with_host.host_hit_rate == pytest.approx(everything.prefix_hit_rate)


def test_hardly_a_step_waits_for_copies_out() -> None:
    """Prompts go out while their calls run, and contexts when these end, so what a step overwrites is there by then."""
    settings = SimSettings(
        PolicyConfig("fcfs"), batch_size=16, kv_tokens=65_536, kv_policy=KvPolicyConfig("next-use"), host_kv_tokens=1e6
    )
    result = simulate(programs_of("tools", 40), settings, batches=True)
    assert result.batches is not None
    assert result.counts.spilled > 0
    assert sum(batch.copied_tokens for batch in result.batches) < 0.1 * result.counts.spilled


@pytest.mark.parametrize("host_kv_tokens", [16_384, 32_768, 65_536])
def test_a_little_host_memory_does_no_harm(host_kv_tokens: int) -> None:
    """Host memory no larger than the KV cache has copies of what that has, so the gate may not count on both."""
    programs = programs_of("tools", 60)
    alone = SimSettings(PolicyConfig("auto"), 16, kv_tokens=65_536)
    with_host = replace(alone, kv_policy=KvPolicyConfig("next-use"), host_kv_tokens=host_kv_tokens)
    assert simulate(programs, with_host).mean_latency <= 1.05 * simulate(programs, alone).mean_latency


def test_host_memory_is_bounded() -> None:
    """Host memory for some of the contexts saves some of the computation: more than none, and less than enough."""
    programs = programs_of("tools", 40)
    alone, little, enough = (run(programs, tokens).counts.again for tokens in (0, 65_536, math.inf))
    assert enough < little < alone


@pytest.mark.parametrize(
    ("name", "beside", "is_found"),
    [("lru", True, True), ("next-use", True, True), ("next-use", False, False), ("ended-first", True, False)],
)
def test_a_later_program_finds_what_an_ended_one_has_left(name: str, beside: bool, is_found: bool) -> None:
    """Under `lru`, the twin of vLLM's `kv_offloading_size`, all is copied to host memory. `next-use` copies what ended
    programs leave if no step waits for that. `ended-first` drops it."""

    def program(name: str, block: int, arrival_s: float) -> TraceProgram:
        call = TraceCall("a", (), 200, 8_001, hash_ids=array("q", [block]))
        return TraceProgram(name, (call,), arrival_s, block_tokens=8_000)

    arrived = enumerate("ABCA")  # the cache holds two of them
    programs = [program(f"{block}{at}", ord(block), 20.0 * at) for at, block in arrived]
    counts = run(programs, math.inf, name=name, kv_tokens=16_402, copies_beside=beside).counts
    assert bool(counts.fetched) is is_found


def test_what_computing_does_faster_is_not_spilled() -> None:
    """Where a copy takes longer than the prompt, next-use leaves contexts to the order of eviction."""
    counts = run(programs_of("tools", 10), math.inf, copy_token_s=1.0).counts
    assert counts.spilled == counts.fetched == 0


def test_a_call_that_finds_its_context_only_on_the_host_waits_for_the_copy() -> None:
    """Program B evicts nearly all of A's context while A's tool runs. A's call then waits for a copy instead of the
    computation, which takes 0.1 ms a token; a copy that takes ten times as long delays it ten times as much."""
    calls = (TraceCall("a", (), 1, 9_000), TraceCall("b", ("a",), 1, 9_100, gap_s=5.0, shared_prefix_tokens=9_000))
    programs = [TraceProgram("A", calls), TraceProgram("B", (TraceCall("a", (), 1, 9_000, gap_s=2.0),), name="other")]
    none, fast, slow = (
        run(programs, tokens, kv_tokens=9_101, copy_token_s=copy_s).programs["A"].latency
        for tokens, copy_s in ((0, 1e-6), (math.inf, 1e-6), (math.inf, 1e-5))
    )
    assert slow - fast == pytest.approx(8_900 * (1e-5 - 1e-6), rel=0.02)
    assert none - slow > 8_900 * (1e-4 - 1e-5)  # and the fixed time of the steps


def test_what_was_fetched_ahead_is_found_on_the_device() -> None:
    """Nothing is computed again either way. What is fetched before the call that needs it starts counts as found."""
    programs = programs_of("tools", 40)
    settings = SimSettings(
        PolicyConfig("fcfs"),
        kv_tokens=65_536,
        batch_size=4,
        kv_policy=KvPolicyConfig("next-use"),
        host_kv_tokens=math.inf,
        step_time=StepTime(copy_token_s=2e-5),
    )
    ahead, late = simulate(programs, settings), simulate(programs, replace(settings, fetches_ahead=False))
    assert ahead.counts.again == late.counts.again == 0
    assert ahead.counts.prefix_hits > late.counts.prefix_hits


def test_host_memory_comes_with_next_use() -> None:
    """Without a KV policy nothing would be spilled. Where the KV cache is short, no other one computes less again."""
    assert SimSettings(host_kv_tokens=1000).kv_policy == KvPolicyConfig("next-use")
    assert SimSettings(host_kv_tokens=1000, kv_policy=KvPolicyConfig("ttl")).kv_policy == KvPolicyConfig("ttl")


def test_host_memory_is_a_number_of_tokens() -> None:
    """Less than nothing is a mistake."""
    with pytest.raises(SimulationError, match="host_kv_tokens"):
        SimSettings(host_kv_tokens=-1)


@pytest.mark.parametrize(
    ("name", "beside", "waits"), [("lru", True, False), ("next-use", True, False), ("next-use", False, True)]
)
def test_who_waits_for_a_copy_back(name: str, beside: bool, waits: bool) -> None:
    """A's context comes back from host memory while B generates. vLLM's offloading copies beside the steps, and so do
    Weft's engines on a GPU, so only A waits. On a CPU they copy within a step, so B waits as well. In any case A's
    context is copied and not computed."""
    calls = (TraceCall("a", (), 1, 9_000), TraceCall("b", ("a",), 1, 9_100, gap_s=9.0, shared_prefix_tokens=9_000))
    long = TraceProgram("B", (TraceCall("a", (), 1_000, 100),), 2.0, name="other")
    filler = TraceProgram("C", (TraceCall("a", (), 1, 9_800),), 3.0, name="third")
    fast, slow = (
        run(
            [TraceProgram("A", calls), long, filler],
            math.inf,
            name=name,
            kv_tokens=11_500,
            copy_token_s=copy_s,
            copies_beside=beside,
        )
        for copy_s in (1e-9, 9e-5)
    )
    assert fast.counts.again == slow.counts.again == 0
    assert fast.counts.fetched > 5_000
    copy_s = slow.counts.fetched * 9e-5
    assert slow.programs["A"].latency - fast.programs["A"].latency > 0.9 * copy_s
    assert (slow.programs["B"].latency - fast.programs["B"].latency > 0.9 * copy_s) == waits


@pytest.mark.parametrize("copies_beside", [True, False])
def test_a_program_that_moves_takes_its_kv_along(copies_beside: bool) -> None:
    """Each call goes to the other replica. All that it has in common with the call before it is read from there, and
    no copy is free."""
    calls = [TraceCall("c0", (), 1000, 10)]
    for number in range(1, 4):
        known = calls[-1].prompt_tokens + calls[-1].output_tokens
        calls.append(
            TraceCall(
                f"c{number}",
                (calls[-1].call_id,),
                prompt_tokens=known + 500,
                output_tokens=10,
                gap_s=1.0,
                shared_prefix_tokens=known,
            )
        )
    settings = SimSettings(
        PolicyConfig("fcfs"),
        replicas=2,
        balancer=BalancerConfig("round_robin"),
        kv_policy=KvPolicyConfig("next-use"),
        host_kv_tokens=65_536,
        copies_beside=copies_beside,
    )
    programs = [TraceProgram("moves", tuple(calls))]
    moving, staying = (simulate(programs, replace(settings, moves_kv=each)) for each in (True, False))
    one = simulate(programs, replace(settings, replicas=1))
    assert staying.counts.again > moving.counts.again == one.counts.again == 0
    assert one.mean_latency < moving.mean_latency < staying.mean_latency


@pytest.mark.parametrize(
    ("changed", "replicas"),
    [
        ({}, {0, 1}),
        ({"moves_kv": False}, {0}),
        ({"host_kv_tokens": 0}, {0}),
        ({"kv_policy": KvPolicyConfig("lru")}, {0}),
    ],
)
def test_a_long_prompt_goes_to_an_idle_replica_if_its_kv_moves(changed: dict[str, Any], replicas: set[int]) -> None:
    """By the default balancer, as soon as two calls of its program run where it would go otherwise."""
    calls = tuple(TraceCall(f"c{number}", (), prompt_tokens=20_000, output_tokens=10) for number in range(3))
    settings = replace(SimSettings(replicas=2, host_kv_tokens=65_536), **changed)
    assert {each.replica for each in simulate([TraceProgram("wide", calls)], settings, runs=True).runs} == replicas
