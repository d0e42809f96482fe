"""Settings, loads and baselines of `weft bench`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.bench.baselines import BASELINES, DEFAULT_BASELINES, baseline_of
from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.rounds import rates_of_loads
from weft.bench.settings import BenchSettings, names_of_loads
from weft.commands.cli import app
from weft.core.errors import BenchError
from weft.core.kv_cache.config import SwapConfig
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import POLICIES, PolicyConfig
from weft.core.sim import SimSettings, TraceCall, TraceProgram
from weft.core.trace.format import write
from weft.engine.options import EngineOptions


def test_every_policy_is_a_baseline() -> None:
    """A policy that is added to the registry can be compared at once, in the engine and simulated."""
    for name in POLICIES:
        policy = BASELINES[name].policy
        assert policy is not None
        assert policy.name == name
        assert BASELINES[name].simulated == policy
    assert set(DEFAULT_BASELINES) <= set(BASELINES)


def test_the_default_is_that_of_an_engine() -> None:
    """Weft's engines have the default policy with host memory, and next-use. The same without it is compared, too."""
    options = EngineOptions()
    assert isinstance(options.swap, SwapConfig)
    host = baseline_of("default")
    assert (host.policy, host.swaps) == (options.policy, True)
    assert host.kv_policy == KvPolicyConfig("next-use")
    without = {name: baseline_of(name) for name in DEFAULT_BASELINES}
    assert replace(host, swaps=False, kv_policy=None) in without.values()


def test_every_weft_baseline_takes_a_kv_policy_and_a_gate() -> None:
    """Their names stand behind the scheduler's, in any order. The simulator has the same gate."""
    found = baseline_of("atlas+next-use")
    assert (found.simulated, found.kv_policy) == (BASELINES["atlas"].policy, KvPolicyConfig("next-use"))
    for name, gate in (("fcfs", False), ("fcfs+gate", True), ("auto", True), ("auto+no-gate+ttl", False)):
        assert baseline_of(name).simulated == PolicyConfig(name.partition("+")[0], gate=gate)
    assert baseline_of("auto-swap+next-use+no-gate") == baseline_of("auto-swap+no-gate+next-use")


def test_vllms_own_host_memory_is_simulated_with_lru() -> None:
    """It keeps what is evicted, and computes preempted calls again. Weft's host memory does not follow LRU."""
    engine = SimSettings(kv_tokens=1000)
    stock, weft = (baseline_of(name).simulated_on(engine) for name in ("stock-offload", "fcfs-swap+lru"))
    assert (stock.policy, stock.kv_policy) == (PolicyConfig("fcfs"), KvPolicyConfig("lru"))
    assert (stock.host_kv_tokens, stock.preemption) == (math.inf, "recompute")
    assert (weft.host_kv_tokens, weft.preemption) == (0, "swap")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"baselines": ("stock-fcfs", "best")}, "no baseline 'best'"),
        ({"baselines": ("atlas+belady",)}, "no KV policy 'belady'"),
        ({"baselines": ("stock-fcfs+lru",)}, "takes no KV policy; take fcfs\\+lru"),
        ({"baselines": ("stock-fcfs+gate",)}, "takes no gate; take fcfs\\+gate"),
        ({"baselines": ("fcfs+gate+no-gate",)}, "two parts of one kind"),
        ({"baselines": ("fcfs+lru+ttl",)}, "two parts of one kind"),
        ({"baselines": ()}, "no baseline to compare"),
        ({"baselines": ("atlas", "atlas")}, "named twice"),
        ({"scale": 0.0}, "--scale is 0"),
        ({"source": "nowhere.jsonl"}, "neither a trace file nor"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    """The error comes before an engine starts."""
    with pytest.raises(BenchError, match=message):
        BenchSettings(**({"source": "chat"} | wrong))


@pytest.mark.parametrize("option", ["--programs", "--batch-size", "--kv-tokens", "--rounds"])
def test_an_option_that_counts_takes_no_zero(option: str, tmp_path: Path) -> None:
    """The command line refuses it before anything is imported for a benchmark."""
    done = CliRunner().invoke(app, ["bench", "chat", "--out", str(tmp_path), option, "0"])
    assert done.exit_code == 2
    assert option in done.stderr


def test_sizes_scale_with_lengths() -> None:
    """The KV cache has a tenth of 4,096 tokens a slot, in whole blocks of 32. A step computes a tenth of 2,048 tokens,
    but at least one for each slot."""
    settings = BenchSettings("chat", batch_size=8)
    assert (settings.kv_capacity_tokens, settings.chunk_tokens) == (3264, 205)
    assert BenchSettings("chat", kv_tokens=70).kv_capacity_tokens == 64
    assert BenchSettings("chat", scale=0.001).chunk_tokens == 8


def test_the_loads_of_a_session(tmp_path: Path) -> None:
    """Rates come in order, then the closed batch. A trace file without rates is replayed as recorded. A workload needs
    rates or a closed batch."""
    path = tmp_path / "trace.jsonl"
    write([TraceProgram("a", (TraceCall("a", (), output_tokens=1),))], path)
    generated, recorded = BenchSettings("chat"), BenchSettings(str(path))
    assert names_of_loads(generated, [2, 0.5], closed=True) == ["0.5", "2", CLOSED]
    assert names_of_loads(recorded, [], closed=False) == [AS_RECORDED]
    assert json.dumps(recorded.to_json()).count("sha256") == 1
    for rates in ([], [0.0], [1.0, 1.0]):
        with pytest.raises(BenchError, match="--rates"):
            names_of_loads(generated, rates, closed=False)


def test_loads_are_multiples_of_the_capacity_in_engine_steps() -> None:
    """Twice the load is twice the rate. At half of the scale, half of the work arrives in half of the time, so that
    the rate of the unscaled trace is about the same."""
    settings = BenchSettings("chat", scale=0.1, batch_size=8)
    half, whole = rates_of_loads(settings, [0.5, 1.0])
    assert whole == pytest.approx(2 * half, rel=0.01)
    assert rates_of_loads(replace(settings, scale=0.05), [1.0])[0] == pytest.approx(whole, rel=0.3)
    assert rates_of_loads(replace(settings, clock="seconds"), []) == []


@pytest.mark.parametrize("loads", [[0.0], [-1.0], [float("nan")], [float("inf")]])
def test_a_wrong_load_is_refused(loads: list[float]) -> None:
    """The message names the option and a value that would do."""
    with pytest.raises(BenchError, match=r"--loads are .* such as 0\.5,0\.8"):
        rates_of_loads(BenchSettings("chat"), loads)


def test_seconds_have_no_measured_capacity() -> None:
    """How long a step takes is known only when it was made, so loads need the clock of steps."""
    with pytest.raises(BenchError, match="--loads need --clock steps"):
        rates_of_loads(BenchSettings("chat", clock="seconds"), [0.8])
