"""Routing and supervision with replicas that only pretend: every way to die, at any moment, in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.errors import EngineStartError, NoReplicaError, ReplicaError, ReplicaLostError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId
from weft.core.routing import Arrival, Balancer, LeastUsed, Locality
from weft.core.routing.replicas import Backoff, ReplicaHealth, ReplicaSet
from weft.core.testing import FakeClock
from weft.engine.replicas.launcher import CORES_VARIABLE, LocalLauncher

pytestmark = [pytest.mark.engine, pytest.mark.anyio]  # the modules under test import vLLM

CALL = Arrival(ProgramId("p"), SessionId("s"), 10)
A, B = EngineId("e/0"), EngineId("e/1")


class FakeReplica:
    """Gives two tokens a call, when `go_on` is set, and dies when told to."""

    def __init__(self, engine_id: EngineId, starts: list[Exception | None]) -> None:
        self.engine_id = engine_id
        self.is_dead = False
        self.is_running = False
        self.starts = starts  # what comes of the next starts, of all replicas; well when there is nothing left
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.dies_at: int | None = None  # after so many tokens of a call
        self.begun = 0

    async def start(self, timeout_s: float) -> None:
        del timeout_s
        await self.may_start.wait()
        error = self.starts.pop(0) if self.starts else None
        if error is not None:
            raise error
        self.is_running = True

    def why_dead(self) -> str:
        return "exit code -9"

    def detach(self) -> None:
        self.is_dead = self.is_running = False

    async def stop(self) -> None:
        self.detach()

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        from weft.engine.replicas.base import ReplicaGoneError

        del prompt, sampling_params, request_id, kwargs
        self.begun += 1
        for token in range(2):
            await self.go_on.wait()
            if self.dies_at == token:
                self.is_dead = True
                raise ReplicaGoneError
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])


class House:
    """A supervisor with fake replicas on a clock that stands still."""

    def __init__(self, balancer: Balancer | None = None, max_calls: int = 10) -> None:
        from weft.engine.replicas.dispatch_queue import DispatchQueue
        from weft.engine.replicas.router import Router
        from weft.engine.replicas.supervisor import Supervisor

        self.clock = FakeClock()
        self.states = ReplicaSet(balancer or LeastUsed(), max_calls=max_calls, backoff=Backoff())
        self.line = DispatchQueue("m", self.states)
        self.made: list[FakeReplica] = []
        self.starts: list[Exception | None] = []
        self.starts_hang = False
        self.forgotten: list[tuple[EngineId, bool]] = []
        self.placed: list[EngineId] = []
        self.supervisor = Supervisor(
            "m",
            replicas=self.states,
            line=self.line,
            make=self.make,
            forget=lambda engine_id, gone: self.forgotten.append((engine_id, gone)),
            start_timeout_s=600,
            clock=self.clock,
        )
        self.router = Router(
            self.line,
            self.supervisor.replica,
            lambda _call, engine_id: self.placed.append(engine_id),
            self.supervisor.note_death,
        )

    def make(self) -> Any:
        self.made.append(FakeReplica(EngineId(f"e/{len(self.made)}"), self.starts))
        if self.starts_hang:
            self.made[-1].may_start.clear()
        return self.made[-1]

    async def begin(self, count: int = 2) -> None:
        for _ in range(count):
            await self.supervisor.add()
        self.supervisor.watch()

    async def call(self, call_id: str = "c") -> list[int]:
        """One call's tokens."""
        from weft.engine.vllm_compat.names import SamplingParams

        params = SamplingParams(extra_args={"call_id": call_id, "program_id": "p"})
        tokens: list[int] = []
        async for output in self.router.generate({"prompt_token_ids": [1]}, params, "r", session_id="s"):
            tokens += output.outputs[0].token_ids
        return tokens

    def health(self) -> list[ReplicaHealth]:
        return self.states.health(self.clock())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def ready(self, count: int) -> None:
        await self.until(lambda: self.states.ready_count == count)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Two replicas, ready."""
    house = House()
    await house.begin()
    yield house
    await house.supervisor.stop()


async def test_a_call_of_which_nothing_was_delivered_begins_again_elsewhere(house: House) -> None:
    """Its caller notices nothing; the dead replica is out at once and its KV forgotten."""
    house.made[0].dies_at = 0
    assert await house.call() == [0, 1]
    assert house.placed == [A, B]
    assert [health.state for health in house.health()] == ["down", "ready"]
    assert house.forgotten == [(A, False)]
    assert [health.calls for health in house.health()] == [0, 0]


async def test_a_call_of_which_something_was_delivered_is_lost_with_a_count(house: House) -> None:
    """It is not begun again: its caller would get the beginning twice."""
    house.made[0].dies_at = 1
    with pytest.raises(ReplicaLostError, match="replica e/0 died during this call, after 1 tokens") as caught:
        await house.call()
    assert (caught.value.delivered_tokens, caught.value.attempts) == (1, 1)
    assert house.made[1].begun == 0
    assert house.router.failures == {CallId("c"): caught.value}
    assert [health.calls for health in house.health()] == [0, 0]


async def test_a_call_that_kills_everything_ends_after_three_attempts() -> None:
    """The fourth replica stays alive."""
    house = House()
    await house.begin(4)
    for replica in house.made:
        replica.dies_at = 0
    with pytest.raises(ReplicaLostError, match="2 earlier attempts"):
        await house.call()
    assert house.placed == [A, B, EngineId("e/2")]
    assert house.states.ready_count == 1
    await house.supervisor.stop()


async def test_a_dead_replica_is_started_again_after_its_pause(house: House) -> None:
    """Not before; and again, after a longer one, when it fails to start."""
    house.starts += [EngineStartError("no memory"), None]
    house.made[0].is_dead = True
    await house.until(lambda: house.states.ready_count == 1)
    assert (house.health()[0].reason, house.health()[0].restart_in_s) == ("exit code -9", 1.0)
    await asyncio.sleep(0.5)
    assert house.health()[0].state == "down"
    house.clock.advance(1.0)
    await house.until(lambda: house.health()[0].deaths == 2)
    assert (house.health()[0].reason, house.health()[0].restart_in_s) == ("no memory", 2.0)
    house.clock.advance(2.0)
    await house.ready(2)
    assert await house.call() == [0, 1]


async def test_calls_wait_for_a_replica_when_none_is_ready(house: House) -> None:
    """First come, first served, once one is back."""
    for replica in house.made:
        replica.is_dead = True
        replica.may_start.clear()
    await house.ready(0)
    calls = [asyncio.create_task(house.call(call_id=f"c{n}")) for n in range(3)]
    await house.until(lambda: len(house.line) == 3)
    house.clock.advance(1.0)
    house.made[1].may_start.set()
    assert await asyncio.gather(*calls) == [[0, 1]] * 3
    assert house.placed == [B, B, B]
    house.made[0].may_start.set()


async def test_calls_are_sent_away_when_none_becomes_ready(house: House) -> None:
    """After as long as a replica may take to start; the error says why the last one died."""
    for replica in house.made:
        replica.is_dead = True
        replica.may_start.clear()
    await house.ready(0)
    call = asyncio.create_task(house.call())
    await house.until(lambda: len(house.line) == 1)
    house.clock.advance(599.0)
    await asyncio.sleep(0.5)
    assert not call.done()
    house.clock.advance(2.0)
    with pytest.raises(NoReplicaError, match=r"was ready within 601 s \(the last one: exit code -9\)"):
        await call
    assert len(house.line) == 0


async def test_the_line_moves_when_a_call_leaves_a_full_replica() -> None:
    """And a call that gives up in the line, or at the moment it is placed, takes no place with it."""
    house = House(Locality(), max_calls=1)
    await house.begin(1)
    house.made[0].go_on.clear()
    first, gives_up, second = [asyncio.create_task(house.call(call_id=name)) for name in "abc"]
    await house.until(lambda: len(house.line) == 2)
    gives_up.cancel()
    await house.until(gives_up.done)
    house.made[0].go_on.set()
    assert [await first, await second] == [[0, 1], [0, 1]]
    assert await house.line.dispatch(CALL, ()) == A
    placing = asyncio.create_task(house.line.dispatch(CALL, ()))
    await house.until(lambda: len(house.line) == 1)
    house.line.leave(A)  # it is placed, and has not been told
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert [health.calls for health in house.health()] == [0]
    await house.supervisor.stop()


async def test_a_replica_is_drained_and_then_removed(house: House) -> None:
    """Its call goes on to its end, new ones go elsewhere, its name is free no more."""
    house.made[0].go_on.clear()
    call = asyncio.create_task(house.call())
    await house.until(lambda: house.placed == [A])
    removing = asyncio.create_task(house.supervisor.remove(A, None))
    await house.until(lambda: house.health()[0].state == "draining")
    assert await house.call() == [0, 1]
    assert house.placed == [A, B]
    house.made[0].go_on.set()
    assert await call == [0, 1]
    await removing
    assert [health.engine_id for health in house.health()] == [B]
    assert house.forgotten == [(A, True)]
    with pytest.raises(ReplicaError, match="is the last replica"):
        await house.supervisor.remove(B, None)


async def test_draining_ends_at_its_time_out(house: House) -> None:
    """The replica is stopped under the call, which begins again on the other one."""
    house.made[0].go_on.clear()
    call = asyncio.create_task(house.call())
    await house.until(lambda: house.placed == [A])
    await house.supervisor.remove(A, 0.05)
    house.made[0].dies_at = 0
    house.made[0].go_on.set()
    assert await call == [0, 1]
    assert house.placed == [A, B]


async def test_a_replica_that_is_starting_again_can_be_removed(house: House) -> None:
    """Its start is waited for, and then it is ended: nothing runs that nobody looks after."""
    house.made[0].may_start.clear()
    house.made[0].is_dead = True
    await house.ready(1)
    house.clock.advance(1.0)
    await house.until(lambda: house.health()[0].state == "starting")
    removing = asyncio.create_task(house.supervisor.remove(A, None))
    await house.until(lambda: house.health()[0].state == "draining")
    house.made[0].may_start.set()
    await removing
    assert not house.made[0].is_running
    assert [health.engine_id for health in house.health()] == [B]


async def test_one_that_does_not_start_is_not_added(house: House) -> None:
    """The others are not affected."""
    house.starts.append(EngineStartError("no memory"))
    with pytest.raises(EngineStartError, match="no memory"):
        await house.supervisor.add()
    assert [health.engine_id for health in house.health()] == [A, B]
    assert house.forgotten == [(EngineId("e/2"), True)]
    with pytest.raises(ReplicaError, match="no replica 'e/2'; there are: e/0, e/1"):
        house.supervisor.replica(EngineId("e/2"))


async def test_stopping_ends_starts_too(house: House) -> None:
    """A replica that is being added is given up."""
    house.starts_hang = True
    adding = asyncio.create_task(house.supervisor.add())
    await house.until(lambda: len(house.made) == 3)
    await house.supervisor.stop()
    assert adding.cancelled()
    assert not any(replica.is_running for replica in house.made)


def test_each_replica_gets_cores_and_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the environment of its processes; a further one gets none, until another is gone."""
    from weft.engine.vllm_compat import names as vllm_api

    monkeypatch.setattr(vllm_api, "current_platform", SimpleNamespace(is_cpu=lambda: True))
    launcher = LocalLauncher(EngineId("e"), [(0, 1), (2, 3)], ["0", "1,2"], lambda _call, _account: None)
    one_rank: Any = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    two_ranks: Any = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
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
