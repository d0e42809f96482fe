"""Routing and supervision with fake replicas, which can die in every way and at any moment within milliseconds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from polling import until
from replica_harness import CALL, A, B, Harness

from weft.core.errors import EngineClosedError, EngineStartError, NoReplicaError, ReplicaError, ReplicaLostError
from weft.core.ids import CallId, EngineId
from weft.core.routing import Locality
from weft.engine.replicas.launcher import CORES_VARIABLE, LocalLauncher

pytestmark = [pytest.mark.engine, pytest.mark.anyio]  # the modules under test import vLLM


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A harness with two replicas that are ready."""
    harness = Harness()
    await harness.begin()
    yield harness
    await harness.supervisor.stop()


async def test_a_call_of_which_nothing_was_delivered_begins_again_elsewhere(harness: Harness) -> None:
    """The caller notices nothing. The dead replica gets no more calls at once, and its KV is forgotten."""
    harness.made[0].dies_at = 0
    assert await harness.call() == [0, 1]
    assert harness.assigned == [A, B]
    assert [health.state for health in harness.health()] == ["down", "ready"]
    assert harness.forgotten == [(A, False)]
    assert [health.calls for health in harness.health()] == [0, 0]


async def test_a_call_of_which_something_was_delivered_is_lost_with_a_count(harness: Harness) -> None:
    """The call is not begun again, because its caller would get the beginning twice."""
    harness.made[0].dies_at = 1
    with pytest.raises(ReplicaLostError, match="replica e/0 died during this call, after 1 tokens") as caught:
        await harness.call()
    assert (caught.value.delivered_tokens, caught.value.attempts) == (1, 1)
    assert harness.made[1].begun == 0
    assert harness.router.failures == {CallId("c"): caught.value}
    assert [health.calls for health in harness.health()] == [0, 0]


async def test_a_call_of_which_everything_was_delivered_has_ended(harness: Harness) -> None:
    """Its replica dies between the last output and the end of the call."""
    harness.made[0].dies_at = 2
    assert await harness.call() == [0, 1]
    assert harness.router.failures == {}
    assert [health.state for health in harness.health()] == ["down", "ready"]
    assert [health.calls for health in harness.health()] == [0, 0]


async def test_the_error_of_a_call_is_kept_only_where_somebody_takes_it(harness: Harness) -> None:
    """A server gets the error itself. If its client has left by then, nobody would take what is kept."""
    harness.made[0].dies_at = 1
    with pytest.raises(ReplicaLostError):
        await harness.call(for_chat=False)
    assert harness.router.failures == {}


async def test_a_call_waits_until_its_programs_kv_can_be_read_from_elsewhere(harness: Harness) -> None:
    """The replica that has it is told once, and asked until it is done."""
    harness.latest = B
    harness.made[1].answers += [{"copying": True}, {"copying": True}, {"copying": False, "blocks": [b"one", b"two"]}]
    assert await harness.call() == [0, 1]
    begins = [message["begins"] for message in harness.made[1].received]
    assert begins == [True, False, False]
    assert {message["program_id"] for message in harness.made[1].received} == {"p"}
    assert harness.made[0].taken == [(harness.made[1], [b"one", b"two"])]
    assert (harness.assigned, harness.made[0].begun) == ([A], 1)


@pytest.mark.parametrize("answers", [[None], []], ids=["dead", "stands still"])
async def test_a_call_does_not_wait_for_kv_for_ever(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, answers: list[Any]
) -> None:
    """It computes what it cannot get."""
    monkeypatch.setattr("weft.engine.replicas.router.MOST_COPY_S", 0.02)
    harness.latest = B
    harness.made[1].answers += answers
    assert await harness.call() == [0, 1]
    assert len(harness.made[1].received) == 1


async def test_a_replica_whose_memory_nobody_reads_is_asked_for_nothing(harness: Harness) -> None:
    """Neither is one that has been removed."""
    harness.made[1].shares_memory = False
    for latest in (B, EngineId("e/7")):
        harness.latest = latest
        assert await harness.call() == [0, 1]
    assert harness.made[1].received == []


