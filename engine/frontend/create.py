"""Starting an engine from a coroutine, on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import anyio.to_thread


async def start_in_thread(
    start: Callable[[], object], *, abandon: Callable[[], object], shut_down: Callable[[], object]
) -> None:
    """Start an engine without blocking the caller's event loop.

    Args:
        start: Starts the engine and blocks until it is ready.
        abandon: Called from another thread when the caller is cancelled; `start` then ends soon.
        shut_down: Ends what has started until then.
    """
    over = threading.Event()

    def run() -> None:
        try:
            start()
        finally:
            over.set()

    try:
        await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        abandon()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(over.wait)
            await anyio.to_thread.run_sync(shut_down)
        raise
