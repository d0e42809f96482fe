"""Starting an engine from a coroutine, on a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from weft.engine.processes.loop_thread import in_thread, settled, unread

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

P = ParamSpec("P")
E = TypeVar("E", bound="FrontEnd")


class Create(Generic[E, P]):
    """The class method `create` of an engine class, with the parameters of the class, for type checkers as well."""

    def __init__(self, init: Callable[Concatenate[E, P], None]) -> None:
        del init  # the class has it

    def __get__(self, instance: E | None, owner: type[E]) -> Callable[P, Coroutine[Any, Any, E]]:
        async def create(*arguments: P.args, **keywords: P.kwargs) -> E:
            """Start an engine without blocking the caller's event loop. Cancelling the start ends its processes."""
            engine = owner.__new__(owner)
            await start_in_thread(
                lambda: cast("Any", engine).__init__(*arguments, **keywords),
                abandon=engine._start_abandoned.set,  # noqa: SLF001
                shut_down=engine.shutdown,
            )
            return engine

        create.__signature__ = inspect.signature(owner)  # type: ignore[attr-defined]
        return create


async def start_in_thread(
    start: Callable[[], object], *, abandon: Callable[[], object], shut_down: Callable[[], object]
) -> None:
    """Start an engine without blocking the caller's event loop.

    The thread is not one of a pool, because a pool may be full, perhaps of threads that wait for another engine.

    Args:
        start: Starts the engine and blocks until it is ready.
        abandon: Called when the caller is cancelled; `start` then ends soon.
        shut_down: Ends what has started until then; does nothing if nothing has. Blocks.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing that was started is left.
        BaseException: What `start` raises.
    """
    over = threading.Event()

    def run() -> None:
        try:
            start()
        finally:
            over.set()

    def clean_up() -> None:
        over.wait()
        shut_down()

    starting = in_thread(run)
    try:
        await asyncio.wait([starting])
    except asyncio.CancelledError:
        abandon()
        try:
            await settled(in_thread(clean_up))
        finally:  # it may be cancelled again
            unread(starting)
        raise
    except BaseException:  # GeneratorExit: the coroutine was dropped, and must not wait
        abandon()
        threading.Thread(target=clean_up, name="weft-blocking", daemon=True).start()
        raise
    starting.result()
