"""Engines that are cancelled while they start, grow, shrink or end. The replicas have processes, but no vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from cancelling import WAYS, cancelled_at
from polling import until
from stub_replicas import StubLauncher, stub_launchers

import weft
from weft.engine.processes.launch import launch_lock

pytestmark = [pytest.mark.engine, pytest.mark.anyio]  # the front end imports vLLM


@pytest.fixture
def launchers(tiny_model: Path) -> Iterator[list[StubLauncher]]:
    """The launchers of the test's engines. Afterwards every process and thread of them must be gone."""
    before = set(threading.enumerate())
    with stub_launchers(tiny_model) as launchers:
        yield launchers
        # The last thing that a thread does is to deliver its result. A thread that was not started yet is listed too.
        anyio.run(until, lambda: not any(ours(thread) for thread in set(threading.enumerate()) - before))
        for launcher in launchers:
            assert_ended(launcher)


def ours(thread: threading.Thread) -> bool:
    return thread.name.startswith(("engine-", "weft-"))


@pytest.fixture
async def multi(launchers: list[StubLauncher], tiny_model: Path) -> AsyncIterator[weft.AsyncMultiLLMEngine]:
    """An engine with two replicas."""
    async with await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=2) as engine:
        yield engine


def assert_ended(launcher: StubLauncher) -> None:
    """No process of any replica is left, and no start holds the lock."""
    for process in launcher.processes:
        process.join(60)
        assert not process.is_alive()
    assert all(engine.is_shut_down for engine in launcher.engines)
    assert not launch_lock._lock.locked()


def states(engine: weft.AsyncMultiLLMEngine) -> list[str]:
    return [health.state for health in engine.health()[engine.model]]


def alive(launcher: StubLauncher) -> int:
    return sum(process.is_alive() for process in launcher.processes)


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_creation_leaves_nothing(launchers: list[StubLauncher], tiny_model: Path, way: str) -> None:
    """Wherever the creation is cancelled, its caller sees the cancellation, after all that was started has ended."""
    engines: list[weft.AsyncMultiLLMEngine] = []

    async def create() -> None:
        engines.append(await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1))

    wait = 0
    while await cancelled_at(wait, way, create):
        wait += 1
        assert engines == []
        for launcher in launchers:
            assert alive(launcher) == 0
            assert_ended(launcher)
    assert wait > 0
    assert engines[0].is_alive
    engines[0].shutdown()


async def test_a_creation_that_is_cancelled_with_a_full_thread_pool(
    launchers: list[StubLauncher], tiny_model: Path
) -> None:
    """The start needs no thread of anyio's pool, which may be full of threads that wait for the engine."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    async with AsyncExitStack() as stack:
        borrowers = [object() for _ in range(int(limiter.available_tokens))]
        for borrower in borrowers:
            await limiter.acquire_on_behalf_of(borrower)
            stack.callback(limiter.release_on_behalf_of, borrower)
        with launch_lock.held(threading.Event()), anyio.move_on_after(0.05) as scope:  # so that it cannot be ready
            await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1)
        assert scope.cancelled_caught
        assert not launch_lock._lock.locked()
        async with await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1) as engine:
            assert states(engine) == ["ready"]


def test_a_creation_that_is_dropped_ends_what_it_started(launchers: list[StubLauncher], tiny_model: Path) -> None:
    """A coroutine that is closed must not wait, so another thread ends the engine."""

    async def begin() -> None:
        creating = weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1)
        creating.send(None)
        creating.close()

    asyncio.run(begin())


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_addition_leaves_the_other_replicas(
    multi: weft.AsyncMultiLLMEngine, launchers: list[StubLauncher], way: str
) -> None:
    """A replica that was cancelled on its way in is gone with its process when the caller sees the cancellation."""
    wait = 0
    while await cancelled_at(wait, way, multi.add_replica):
        wait += 1
        assert states(multi) == ["ready"] * 2
        assert alive(launchers[0]) == 2
    assert wait > 0
    assert states(multi) == ["ready"] * 3


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_removal_is_undone_or_complete(
    multi: weft.AsyncMultiLLMEngine, launchers: list[StubLauncher], way: str
) -> None:
    """A replica that waits for its calls serves on. One whose processes are being ended is gone."""
    group = multi._groups[multi.model]
    wait = 0
    while True:
        victim = multi.health()[multi.model][0].engine_id
        group.states._replicas[victim].calls += wait == 0  # a call in flight, so that the removal waits for it
        was_cancelled = await cancelled_at(wait, way, lambda victim=victim: multi.remove_replica(victim))
        if wait == 0:
            assert states(multi) == ["ready"] * 2
            group.states.leave(victim)
        else:
            assert len(states(multi)) == alive(launchers[0])
            assert set(states(multi)) == {"ready"}
            if len(states(multi)) == 1:
                await multi.add_replica()
        wait += 1
        if not was_cancelled:
            break


@pytest.mark.parametrize("way", WAYS)
async def test_the_parts_of_a_removal_are_cancelled_one_by_one(
    multi: weft.AsyncMultiLLMEngine, launchers: list[StubLauncher], way: str
) -> None:
    """The supervisor's own awaits, on the engine's event loop, are as safe as those of its caller."""
    supervisor = multi._groups[multi.model].supervisor

    async def remove_again_and_again() -> None:
        wait = 0
        while True:
            victim = supervisor.replicas()[0].engine_id
            was_cancelled = await cancelled_at(wait, way, lambda victim=victim: supervisor.remove(victim, None))
            if len(supervisor.replicas()) == 1:
                await supervisor.add()
            assert states(multi) == ["ready"] * 2
            if not was_cancelled:
                return
            wait += 1

    await multi._loop.run(remove_again_and_again())
    assert alive(launchers[0]) == 2


@pytest.mark.parametrize("way", WAYS)
async def test_the_parts_of_an_addition_are_cancelled_one_by_one(
    multi: weft.AsyncMultiLLMEngine, launchers: list[StubLauncher], way: str
) -> None:
    """The supervisor and the start of a replica clean up at each of their awaits."""
    supervisor = multi._groups[multi.model].supervisor

    async def add_again_and_again() -> None:
        wait = 0
        while await cancelled_at(wait, way, supervisor.add):
            wait += 1
            assert states(multi) == ["ready"] * 2
            assert not launch_lock._lock.locked()
            assert alive(launchers[0]) == 2
        assert wait > 0

    await multi._loop.run(add_again_and_again())
    assert states(multi) == ["ready"] * 3


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_shutdown_is_completed(launchers: list[StubLauncher], tiny_model: Path, way: str) -> None:
    """The end of `async with` is cancelled at each of its awaits. The engine has ended nevertheless."""
    wait = 0
    was_cancelled = True
    while was_cancelled:
        engine = await weft.AsyncMultiLLMEngine.create(tiny_model, replicas=1)
        was_cancelled = await cancelled_at(wait, way, lambda engine=engine: engine.__aexit__(None, None, None))
        assert not engine.is_alive
        assert alive(launchers[-1]) == 0
        wait += 1
    assert wait > 1
