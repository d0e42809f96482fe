"""The thread of an engine's event loop: its end, and coroutines that come late or are cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from weft.core.errors import EngineClosedError
from weft.engine.processes.loop_thread import LoopThread, in_thread, settled

pytestmark = pytest.mark.anyio


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    """A thread that is ended after the test."""
    thread = LoopThread("test")
    yield thread
    thread.stop()


async def answer() -> int:
    return 42


async def test_a_coroutine_that_comes_after_the_end_is_refused(thread: LoopThread) -> None:
    """Its caller would otherwise wait for ever. The coroutine is closed, so that Python does not warn of it."""
    assert thread.submit(answer()).result() == 42
    assert await thread.run(answer()) == 42
    thread.stop()
    with pytest.raises(EngineClosedError):
        thread.submit(answer())
    with pytest.raises(EngineClosedError):
        await thread.run(answer())


async def test_a_coroutine_that_runs_at_the_end_is_cancelled(thread: LoopThread) -> None:
    """Its caller learns it, whether the coroutine had begun or not."""
    begun = thread.submit(asyncio.sleep(600))
    late = thread.submit(asyncio.sleep(600))
    thread.stop()
    assert [begun.cancelled(), late.cancelled()] == [True, True]


async def test_a_task_that_begins_while_the_loop_ends_is_cancelled(thread: LoopThread) -> None:
    """For instance that of a request which comes then. Otherwise Python would destroy it as it waits."""
    begun: list[asyncio.Task[None]] = []
    is_running = threading.Event()

    async def begin_another() -> None:
        is_running.set()
        try:
            await asyncio.sleep(600)
        finally:
            begun.append(asyncio.create_task(asyncio.sleep(600)))

    thread.submit(begin_another())
    assert is_running.wait(60)
    thread.stop()
    assert [task.cancelled() for task in begun] == [True]


async def test_a_call_that_is_cancelled_as_the_loop_ends_logs_nothing(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    """Its future is cancelled, but what that shall do comes after the end of the loop, which cancels it as well."""
    future = thread.submit(asyncio.sleep(600))
    await thread.run(answer())  # it has begun
    invoke = future._invoke_callbacks  # type: ignore[attr-defined]  # as if another thread ran before it
    future._invoke_callbacks = lambda: [thread.stop(), invoke()]  # type: ignore[attr-defined]
    assert future.cancel()
    assert not thread._thread.is_alive()
    assert caplog.text == ""


async def test_a_cancelled_caller_waits_for_the_end_of_its_coroutine(thread: LoopThread) -> None:
    """What the coroutine does about its cancellation is done when the caller goes on."""
    begun, cleaned = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    async def work() -> None:
        try:
            loop.call_soon_threadsafe(begun.set)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    running = asyncio.create_task(thread.run(work()))
    await begun.wait()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert cleaned == [True]


async def test_a_caller_that_is_cancelled_twice_leaves_no_unread_error(thread: LoopThread) -> None:
    """The coroutine fails while its caller is cancelled again. asyncio must not log that nobody has read the error."""
    begun, ending, cancelled_again, logged = asyncio.Event(), asyncio.Event(), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context["message"]))
        try:
            loop.call_soon_threadsafe(begun.set)
            await asyncio.sleep(600)
        finally:
            loop.call_soon_threadsafe(ending.set)
            await cancelled_again.wait()
            raise OSError

    running = asyncio.create_task(thread.run(work()))
    await begun.wait()
    running.cancel()
    await ending.wait()
    running.cancel()
    await asyncio.sleep(0)  # its caller is cancelled again
    thread.call_soon(cancelled_again.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    del running
    await thread.run(answer())
    gc.collect()  # a task logs an unread error when it is deleted
    assert logged == []


async def test_an_error_of_a_coroutine_is_its_callers(thread: LoopThread) -> None:
    """An error that belongs to the coroutine is raised where the coroutine is awaited."""

    async def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await thread.run(fail())
    with pytest.raises(ValueError, match="wrong"):
        await settled(asyncio.ensure_future(fail()))


async def test_a_function_on_a_thread_is_waited_for_although_the_task_is_cancelled() -> None:
    """A clean-up that blocks is completed."""
    done: list[bool] = []
    waiting = asyncio.create_task(settled_append(done))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert done == [True]


async def settled_append(done: list[bool]) -> None:
    await settled(in_thread(lambda: done.append(True)))
