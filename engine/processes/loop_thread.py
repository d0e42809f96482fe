"""An engine's event loop on a thread of its own.

vLLM's front end dies with the event loop that it was started on, so it must not run on the user's.
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

T = TypeVar("T")


class LoopThread:
    """An asyncio event loop running on a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Masks are inherited: a Ctrl-C in the terminal reaches the host alone, which then ends the engine in order,
        # instead of every process of the engine on its own. multiprocessing unblocks it again when it first starts its
        # resource tracker, so that comes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_others())
        finally:
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function on the loop; nothing happens if that is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread. May be called twice."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=20)  # if something blocks the loop: the thread is a daemon and will not keep the host


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run something that blocks on a thread of its own, for the running event loop.

    Unlike `asyncio.to_thread`, whose threads the interpreter waits for before it ends anything else, and which takes no
    more work then: what is started here cannot keep the host.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(set_it: Callable[[], None]) -> None:
        if not future.done():  # else nobody waits for it any more
            set_it()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # it goes to whoever waits
            finish = partial(future.set_exception, error)
        else:
            finish = partial(future.set_result, result)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, finish)

    threading.Thread(target=run, name="weft-blocking", daemon=True).start()
    return future


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
