"""Stealing in the simulator: calls that wait move, each runs once, and balanced replicas are not affected."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.policies.fair_shares.fair import Fair
from weft.core.routing import BalancerConfig, StealingConfig
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.trace.format import TraceCall
from weft.core.trace.workloads import chat, search

# Sessions stay where they are however busy their engine is, so that other engines have nothing to do.
STICKY = BalancerConfig("affinity", threshold=1000)
STEALING = StealingConfig(cooldown_s=0.05)


def wide(calls: int, output_tokens: int = 1000) -> TraceProgram:
    """A program whose calls are all made at once."""
    return TraceProgram("wide", tuple(TraceCall(f"c{n}", (), 10, output_tokens) for n in range(calls)))


def settings(**changes: object) -> SimSettings:
    return replace(SimSettings(replicas=2, batch_size=2, balancer=STICKY, stealing=STEALING), **changes)  # type: ignore[arg-type]


def test_waiting_calls_move_to_the_replica_without_a_queue() -> None:
    """Of 20 calls on one replica, which runs two at once, half move, and the program ends in half the time."""
    alone = simulate([wide(20)], settings(stealing=None))
    shared = simulate([wide(20)], settings(), runs=True)
    assert alone.counts.moved == 0
    assert shared.counts.moved >= 8
    assert {run.replica for run in shared.runs} == {0, 1}
    assert shared.mean_latency < 0.65 * alone.mean_latency


def test_replicas_with_the_same_load_are_not_affected() -> None:
    """Where the ratio of the loads stays small, the run is the same with stealing and without."""
    spread = BalancerConfig("round_robin")
    with_stealing, without = (
        simulate([wide(20)], settings(balancer=spread, stealing=each)) for each in (STEALING, None)
    )
    assert with_stealing == without


@pytest.mark.parametrize("kv_policy", [None, "next-use"])
@pytest.mark.parametrize("policy", ["fcfs", "atlas", "astraea", "auto", "fair"])
def test_each_call_runs_once_and_ends(policy: str, kv_policy: str | None) -> None:
    """No call is lost or run on two replicas, under policies that keep notes of calls and hold some back, and under one
    that keeps the KV of a call that moves."""
    kv = {} if kv_policy is None else {"kv_policy": KvPolicyConfig(kv_policy), "host_kv_tokens": 80_000}
    rng = random.Random(policy)
    programs = [
        replace(rng.choice([chat, search])(rng, f"p{n}"), arrival_s=n * 0.5, tenant=f"t{n % 2}") for n in range(16)
    ]
    base = settings(policy=PolicyConfig(policy), batch_size=4, kv_tokens=40_000, **kv)
    result = simulate(programs, base, runs=True)
    replicas = Counter((program, call) for program, call, _ in {(r.program, r.call_id, r.replica) for r in result.runs})
    assert result.counts.moved > 0
    assert replicas == Counter((each.program, call.call_id) for each in programs for call in each.calls)


@pytest.mark.parametrize("replicas", [1, 2])
def test_only_replicas_that_have_others_exchange_shares(monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    """As on real engines."""
    exchanges: list[Mapping[str, float]] = []
    exchange = Fair.exchange

    def counted(policy: Fair, elsewhere: Mapping[str, float]) -> Mapping[str, float]:
        exchanges.append(elsewhere)
        return exchange(policy, elsewhere)

    monkeypatch.setattr(Fair, "exchange", counted)
    simulate([wide(4)], settings(policy=PolicyConfig("fair"), replicas=replicas))
    assert bool(exchanges) == (replicas > 1)


def test_steps_that_are_skipped_change_nothing() -> None:
    """A call that leaves or comes in the middle of a jump gives the same run as when every step is played."""
    rng = random.Random(1)
    programs = [replace(chat(rng, f"p{n}"), arrival_s=n * 0.2) for n in range(6)]
    one, other = (simulate([*programs, wide(20)], settings(), jump=jump) for jump in (True, False))
    assert one.counts.moved > 0
    assert one.counts == other.counts
    assert one.mean_latency == pytest.approx(other.mean_latency)