async def test_no_replica_is_added_once_the_engine_is_being_shut_down(harness: Harness) -> None:
    """Nobody would end its processes."""
    await harness.supervisor.stop()
    with pytest.raises(EngineClosedError):
        await harness.supervisor.add()
    assert len(harness.made) == 2


async def test_a_call_that_kills_everything_ends_after_three_attempts() -> None:
    """The fourth replica stays alive."""
    harness = Harness()
    await harness.begin(4)
    for replica in harness.made:
        replica.dies_at = 0
    with pytest.raises(ReplicaLostError, match="2 earlier attempts"):
        await harness.call()
    assert harness.assigned == [A, B, EngineId("e/2")]
    assert len(harness.states.loads) == 1
    await harness.supervisor.stop()


async def test_a_dead_replica_is_started_again_after_its_pause(harness: Harness) -> None:
    """It is not started earlier. If it fails to start, it is started again after a longer pause."""
    harness.starts += [EngineStartError("no memory"), None]
    harness.made[0].is_dead = True
    await until(lambda: len(harness.states.loads) == 1)
    assert (harness.health()[0].reason, harness.health()[0].restart_in_s) == ("exit code -9", 1.0)
    await harness.looked()
    assert harness.health()[0].state == "down"
    harness.clock.advance(1.0)
    await until(lambda: harness.health()[0].deaths == 2)
    assert (harness.health()[0].reason, harness.health()[0].restart_in_s) == ("no memory", 2.0)
    harness.clock.advance(2.0)
    await harness.ready(2)
    assert await harness.call() == [0, 1]


async def test_calls_wait_for_a_replica_when_none_is_ready(harness: Harness) -> None:
    """They are dispatched in order of arrival when a replica is ready again."""
    for replica in harness.made:
        replica.is_dead = True
        replica.may_start.clear()
    await harness.ready(0)
    calls = [asyncio.create_task(harness.call(call_id=f"c{n}")) for n in range(3)]
    await until(lambda: len(harness.queue) == 3)
    harness.clock.advance(1.0)
    harness.made[1].may_start.set()
    assert await asyncio.gather(*calls) == [[0, 1]] * 3
    assert harness.assigned == [B, B, B]
    harness.made[0].may_start.set()


async def test_waiting_calls_fail_when_no_replica_becomes_ready(harness: Harness) -> None:
    """They fail after the time that a replica may take to start. The error says why the last replica died."""
    for replica in harness.made:
        replica.is_dead = True
        replica.may_start.clear()
    await harness.ready(0)
    call = asyncio.create_task(harness.call())
    await until(lambda: len(harness.queue) == 1)
    harness.clock.advance(599.0)
    await harness.looked()
    assert not call.done()
    harness.clock.advance(2.0)
    with pytest.raises(NoReplicaError, match=r"was ready within 601 s \(the last one: exit code -9\)"):
        await call
    assert len(harness.queue) == 0


async def test_a_waiting_call_is_dispatched_when_a_call_leaves_a_full_replica() -> None:
    """A call that is cancelled while it waits, or at the moment it is dispatched, does not stay in flight."""
    harness = Harness(Locality(), max_calls=1)
    await harness.begin(1)
    harness.made[0].go_on.clear()
    first, cancelled_call, second = [asyncio.create_task(harness.call(call_id=name)) for name in "abc"]
    await until(lambda: len(harness.queue) == 2)
    cancelled_call.cancel()
    await until(cancelled_call.done)
    harness.made[0].go_on.set()
    assert [await first, await second] == [[0, 1], [0, 1]]
    assert await harness.queue.dispatch(CALL, ()) == A
    dispatching = asyncio.create_task(harness.queue.dispatch(CALL, ()))
    await until(lambda: len(harness.queue) == 1)
    harness.queue.leave(A)  # the second call is dispatched now, and its task has not run yet
    dispatching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dispatching
    assert [health.calls for health in harness.health()] == [0]
    await harness.supervisor.stop()


