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


# -- the actor's side


class PlayedEngine:
    """A `LocalReplica` that starts at once. A call with the prompt "endless" never ends, and others answer it."""

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        self.done: list[str] = []
        self.llm: Any = None
        self.is_dead = False

    async def start(self, _timeout_s: float) -> None:
        self.done.append("start")
        self.llm = SimpleNamespace(vllm_config="config", swap_stats=None)

    async def stop(self) -> None:
        self.done.append("stop")

    async def generate(self, prompt: str, *_arguments: Any, **_keywords: Any) -> AsyncGenerator[str, None]:
        yield prompt
        if prompt == "endless":
            await asyncio.Event().wait()


def actor(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, PlayedEngine]:
    """An actor that outlives its host, and its engine."""
    import ray

    from weft.engine.replicas.ray import actor

    monkeypatch.setattr(actor, "LocalReplica", PlayedEngine)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="the actor"))
    arguments: Any = SimpleNamespace(kv_transfer_config=None, tensor_parallel_size=1, pipeline_parallel_size=1)
    more: dict[str, Any] = {"is_embedded": False, "cpus": 1.0, "hang_timeout_s": LIMIT_S, "outlives_host": True}
    host: Any = actor.ReplicaHost(EngineId("e/0"), "tiny", arguments, **more)
    return host, host._replica


async def test_another_host_takes_a_replica_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is not started again. The first host's call is aborted, and the second host hears nothing of it."""
    host, engine = actor(monkeypatch)
    assert await host.start(1.0) == "config"
    await host.submit(1, "call", "endless", None, {})
    updates = host.updates()
    assert (await anext(updates)).items == [(1, "endless")]
    later = asyncio.ensure_future(anext(updates))
    assert await host.start(1.0) == "config"
    with pytest.raises(StopAsyncIteration):
        await later
    await host.submit(2, "call", "short", None, {})
    items = [item async for update in head(host.updates(), 2) for item in update.items]
    assert [(run, item if isinstance(item, str) else item.error) for run, item in items] == [(2, "short"), (2, None)]
    assert engine.done == ["stop", "start"]


async def head(updates: AsyncGenerator[Any, None], items: int) -> AsyncGenerator[Any, None]:
    """Updates until so many items have come."""
    async for update in updates:
        yield update
        items -= len(update.items)
        if items <= 0:
            break


async def test_a_replica_without_a_host_ends(monkeypatch: pytest.MonkeyPatch, killed: list[Any]) -> None:
    """Nobody pings it any more, so it gives back what it holds."""
    host, engine = actor(monkeypatch)
    monkeypatch.setattr("weft.engine.replicas.ray.actor._PERIOD_S", 1e-4)
    await host.start(1.0)
    await until(lambda: killed == ["the actor"])
    assert engine.done == ["stop", "start", "stop"]
