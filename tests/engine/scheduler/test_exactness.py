"""On real engines, a call yields its undisturbed output, however often and wherever it is preempted.

The same holds for a call whose prompt is computed in chunks of any size, because it gives up tokens to others.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from background import ROOT, TINY, CommandResult
from interpreted_triton import FOLDER

pytestmark = pytest.mark.engine

Found = dict[str, dict[str, Any]]

ENGINES = ("sync", "sync+caching+swap", "async+swap", "async+caching")
OTHERS = ("sync+swap", "sync+caching", "async", "async+caching+swap")
SECOND = ("sync+caching+swap", "async+caching+swap")  # on vLLM's second model runner, ten times as slow
PHASES = ("prefill", "first token", "decode")
FEATURES = {
    "greedy",
    "seeded",
    "chunked prompt",
    "logprobs",
    "structured",
    "n > 1",
    "stop string",
    "stop token",
    "penalties",
    "min_tokens",
    "streamed",
}


def examined(*options: str) -> pytest.MarkDecorator:
    """Marks a test of the results of `exactness_engine.py`."""
    return pytest.mark.background(ROOT / "tests" / "support" / "exactness_engine.py", TINY, "found.json", *options)


SHORT = examined("--preemptions", "100", "--faults", "--engine", *ENGINES)


@pytest.fixture
def found(command_result: CommandResult) -> Found:
    """The results of the script, by engine."""
    assert command_result.exit_code == 0, command_result.stderr[-4000:]
    return json.loads((command_result.folder / "found.json").read_text())


def check(found: dict[str, Any], engine: str, preemptions: int) -> None:
    """Assert that no call differs, and that calls with each feature were preempted in each phase."""
    assert found["mismatches"] == []
    # Rounding may decide between two tokens that are almost equally likely, but in one of a thousand calls at most.
    assert len(found["decided_by_rounding"]) <= found["calls"] // 1000 + 1
    forced = found["preemptions"]["forced"]
    assert sum(forced.values()) >= preemptions
    assert set(found["touched"]) == FEATURES
    for feature, phases in found["touched"].items():
        assert all(phases[phase] for phase in PHASES), (feature, phases)
    assert found["leaked_blocks"] == 0
    if engine.endswith("swap"):
        swap = found["swap"]
        assert swap["used"] == 0
        assert min(swap["swaps_in"], swap["too_full"] + swap["evicted"]) > preemptions // 20
    else:
        assert forced["recompute"] > 0
    for cause in ("policy", "memory"):  # Weft's own preemptions, and those of vLLM when KV blocks run out
        assert sum(found["preemptions"][cause].values()) > 0
    assert (found["while_in_flight"] > 0) == engine.startswith("async")
    assert found["yielded"] > 0, "prompts are meant to give up tokens to calls of better rank"


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="make test-slow puts Triton into build/triton")
@examined("--second-runner", "--preemptions", "20", "--calls", "12", "--rounds", "1", "--engine", *SECOND)
@pytest.mark.parametrize("kind", SECOND)
def test_preempted_calls_yield_the_same_on_the_model_runner_of_gpus(found: Found, kind: str) -> None:
    """vLLM 0.32 has two model runners. On a GPU it takes the second, here with interpreted kernels."""
    assert found[kind]["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found[kind]["mismatches"] == []
    assert sum(found[kind]["preemptions"]["forced"].values()) >= 10
    assert found[kind]["swap"]["swaps_in"] >= 10
    assert found[kind]["leaked_blocks"] == 0


@pytest.mark.slow
@SHORT
@pytest.mark.parametrize("kind", ENGINES)
def test_preempted_calls_yield_what_they_yield_undisturbed(found: Found, kind: str) -> None:
    """At least 100 random preemptions on each engine change no token, text, logprob or finish reason."""
    check(found[kind], kind, 100)


@pytest.mark.slow
@SHORT
def test_a_wrong_resume_is_noticed(found: Found) -> None:
    """A scheduler that loses a token, or that takes freed KV blocks for computed ones, causes mismatches."""
    assert set(found["noticed"]) == {"loses a token", "trusts freed blocks"}
    assert all(found["noticed"].values())


@pytest.mark.slow
@SHORT
def test_a_copy_that_fails_is_computed_again(found: Found) -> None:
    """Where a third of the copies to and from host memory fail, no call fails, and only seeded calls yield other
    tokens: vLLM does not rewind the random numbers of a step whose load failed."""
    unreliable = found["unreliable"]
    assert unreliable["failures"] > 0
    assert [each for each in unreliable["mismatches"] if "seeded" not in each.split(";")[0]] == []
    assert unreliable["swap"]["swaps_in"] > 0
    assert unreliable["swap"]["used"] == 0


LONG = ("--seed", "1", "--preemptions", "1000", "--rounds", "100")


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=examined(*LONG, "--engine", kind)) for kind in ENGINES + OTHERS]
)
def test_a_thousand_preemptions_change_nothing(found: Found, kind: str) -> None:
    """At least 1,000 random preemptions on each engine, of other calls than in the shorter test, change no output."""
    check(found[kind], kind, 1000)