async def test_a_replica_is_drained_and_then_removed(harness: Harness) -> None:
    """Its call runs to its end, new calls go elsewhere, and the replica that remains cannot be removed."""
    harness.made[0].go_on.clear()
    call = asyncio.create_task(harness.call())
    await until(lambda: harness.assigned == [A])
    removing = asyncio.create_task(harness.supervisor.remove(A, None))
    await until(lambda: harness.health()[0].state == "draining")
    assert await harness.call() == [0, 1]
    assert harness.assigned == [A, B]
    harness.made[0].go_on.set()
    assert await call == [0, 1]
    await removing
    assert [health.engine_id for health in harness.health()] == [B]
    assert harness.forgotten == [(A, True)]
    with pytest.raises(ReplicaError, match="is the last replica"):
        await harness.supervisor.remove(B, None)


async def test_a_replica_that_is_removed_hands_over_the_kv_of_its_programs(harness: Harness) -> None:
    """Of all at once, when its calls have ended and before it ends."""
    harness.made[0].go_on.clear()
    call = asyncio.create_task(harness.call())
    await until(lambda: harness.assigned == [A])
    harness.made[0].answers += [{"copying": True, "blocks": []}, {"copying": False, "blocks": [b"one", b"two"]}]
    removing = asyncio.create_task(harness.supervisor.remove(A, None))
    await until(lambda: harness.health()[0].state == "draining")
    assert harness.made[0].received == []
    harness.made[0].go_on.set()
    await asyncio.gather(call, removing)
    asked = [(message["program_id"], message["begins"]) for message in harness.made[0].received]
    assert asked == [(None, True), (None, False)]
    assert harness.made[1].taken == [(harness.made[0], [b"one", b"two"])]
    assert [health.engine_id for health in harness.health()] == [B]


