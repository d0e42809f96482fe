"""The leaderboard: which rivals there are, how they serve, and what is compared."""

from __future__ import annotations

import random

import pytest

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate
from weft.core.sim.study.leaderboard import DEFAULT, POLICIES, Rival, alone, best_plain, ranked, rivals, score
from weft.core.trace.workloads import generate, poisson

BASE = SimSettings(kv_tokens=16_384, host_kv_tokens=100_000, batch_size=8)


def test_every_policy_is_there_with_and_without_gate_and_host_memory() -> None:
    """8 policies, 2 gates and 3 kinds of host memory, the default beside its gate's absence, and three oracles."""
    found = rivals(host=True)
    assert len(set(found)) == len(found) == 3 * (2 * len(POLICIES) + 2 + 2) + 1
    assert len(rivals(host=False)) == 2 * len(POLICIES) + 2 + 2 + 1
    assert {each.policy for each in found if each.is_plain} == {"fcfs", "priority"}
    assert not any(each.is_plain and each.host == "host next-use" for each in found)
    assert [each for each in found if each.is_default] == [DEFAULT]
    assert DEFAULT.without_host() in rivals(host=False)
    assert not any(each.is_default for each in rivals(host=False))


@pytest.mark.parametrize(
    ("rival", "host", "kv_policy"),
    [
        (Rival("fcfs", False, ""), 0, None),
        (Rival("fcfs", True, "host lru"), 100_000, "lru"),
        (Rival("auto", None, "host next-use"), 100_000, "next-use"),
        (Rival("srpt", True, "", knows_pauses=True), 0, "next-use"),
    ],
)
def test_a_rival_is_served_as_its_name_says(rival: Rival, host: int, kv_policy: str | None) -> None:
    """Policy, gate, host memory and KV policy are those of the rival; all else is the engine's."""
    settings = rival.settings(BASE)
    assert settings.policy == PolicyConfig(rival.policy, gate=rival.gate)
    assert settings.host_kv_tokens == host
    assert settings.kv_policy == (None if kv_policy is None else KvPolicyConfig(kv_policy))
    assert settings.knows_pauses is rival.knows_pauses
    assert (settings.kv_tokens, settings.batch_size) == (BASE.kv_tokens, BASE.batch_size)


def test_scores_are_ranked_by_the_best_plain_rival() -> None:
    """The figures are those of the simulations, and the best plain rival stands at 1."""
    programs = generate("tools", 12, poisson(random.Random("arrivals"), 4.0), random.Random("programs"))
    alone_s = alone(programs, BASE)
    found = [Rival("fcfs", False, ""), Rival("priority", True, ""), Rival("auto", None, ""), Rival("srpt", True, "")]
    results = {each: simulate(programs, each.settings(BASE)) for each in found}
    scores = [score(each, results[each], programs, alone_s) for each in found]
    for each in scores:
        result = results[each.rival]
        assert (each.mean_s, each.p99_s) == (pytest.approx(result.mean_latency), pytest.approx(result.latency(99)))
        assert each.slo_throughput <= each.throughput
        assert each.worst_s >= each.p99_s >= each.p95_s
    best = best_plain(scores)
    assert best.mean_s == min(results[each].mean_latency for each in found[:2])
    ratios = dict(ranked(scores))
    assert ratios[best] == 1
    assert list(ratios.values()) == sorted(ratios.values())


def test_alone_a_program_waits_for_nobody() -> None:
    """Each program takes as long as if it were the only one in the trace."""
    programs = generate("chat", 3, poisson(random.Random("arrivals"), 4.0), random.Random("programs"))
    alone_s = alone(programs, BASE)
    for program in programs:
        expected = simulate([program], SimSettings("fcfs", batch_size=8, kv_tokens=float("inf")))  # type: ignore[arg-type]
        assert alone_s[program.program] <= expected.programs[program.program].latency * 1.001
