"""A call that is preempted, however often and at any point, yields what it yields undisturbed; on real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

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


@contextmanager
def examining(model: Path, folder: Path, *options: str, priority: int = 0) -> Iterator[Callable[[], Found]]:
    """Has `exactness_engine.py` at work; gives what waits for its findings, for each engine.

    Args:
        priority: as for `nice`.
    """
    script, found, log = Path(__file__).with_name("exactness_engine.py"), folder / "found.json", folder / "log"
    command = ["nice", "-n", str(priority), sys.executable, str(script), str(model), str(found), *options]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:

        def findings() -> Found:
            assert process.wait(880) == 0, log.read_text()[-4000:]
            return json.loads(found.read_text())

        try:
            yield findings
        finally:
            process.terminate()


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


@pytest.fixture(scope="module")
def found(begun_early: Any) -> Found:
    """Every engine, disturbed until each kind of call was forced out in each phase."""
    return begun_early()


def begin(model: Path, folder: Path) -> AbstractContextManager[Callable[[], Found]]:
    """What conftest.py begins when the session does: it takes minutes of one core, and most tests leave one idle."""
    return examining(model, folder, "--preemptions", "100", "--faults", "--engine", *ENGINES, priority=19)


@pytest.mark.parametrize("kind", ENGINES)
def test_preempted_calls_yield_what_they_yield_undisturbed(found: Found, kind: str) -> None:
    """At least 100 random preemptions on each engine change no token, text, logprob or finish reason."""
    check(found[kind], kind, 100)


def test_a_wrong_resume_is_noticed(found: Found) -> None:
    """A scheduler that loses a token, or takes freed KV blocks for computed, makes mismatches."""
    assert set(found["noticed"]) == {"loses a token", "trusts freed blocks"}
    assert all(found["noticed"].values())


def test_a_copy_that_fails_is_computed_again(found: Found) -> None:
    """Where a third of the copies to and from host memory fail, no call fails, and none says anything else but seeded
    ones: vLLM does not take back the random numbers of a step whose load failed."""
    unreliable = found["unreliable"]
    assert unreliable["failures"] > 0
    assert [what for what in unreliable["mismatches"] if "seeded" not in what.split(";")[0]] == []
    assert unreliable["swap"]["swaps_in"] > 0
    assert unreliable["swap"]["used"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ENGINES + OTHERS)
def test_a_thousand_preemptions_change_nothing(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    """At least 1,000 random preemptions on each engine, of other calls than in the shorter test."""
    options = ("--seed", "1", "--engine", kind, "--preemptions", "1000", "--rounds", "100")
    with examining(tiny_model, tmp_path, *options) as findings:
        check(findings()[kind], kind, 1000)
