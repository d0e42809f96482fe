"""Two real engines in one host with processes of its own, and its forks (`tests/support/lifecycle_host.py`)."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
from background import TINY, CommandResult
from stub_replicas import stub_launchers

import weft
from weft.core.errors import EngineForkedError

pytestmark = pytest.mark.engine

HOST = Path(__file__).parents[1] / "support" / "lifecycle_host.py"


def host(test: Any) -> Any:
    """Marks a test that reads the host's report."""
    return pytest.mark.slow(pytest.mark.background(HOST, TINY)(test))


@pytest.fixture
def report(command_result: CommandResult) -> dict[str, Any]:
    """What the host saw."""
    seen: dict[str, Any] = json.loads(command_result.printed())
    return seen


@host
def test_a_start_leaves_the_host_as_the_host_made_it(report: dict[str, Any]) -> None:
    """Logging, loop policy and environment are those from before, but for what the host changed meanwhile. This also
    finds the environment variables of vLLM that are missing in `vllm_compat/environment.py`."""
    before, after = report["before"], report["after"]
    environ = {**before["environ"], "ADDED": "by the host", "CHANGED": "by the host"}
    del environ["REMOVED"]
    assert after == {**before, "environ": environ}
    assert report["same_logging"]


@host
def test_two_engines_that_start_at_once_have_processes_of_their_own(report: dict[str, Any]) -> None:
    """The shutdown of one ends neither the other nor a process that the host has started meanwhile, under any name."""
    assert report["processes"] == [1, 1, 0]
    files, left = report["shared_memory"]
    assert files > 0
    assert left == [], "vLLM leaves it behind when it kills its process"
    assert report["after_shutdown"] == {"second": True, "host": [True] * 3}


@host
def test_a_cancelled_start_ends_its_own_processes_only(report: dict[str, Any]) -> None:
    """It was cancelled when vLLM's process was there."""
    assert report["left_of_abandoned"] == []
    assert report["after_abandoned"] == {"second": True, "host": [True] * 3}


@host
@pytest.mark.parametrize("how", ["exit", "blocks", "collect", "locks", "use", "alive", "_exit"])
def test_a_forked_child_ends_and_leaves_the_engine_to_its_parent(report: dict[str, Any], how: str) -> None:
    """Whatever a child does, it ends at once with its own exit code, and the parent's engine serves."""
    fork = report["forks"][how]
    assert (fork["exit_code"], fork["serves"]) == (7, True)


@host
def test_every_use_in_a_forked_child_is_a_typed_error(report: dict[str, Any]) -> None:
    """The child has none of the engine's threads, so without the error it would wait for ever. This holds also if other
    threads held the engine's locks at the moment of the fork."""
    forks = report["forks"]
    assert set(forks["use"]["result"].values()) == {"EngineForkedError"}, forks["use"]["result"]
    assert forks["locks"]["result"] == {"chat_sync": "EngineForkedError"}
    assert forks["alive"]["result"] is False


@host
def test_a_process_that_multiprocessing_forks(report: dict[str, Any]) -> None:
    """It gets the typed error too, and ends with its own exit code."""
    assert report["forks"]["multiprocessing"] == {"exit_code": 1, "serves": True}


@host
def test_a_forgotten_engine_ends_with_its_host(report: dict[str, Any]) -> None:
    """The host did not shut the engine down. No process is left."""
    assert len(report["children"]) >= 2
    assert (report["host_exit_code"], report["alive"]) == (0, [])


@pytest.mark.anyio
async def test_every_use_of_several_replicas_in_a_fork_is_a_typed_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is by the number of the process, which is all that a fork changes for it."""
    with stub_launchers(tiny_model) as launchers:
        multi = await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1)
    (replica,) = multi.health()[multi.model]
    with weft.Program("before") as program, monkeypatch.context() as patch:
        identity = program.reports.start_call("ask")
        own = os.getpid()
        patch.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(EngineForkedError, match=f"runs in process {own}"):
            await multi.add_replica()
        with pytest.raises(EngineForkedError):
            await multi.remove_replica(replica.engine_id)
        with pytest.raises(EngineForkedError):
            await multi.chat({}, program, identity)
        for use in (multi.health, multi.shutdown, lambda: multi.swap_stats, lambda: multi.sessions):
            with pytest.raises(EngineForkedError):
                use()
        assert not multi.is_alive
        assert not multi.is_ready
        finaliser = cast("weakref.finalize[..., Any]", multi._finalizer).peek()
        assert finaliser is not None
        finaliser[1](*finaliser[2])  # as when the child ends
        async with multi:
            pass
    assert multi.is_alive
    assert [process.is_alive() for process in launchers[0].processes] == [True]
    multi.shutdown()
    assert [process.is_alive() for process in launchers[0].processes] == [False]
