"""The comparison of the simulator with an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_data import PROMPTS, FakeEngine

from weft.bench.baselines import baseline_of
from weft.bench.clock import STEP_S
from weft.bench.load import AS_RECORDED, Scaling, make_round
from weft.bench.replay import Replay
from weft.bench.results.records import Measurement, Round, RoundCounts
from weft.bench.results.sim_comparison import compare, fit_step_time, simulated_engine
from weft.bench.rounds import EQUAL_STEPS, unloaded_steps
from weft.bench.settings import BenchSettings
from weft.core.sim import Batch, StepSample, StepTime, TraceCall, TraceProgram
from weft.core.trace.format import write


def test_the_simulator_agrees_with_a_simple_engine(tmp_path: Path) -> None:
    """An engine that runs one call at a time, in steps of half a second, agrees with the simulator on both clocks."""
    path = tmp_path / "trace.jsonl"
    calls = (TraceCall("a", (), output_tokens=5), TraceCall("b", ("a",), output_tokens=4, gap_s=3 * STEP_S))
    write([TraceProgram(name, calls, at * STEP_S) for name, at in (("p", 0), ("q", 7), ("r", 30))], path)
    settings = BenchSettings(str(path), scale=1.0, batch_size=1, baselines=("stock-fcfs",))
    scaling = Scaling(1.0, 4096, whole_steps=True)
    programs = make_round(str(path), AS_RECORDED, 0, scaling, programs=9, seed=0).programs
    engine = FakeEngine(slots=1)
    replay = Replay(engine, programs, unloaded_steps(settings, programs), PROMPTS)
    assert list(replay.steps())
    # p runs in steps 0-5 and q in 7-12. p's second call waits for q and runs in 12-16, then q's second call in 16-20.
    # r runs in 30-35 and 38-42.
    assert [(each.program, each.steps) for each in replay.outcomes] == [("p", 16), ("q", 13), ("r", 12)]
    clock = engine.clock
    samples = [StepSample(1, 0, 5, 0.5), StepSample(2, 3, 9, 0.5)] * clock.busy_steps
    found = Measurement(replay.outcomes, clock.steps, clock.seconds, RoundCounts(), samples[: clock.busy_steps])
    round_ = Round(AS_RECORDED, 0, 4096, 0, {"stock-fcfs": found})
    assert fit_step_time([round_]).step_s(1, 2, 3) == pytest.approx(0.5)
    comparison, srpt = compare(settings, [round_], lambda: None)
    assert (comparison.steps_error, comparison.engine_steps) == (0, 41 / 3)
    assert comparison.seconds_error == pytest.approx(0, abs=1e-9)
    assert (srpt.baseline, srpt.seconds_error) == ("srpt", None)


@pytest.mark.parametrize(
    ("name", "has_host"),
    [("atlas-swap", False), ("atlas-swap+lru", False), ("atlas-swap+next-use", True), ("atlas+next-use", False)],
)
def test_host_memory_is_simulated_where_the_engine_uses_it(name: str, has_host: bool) -> None:
    """Without a KV policy, or with vLLM's order, it is for preempted calls only. Without host memory a KV policy copies
    nothing."""
    settings = BenchSettings("tools", baselines=(name,))
    engine = simulated_engine(settings, baseline_of(name), StepTime(), 1024)
    assert (engine.host_kv_tokens > 0) == has_host
    assert engine.swaps == name.startswith("atlas-swap")


def test_on_the_clock_of_steps_copies_take_no_time() -> None:
    """An engine copies inside its steps, which are counted as they are. In seconds, copies make a step longer."""
    step = Batch(0, 0.0, 1, 2, 3, 4, copied_tokens=100)
    assert step.took_s(EQUAL_STEPS) == STEP_S
    assert step.took_s(StepTime()) == pytest.approx(StepTime().step_s(2, 3, 4) + 100 * StepTime().copy_token_s)