async def test_a_replica_is_removed_although_its_kv_cannot_be_had(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.made[0].answers.append(RuntimeError("boom"))
    await harness.supervisor.remove(A, None)
    assert [health.engine_id for health in harness.health()] == [B]
    assert [record.getMessage().count("KV of a removed replica is lost") for record in caplog.records].count(1) == 1


async def test_draining_ends_at_its_timeout(harness: Harness) -> None:
    """The replica is stopped although it runs a call, and the call begins again on the other replica."""
    harness.made[0].go_on.clear()
    call = asyncio.create_task(harness.call())
    await until(lambda: harness.assigned == [A])
    await harness.supervisor.remove(A, 0.05)
    harness.made[0].dies_at = 0
    harness.made[0].go_on.set()
    assert await call == [0, 1]
    assert harness.assigned == [A, B]


async def dispatched_to_a() -> tuple[Harness, asyncio.Task[list[int]]]:
    """A call that waited and was just dispatched to the first of two full replicas. Its task has not run since."""
    harness = Harness(max_calls=1)
    await harness.begin()
    assert [await harness.queue.dispatch(CALL, ()) for _ in range(2)] == [A, B]
    call = asyncio.create_task(harness.call())
    await until(lambda: len(harness.queue) == 1)
    harness.queue.leave(A)
    assert harness.states.calls(A) == 1
    return harness, call


async def test_a_call_moves_if_its_replica_is_gone_before_it_begins() -> None:
    """That is no attempt, because no engine has seen the call."""
    harness, call = await dispatched_to_a()
    harness.supervisor._drop(A)
    harness.queue.leave(B)
    assert await call == [0, 1]
    assert harness.assigned == [B]
    assert harness.router.failures == {}
    assert [health.calls for health in harness.health()] == [0]
    await harness.supervisor.stop()


@pytest.mark.parametrize("passes", range(4))
async def test_a_call_moves_however_far_the_removal_of_its_replica_is(passes: int) -> None:
    """The removal gives the replica's calls no time at all."""
    harness, call = await dispatched_to_a()
    harness.made[0].go_on.clear()
    harness.made[0].dies_at = 0
    for _ in range(passes):
        await asyncio.sleep(0)
    await harness.supervisor.remove(A, 0.0)
    harness.made[0].go_on.set()
    harness.queue.leave(B)
    assert await call == [0, 1]
    assert [health.calls for health in harness.health()] == [0]
    await harness.supervisor.stop()


async def test_a_replica_that_is_starting_again_can_be_removed(harness: Harness) -> None:
    """The removal waits for the start and then ends the replica, so no process is left without an owner."""
    harness.made[0].may_start.clear()
    harness.made[0].is_dead = True
    await harness.ready(1)
    harness.clock.advance(1.0)
    await until(lambda: harness.health()[0].state == "starting")
    removing = asyncio.create_task(harness.supervisor.remove(A, None))
    await until(lambda: harness.health()[0].state == "draining")
    harness.made[0].may_start.set()
    await removing
    assert not harness.made[0].is_running
    assert [health.engine_id for health in harness.health()] == [B]


async def test_a_replica_that_does_not_start_is_not_added(harness: Harness) -> None:
    """The other replicas are not affected."""
    harness.starts.append(EngineStartError("no memory"))
    with pytest.raises(EngineStartError, match="no memory"):
        await harness.supervisor.add()
    assert [health.engine_id for health in harness.health()] == [A, B]
    assert harness.forgotten == [(EngineId("e/2"), True)]
    assert harness.supervisor.replica(EngineId("e/2")) is None
    with pytest.raises(ReplicaError, match="no replica 'e/2'; there are: e/0, e/1"):
        await harness.supervisor.remove(EngineId("e/2"), None)


async def test_stopping_ends_starts_too(harness: Harness) -> None:
    """A replica that is being added is ended."""
    harness.starts_hang = True
    adding = asyncio.create_task(harness.supervisor.add())
    await until(lambda: len(harness.made) == 3)
    await harness.supervisor.stop()
    assert adding.cancelled()
    assert not any(replica.is_running for replica in harness.made)


def test_each_replica_gets_cores_and_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables carry them to its processes. A third replica gets none until another one is gone."""
    from weft.engine.vllm_compat import names as vllm_api

    monkeypatch.setattr(vllm_api, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    launcher = LocalLauncher(EngineId("e"), [(0, 1), (2, 3)], ["0", "1,2"], lambda *_: None, hang_timeout_s=None)
    one_rank: Any = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, kv_transfer_config=None)
    two_ranks: Any = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, kv_transfer_config=None)
    made = [launcher.make("m", arguments) for arguments in (one_rank, two_ranks, one_rank)]
    assert [replica.engine_id for replica in made] == ["e/0", "e/1", "e/2"]
    assert [replica.environment for replica in made] == [
        {CORES_VARIABLE: "0,1", "CUDA_VISIBLE_DEVICES": "0"},
        {CORES_VARIABLE: "2|3", "CUDA_VISIBLE_DEVICES": "1,2"},
        {},
    ]
    launcher.release(EngineId("e/0"))
    assert launcher.make("m", one_rank).environment == made[0].environment
    log = Path(made[0].log or "")
    log.write_text("said")
    launcher.close()
    assert not log.exists()


def test_replicas_with_host_memory_get_parts_that_the_others_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the replica that was removed last is kept, and all go with the launcher. Where memory cannot be
    shared, each has its own."""
    from weft.engine.kv_cache.shared import VARIABLE
    from weft.engine.vllm_compat import names as vllm_api

    monkeypatch.setattr(vllm_api, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    launcher = LocalLauncher(EngineId("e"), [], [], lambda *_: None, hang_timeout_s=None)
    with_memory: Any = SimpleNamespace(kv_transfer_config=object())
    links = [Path(launcher.make("m", with_memory).environment[VARIABLE]) for _ in range(2)]
    assert [link.name for link in links] == ["0", "1"]
    assert links[0].parent == links[1].parent
    assert all(link.exists() for link in links)
    launcher.release(EngineId("e/0"))
    assert all(link.exists() for link in links)
    launcher.release(EngineId("e/1"))
    assert [link.exists() for link in links] == [False, True]
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError("not allowed")))
    assert launcher.make("m", with_memory).environment == {}
    launcher.close()
    assert not links[0].parent.exists()
