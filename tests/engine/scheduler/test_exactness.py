"""A call that is preempted, however often and at any point, yields what it yields undisturbed; on real engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from background import ROOT, TINY, CommandResult

pytestmark = pytest.mark.engine

Found = dict[str, dict[str, Any]]

ENGINES = ("sync", "sync+caching+swap", "async+swap", "async+caching")
OTHERS = ("sync+swap", "sync+caching", "async", "async+caching+swap")
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
    """Marks a test of what `exactness_engine.py` finds."""
    return pytest.mark.background(ROOT / "tests" / "support" / "exactness_engine.py", TINY, "found.json", *options)


SHORT = examined("--preemptions", "100", "--faults", "--engine", *ENGINES)


@pytest.fixture
def found(command_result: CommandResult) -> Found:
    """Its findings, for each engine."""
    assert command_result.exit_code == 0, command_result.stderr[-4000:]
    return json.loads((command_result.folder / "found.json").read_text())


def check(found: dict[str, Any], engine: str, preemptions: int) -> None:
    """No call of an engine differs, and enough of every kind were forced out at every point."""
    assert found["mismatches"] == []
    # A choice closer than rounding is nobody's fault, but one in a thousand calls at most has one that matters.
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
    for cause in ("policy", "memory"):  # Weft's own preemptions, and vLLM's when KV blocks run out
        assert sum(found["preemptions"][cause].values()) > 0
    assert (found["while_in_flight"] > 0) == engine.startswith("async")


@SHORT
@pytest.mark.parametrize("kind", ENGINES)
def test_preempted_calls_yield_what_they_yield_undisturbed(found: Found, kind: str) -> None:
    """At least 100 random preemptions on each engine change no token, text, logprob or finish reason."""
    check(found[kind], kind, 100)


@SHORT
def test_a_wrong_resume_is_noticed(found: Found) -> None:
    """A scheduler that loses a token, or takes freed KV blocks for computed, makes mismatches."""
    assert set(found["noticed"]) == {"loses a token", "trusts freed blocks"}
    assert all(found["noticed"].values())


@SHORT
def test_a_copy_that_fails_is_computed_again(found: Found) -> None:
    """Where a third of the copies to and from host memory fail, no call fails, and none says anything else but seeded
    ones: vLLM does not take back the random numbers of a step whose load failed."""
    unreliable = found["unreliable"]
    assert unreliable["failures"] > 0
    assert [what for what in unreliable["mismatches"] if "seeded" not in what.split(";")[0]] == []
    assert unreliable["swap"]["swaps_in"] > 0
    assert unreliable["swap"]["used"] == 0


LONG = ("--seed", "1", "--preemptions", "1000", "--rounds", "100")


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=examined(*LONG, "--engine", kind)) for kind in ENGINES + OTHERS]
)
def test_a_thousand_preemptions_change_nothing(found: Found, kind: str) -> None:
    """At least 1,000 random preemptions on each engine, of other calls than in the shorter test."""
    check(found[kind], kind, 1000)
