"""The soak's clients do what they say, and what they do is counted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from polling import until
from soak_clients import KINDS, Client, idle_timeout, leaves_during_a_tool
from soak_samples import judge_samples, table_sizes
from soak_tally import Tally

import weft
from weft.core.errors import CallFailedError
from weft.core.trace.recorder import Recorder

pytestmark = pytest.mark.anyio


@pytest.mark.engine
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_a_client_leaves_nothing(engine: weft.Engine, kind: Any) -> None:
    """Each kind of client makes calls, none fails with an untyped error, and the tables are empty in the end."""
    if kind is leaves_during_a_tool and not idle_timeout(1):
        pytest.skip("handlers have no idle time-out yet")
    tally = Tally()
    await kind(Client(engine, random.Random(1), tally, idle_timeout_s=0.2))
    await until(lambda: not any(table_sizes(engine).values()))
    assert tally.ended.total() > 0
    assert tally.open_calls == 0
    assert tally.failures == []


async def test_a_tally_knows_how_a_call_ended() -> None:
    """A typed error ends a call and is not raised; any other error is a failure, and a cancellation goes on."""
    tally = Tally()
    with tally.call("good"):
        pass
    with tally.call("left") as ending:
        ending.outcome = "left"
    with tally.call("refused"):
        raise CallFailedError("no")
    with tally.call("broken"):
        raise KeyError("missing")
    with pytest.raises(asyncio.CancelledError), tally.call("cancelled"):
        raise asyncio.CancelledError
    assert dict(tally.outcomes) == dict.fromkeys(("result", "left", "CallFailedError", "untyped error", "cancelled"), 1)
    assert tally.failed == 1
    assert "KeyError: 'missing'" in tally.failures[0]
    assert tally.open_calls == 0


async def test_a_call_that_does_not_end_is_counted() -> None:
    """A call inside its block is open."""
    tally = Tally()
    with tally.call("slow"):
        assert tally.open_calls == 1


def test_a_program_that_is_recorded_is_counted(tmp_path: Path) -> None:
    """The session's engine does not record, so this table is looked at here."""
    recorder = Recorder(tmp_path / "trace.jsonl")
    vllm = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
    idle = SimpleNamespace(is_idle=True)
    programs = SimpleNamespace(messages=idle)
    engine: Any = SimpleNamespace(
        table=(), sessions={}, _in_flight=(), programs=programs, _llm=vllm, _recorder=recorder
    )
    assert not any(table_sizes(engine).values())
    recorder.program_started(weft.Program()._shared.info, 0.0)
    assert table_sizes(engine)["recorded programs"] == 1


def test_a_leak_in_one_process_is_reported() -> None:
    """Each figure of each process is judged by itself."""
    samples = [
        {
            "at_s": 10.0 * n,
            "rss_mb": {"host": 500.0, "core": 500.0 + n},
            "threads": {"host": 9, "core": 9},
            "files": {"host": 30 + n, "core": 30},
        }
        for n in range(100)
    ]
    leaking = [name for name, verdict in judge_samples(samples).items() if not verdict.is_flat]
    assert leaking == ["rss_mb of core", "files of host"]
