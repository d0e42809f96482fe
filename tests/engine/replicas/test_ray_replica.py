"""The host's side of a replica in Ray, with an actor that is played by a test. No cluster is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import virtual_time
from polling import until

from weft.core.errors import EngineStartError
from weft.core.ids import EngineId

LIMIT_S = 50.0

pytestmark = [pytest.mark.engine, pytest.mark.anyio]  # the module under test imports vLLM


class PlayedActor:
    """A Ray actor whose methods answer as a test says.

    Args:
        answers: coroutine functions by method. A method that is not named answers None.
    """

    def __init__(self, **answers: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.answers = answers
        self.used: list[str] = []
        self.updates_to_come: asyncio.Queue[Any] = asyncio.Queue()
        self.updates = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._updates))

    async def _updates(self) -> Any:
        while True:
            yield self._next_update()

    async def _next_update(self) -> Any:
        update = await self.updates_to_come.get()
        if isinstance(update, Exception):
            raise update
        return update

    def __getattr__(self, method: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            self.used.append(method)
            if method in self.answers:
                return await self.answers[method](*arguments)
            return None

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(answer(*arguments)))


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were killed. Ray itself would start a cluster before it kills one."""
    import ray

    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    return killed


def replica(make_actor: Callable[[], Any]) -> Any:
    from weft.engine.replicas.ray.replica import RayReplica

    return RayReplica(
        EngineId("e/0"), make_actor=make_actor, needs="num_cpus 1", hang_timeout_s=LIMIT_S, on_account=lambda *_: None
    )


@pytest.mark.parametrize("error", [ValueError("unknown option"), RuntimeError("no connection")])
async def test_ray_refuses_to_make_an_actor(error: Exception) -> None:
    """The start fails like any other, with a typed error, and may be tried again: nothing is left of it."""

    def refuse() -> Any:
        raise error

    failing = replica(refuse)
    for _ in range(2):
        with pytest.raises(EngineStartError, match=f"replica e/0 did not start in Ray: {error} ") as caught:
            await failing.start(1.0)
        assert caught.value.__cause__ is error
    assert failing.llm is None


async def test_an_actor_whose_start_fails_is_ended(killed: list[Any]) -> None:
    """It would keep its resources, and the next start would find none."""

    async def fail(_timeout_s: float) -> None:
        raise RuntimeError("no memory")

    actor = PlayedActor(start=fail)
    with pytest.raises(EngineStartError, match="did not start in Ray: no memory"):
        await replica(lambda: actor).start(1.0)
    assert actor.used[-1] == "stop"
    assert killed == [actor]


async def test_updates_that_cannot_be_read_are_a_death() -> None:
    """Ray fails to unpickle an update, for example. The calls end at once; without updates they would wait for ever."""
    from weft.engine.replicas.base import ReplicaGoneError

    actor = PlayedActor()
    running = replica(lambda: actor)
    await running.start(1.0)
    outputs = running.generate("prompt", None, "r")
    waiting = asyncio.ensure_future(anext(outputs))
    await until(lambda: "submit" in actor.used)
    actor.updates_to_come.put_nowait(ModuleNotFoundError("no module 'old'"))
    with pytest.raises(ReplicaGoneError):
        await waiting
    assert running.is_dead
    assert running.why_dead() == "its updates cannot be read: ModuleNotFoundError: no module 'old'"
    await running.stop()


def test_an_actor_that_hangs_is_a_death() -> None:
    """Its process is stopped, for example. Its calls end, and it is killed without the grace to end in order."""
    from weft.engine.replicas.base import ReplicaGoneError

    hangs = False

    async def ping() -> None:
        if hangs:
            await asyncio.Event().wait()

    async def scenario() -> PlayedActor:
        nonlocal hangs
        actor = PlayedActor(ping=ping)
        running = replica(lambda: actor)
        await running.start(1.0)
        outputs = running.generate("prompt", None, "r")
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(10 * LIMIT_S)
        assert not running.is_dead
        hangs = True
        await asyncio.sleep(LIMIT_S / 2)
        assert not running.is_dead
        with pytest.raises(ReplicaGoneError):
            await waiting
        assert running.is_dead
        assert running.why_dead() == "its Ray actor hung: no answer for 50 s; it was killed"
        running.detach()
        with pytest.raises(ReplicaGoneError):
            await anext(running.generate("prompt", None, "s"))
        return actor

    assert "stop" not in virtual_time.run(scenario()).used


class SlowToCancel:
    """The replica in the actor. The first run of a call ends some time after it was cancelled, the next ones answer."""

    is_dead, llm = False, None

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.may_end, self.may_answer = asyncio.Event(), asyncio.Event()

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[str, None]:
        self.begun += 1
        if self.begun > 1:
            await self.may_answer.wait()
            yield "answer"
            return
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.ended += 1


async def test_a_call_that_comes_back_is_apart_from_its_run_that_is_being_cancelled() -> None:
    """Stealing may move a call away and back. The end of its first run must not count as the end of its second."""
    from weft.engine.replicas.ray.actor import ReplicaHost
    from weft.engine.vllm_compat.names import AsyncEngineArgs

    inner: Any = SlowToCancel()
    host = ReplicaHost(EngineId("e/0"), "m", AsyncEngineArgs(model="m"), is_embedded=False, cpus=1, hang_timeout_s=None)
    host._replica = inner
    actor = PlayedActor(submit=host.submit, abort=host.abort)

    async def pass_on() -> None:
        async for update in host.updates():
            actor.updates_to_come.put_nowait(update)

    passing = asyncio.ensure_future(pass_on())
    running = replica(lambda: actor)
    await running.start(1.0)
    first = asyncio.ensure_future(anext(running.generate("prompt", None, "r")))
    await until(lambda: inner.begun == 1)
    first.cancel()
    await asyncio.wait([first])
    outputs = running.generate("prompt", None, "r")
    second = asyncio.ensure_future(anext(outputs))
    await until(lambda: inner.begun == 2)
    inner.may_end.set()
    await until(lambda: inner.ended == 1)
    inner.may_answer.set()
    assert await second == "answer"
    assert [output async for output in outputs] == []
    passing.cancel()
    running.detach()
