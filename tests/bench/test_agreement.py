"""The simulator against the replay of `weft bench` on vLLM's scheduler without a model, where the KV cache is short."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from weft.bench.baselines import baseline_of
from weft.bench.clock import STEP_S
from weft.bench.load import Prompts
from weft.bench.replay import Replay
from weft.bench.settings import BenchSettings
from weft.core.sim import TraceCall, TraceProgram
from weft.core.trace.workloads import generate, poisson

pytestmark = pytest.mark.engine


def sessions(seed: int, count: int = 10) -> list[TraceProgram]:
    """Long sessions of one name, as coding agents have them: contexts of up to 120,000 tokens that grow with each turn,
    short outputs, tools of some seconds; now and then a context is compacted to its first part."""
    rng = random.Random(seed)
    programs = []
    for number in range(count):
        calls: list[TraceCall] = []
        context = 0
        for index in range(rng.randint(6, 30)):
            parents = (calls[-1].call_id,) if calls else ()
            shared = context if rng.random() < 0.9 else context // 3
            prompt = min(120_000, shared + int(rng.lognormvariate(8.0 if calls else 10.0, 1.0)))
            output = 1 + int(rng.lognormvariate(5.5, 1.0))
            gap_s = min(60.0, rng.lognormvariate(1.5, 1.2)) if calls else 0.0
            shared = min(shared, prompt - 1)
            calls.append(TraceCall(f"c{index}", parents, output, prompt, gap_s, shared_prefix_tokens=shared))
            context = prompt + output
        programs.append(TraceProgram(f"P{number}", tuple(calls), 30.0 * number * rng.random(), "agent"))
    return programs


def bench_settings(name: str, seed: int) -> tuple[list[TraceProgram], BenchSettings]:
    """A workload scaled down, and engines whose KV cache holds few of its programs."""
    from replayed_scheduler import scaled

    if name == "sessions":
        settings = BenchSettings("mixed", scale=0.02, batch_size=8, kv_tokens=8192)
        programs = sessions(seed)
    else:
        settings = BenchSettings(name, scale=0.1, batch_size=8, kv_tokens=2048)
        rng = random.Random(seed)
        programs = generate(name, 20, poisson(random.Random(seed + 1), 0.5), rng)
    return scaled(programs, settings), settings


@pytest.mark.parametrize("name", ["fcfs", "priority", "auto", "fcfs+gate", "priority+gate", "plas"])
def test_every_long_session_takes_as_many_steps_as_on_the_scheduler(name: str, tmp_path: Path) -> None:
    """Where long contexts evict each other block by block, each program takes the same steps in the simulator as on
    vLLM's scheduler, and the same tokens are computed again."""
    from replayed_scheduler import replayed, simulated

    programs, settings = bench_settings("sessions", 0)
    played = replayed(programs, settings, name, tmp_path)
    assert simulated(programs, settings, name) == played
    assert played.recomputed_tokens > 1000


@pytest.mark.parametrize("name", ["fcfs-swap+next-use", "auto-swap+next-use"])
def test_host_memory_gets_as_many_copies_as_on_the_scheduler(name: str, tmp_path: Path) -> None:
    """Each program takes the same steps, nothing is computed again, and as many tokens are copied out. What is copied
    back ahead of need depends on which of several contexts of equal worth was evicted, so that only the sum over some
    seeds can be compared."""
    from replayed_scheduler import replayed, simulated

    back = []
    for seed in range(3):
        programs, settings = bench_settings("sessions", seed)
        played = replayed(programs, settings, name, tmp_path)
        found = simulated(programs, settings, name)
        assert found.steps == played.steps
        assert found.recomputed_tokens == played.recomputed_tokens == 0
        assert found.copied_out == pytest.approx(played.copied_out, rel=0.01)
        back.append((found.copied_back, played.copied_back))
    found_back, played_back = map(sum, zip(*back, strict=True))
    assert found_back == pytest.approx(played_back, rel=0.25)
    assert played_back > 10_000


