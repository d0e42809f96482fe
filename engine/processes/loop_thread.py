"""An engine's event loop on a thread of its own.

vLLM's front end stops working when the event loop ends on which it was started. So it must not run on the user's loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import anyio

from weft.core.errors import EngineClosedError
from weft.core.locks import fork_safe

T = TypeVar("T")


class LoopThread:
    """An asyncio event loop that runs on a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = fork_safe(threading.Lock())
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Child processes inherit the signal mask. So a Ctrl-C in the terminal reaches only the host, which ends the
        # engine in order; otherwise every process of the engine would end by itself. multiprocessing unblocks SIGINT
        # when it starts its resource tracker, so the tracker is started first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_other_tasks())
        finally:
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future cancels the coroutine. Raises EngineClosedError if the
        loop is ending, or has ended."""
        with self._lock:
            if self._is_stopping:
                coroutine.close()
                raise EngineClosedError
            future: Future[T] = Future()
            self._loop.call_soon_threadsafe(self._begin, coroutine, future)
            return future

    def _begin(self, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
        """As `asyncio.run_coroutine_threadsafe`, whose future logs an error if it is cancelled while the loop ends."""
        task = self._loop.create_task(coroutine)

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                unread(task)
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        task.add_done_callback(end)
        future.add_done_callback(lambda future: self.call_soon(task.cancel) if future.cancelled() else None)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its end on the caller's loop. Raises EngineClosedError if the loop
        ends.

        If the caller is cancelled, the coroutine is cancelled, and the caller waits until it has ended.
        """
        begun: Future[asyncio.Task[T]] = Future()
        ended: Future[asyncio.Task[T]] = Future()

        async def begin() -> None:
            task = asyncio.ensure_future(coroutine)
            task.add_done_callback(ended.set_result)
            begun.set_result(task)

        def cancel(begun: Future[asyncio.Task[T]]) -> None:
            self.call_soon(begun.result().cancel)

        try:
            self.submit(begin())
        except EngineClosedError:
            coroutine.close()
            raise
        ending = asyncio.wrap_future(ended)
        try:
            await asyncio.wait([ending])
        except asyncio.CancelledError:
            begun.add_done_callback(cancel)
            try:
                await settled(ending)
            finally:  # it may be cancelled again
                unread(ending.result())
            raise
        return ending.result().result()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function on the loop. Nothing happens if the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel the tasks that still run, and end the thread. May be called twice."""
        with self._lock:  # what was submitted before this is begun before the loop stops, and is cancelled
            if not self._is_stopping:
                self._is_stopping = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        # If a task blocks the loop, the thread goes on. It is a daemon, so the host can exit nevertheless.
        if threading.current_thread() is not self._thread:  # the garbage collection of its owner may run on it
            self._thread.join(timeout=20)


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function that blocks on a daemon thread of its own. The future belongs to the running event loop.

    `asyncio.to_thread` will not do, because at exit the interpreter first waits for its threads, and from then on it
    takes no more work. A thread that is started here does not delay the exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(set_outcome: Callable[[], None]) -> None:
        if not future.done():  # it is done already if the waiting task was cancelled
            set_outcome()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # the task that waits gets every error
            set_outcome = partial(future.set_exception, error)
        else:
            set_outcome = partial(future.set_result, result)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, set_outcome)

    threading.Thread(target=run, name="weft-blocking", daemon=True).start()
    return future


def unread(future: asyncio.Future[Any]) -> None:
    """Declare that nobody waits for a future any more. Otherwise asyncio would log that nobody has read its error."""
    if not future.cancel() and not future.cancelled():
        future.exception()


async def settled(future: asyncio.Future[T]) -> T:
    """Wait until a future is done, although the waiting task is cancelled, perhaps several times. A clean-up that has
    begun is completed in this way. It then raises the task's CancelledError."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # otherwise a cancelled scope around it would cancel in each turn of the loop
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
    if cancelled is not None:
        unread(future)
        raise cancelled
    return future.result()


async def _cancel_other_tasks() -> None:
    """Cancel all tasks but this one, and those that begin meanwhile."""
    while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
