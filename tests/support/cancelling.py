"""Cancels an operation at each of its awaits."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")

# A task of asyncio is cancelled once or at every further await, too. A scope of anyio is cancelled at every await.
WAYS: Final = ("once", "at every further await", "anyio scope")


async def cancelled_at(wait: int, way: str, operation: Callable[[], Coroutine[Any, Any, object]]) -> bool:
    """Run an operation in a task of its own, and cancel it when it waits for the time `wait`, counted from 0.

    Returns:
        False if the operation completed before.
    """
    cancelled = False

    async def run() -> None:
        nonlocal cancelled
        task = asyncio.current_task()
        assert task is not None
        with anyio.CancelScope() as scope:

            def on_wait(number: int) -> None:
                nonlocal cancelled
                if number == wait or (number > wait and way == "at every further await"):
                    cancelled = True
                    asyncio.get_running_loop().call_soon(scope.cancel if way == "anyio scope" else task.cancel)

            await _watched(operation(), on_wait)
            await anyio.lowlevel.checkpoint_if_cancelled()  # a scope is still cancelled after a part that was shielded
        if scope.cancelled_caught:
            raise asyncio.CancelledError

    running = asyncio.create_task(run())
    await asyncio.wait([running])
    if not cancelled:
        running.result()
        return False
    assert running.cancelled(), f"the cancellation was lost: {running}"
    return True


@types.coroutine
def _watched(coroutine: Coroutine[Any, Any, T], on_wait: Callable[[int], object]) -> Generator[Any, Any, T]:
    """Run a coroutine, and call `on_wait` with a number each time it waits."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    number = 0
    while True:
        try:
            waits_for = step()
        except StopIteration as done:
            return done.value
        on_wait(number)
        number += 1
        try:
            value = yield waits_for
        except BaseException as error:  # it belongs to the coroutine
            step = partial(coroutine.throw, error)
        else:
            step = partial(coroutine.send, value)