@pytest.mark.parametrize("name", ["fcfs-swap+next-use", "auto-swap+next-use"])
def test_calls_wait_for_copies_beside_steps_as_on_the_scheduler(name: str, tmp_path: Path) -> None:
    """Where 256 tokens are copied during a step, and calls wait for their contexts while others run, mean steps are
    within 2 %. If steps waited for these copies, they would be a twentieth more."""
    from replayed_scheduler import replayed, simulated

    copy_token_s = STEP_S / 256
    programs, settings = bench_settings("sessions", 0)
    played = replayed(programs, settings, name, tmp_path, copy_token_s)
    found = simulated(programs, settings, name, copy_token_s, copies_beside=True)
    waiting = simulated(programs, settings, name, copy_token_s)
    assert found.mean_steps == pytest.approx(played.mean_steps, rel=0.02)
    assert waiting.mean_steps > 1.05 * max(found.mean_steps, played.mean_steps)
    assert found.recomputed_tokens == played.recomputed_tokens == 0


@pytest.mark.parametrize("name", ["fcfs+next-use", "auto+next-use"])
def test_a_kv_policy_without_host_memory_agrees_within_4_percent(name: str, tmp_path: Path) -> None:
    """An engine ranks contexts again when something happens to them and once a second, and orders some blocks ahead. So
    does the simulator, but not at the same moments."""
    from replayed_scheduler import replayed, simulated

    for seed in range(3):
        programs, settings = bench_settings("sessions", seed)
        played = replayed(programs, settings, name, tmp_path)
        assert simulated(programs, settings, name).mean_steps == pytest.approx(played.mean_steps, rel=0.04)


@pytest.mark.parametrize("workload", ["mixed", "tools"])
@pytest.mark.parametrize("name", ["fcfs", "fcfs+gate"])
def test_programs_with_common_prompts_take_the_same_steps(name: str, workload: str, tmp_path: Path) -> None:
    """Parallel calls find what one of them has computed, and programs of one name find their system prompt, in the
    simulator as on vLLM's scheduler."""
    from replayed_scheduler import replayed, simulated

    programs, settings = bench_settings(workload, 0)
    played = replayed(programs, settings, name, tmp_path)
    assert simulated(programs, settings, name).steps == played.steps
    assert played.recomputed_tokens > 10_000


def test_the_gate_that_looks_ahead_lets_in_the_same_programs(tmp_path: Path) -> None:
    """Behind it hardly any program with tools is preempted, and mean steps are within 2 %."""
    from replayed_scheduler import replayed, simulated

    for seed in range(2):
        programs, settings = bench_settings("tools", seed)
        played = replayed(programs, settings, "auto", tmp_path)
        assert simulated(programs, settings, "auto").mean_steps == pytest.approx(played.mean_steps, rel=0.02)


@pytest.mark.parametrize(
    ("name", "workload"), [("auto", "mixed"), ("auto+no-gate", "tools"), ("plas", "mixed"), ("plas", "tools")]
)
def test_preempted_programs_agree_within_2_percent(name: str, workload: str, tmp_path: Path) -> None:
    """Where short and long programs preempt each other up to hundreds of times, mean steps are within 2 %, and the
    numbers of preemptions within 10 %."""
    from replayed_scheduler import replayed, simulated

    preemptions = []
    for seed in range(2):
        programs, settings = bench_settings(workload, seed)
        played = replayed(programs, settings, name, tmp_path)
        found = simulated(programs, settings, name)
        assert found.mean_steps == pytest.approx(played.mean_steps, rel=0.02)
        preemptions.append((found.preemptions, played.preemptions))
    simulated_count, real_count = map(sum, zip(*preemptions, strict=True))
    assert simulated_count == pytest.approx(real_count, rel=0.1)
    assert real_count > 10


def test_an_engine_learns_how_long_tools_take_in_the_trace(tmp_path: Path) -> None:
    """A tool that began before the latest one does not count as running still."""
    from replayed_scheduler import ReplayedScheduler

    settings = BenchSettings("tools", kv_tokens=2048)
    calls = [TraceCall("c0", (), 64, 64)]
    for number in range(1, 5):
        shared = 128 * number
        calls.append(TraceCall(f"c{number}", (calls[-1].call_id,), 64, shared + 64, 5 * STEP_S, "search", None, shared))
    engine = ReplayedScheduler(tmp_path, settings, baseline_of("fcfs+next-use"))
    list(Replay(engine, [TraceProgram("p", tuple(calls))], {"p": 1}, Prompts("0", range(10, 990))).steps())
    ((tool, times),) = engine._scheduler._kv_order.retention.tool_times.most_seen(1)
    assert (tool, times._sorted) == ("search", pytest.approx([5 * STEP_S] * 4, abs=STEP_S))
