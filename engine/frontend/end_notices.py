"""Notices to schedulers that programs have ended."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from weft.core.ids import ProgramId
from weft.core.log import get_logger
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire import ProgramsEnded, encode_control

_MOST_UNSENT: Final = 10_000  # of an engine that does not answer; a scheduler forgets programs by itself, too


class EndNotices:
    """Sends the ends of programs to the schedulers. Ends that come while a message is under way share the next one.

    A lost notice costs memory in a scheduler and never correctness. Failures are therefore logged and not raised.

    Args:
        loop: The engine's event loop.
        send: Sends a control message to every scheduler of the engine.
    """

    def __init__(self, loop: LoopThread, send: Callable[[Mapping[str, Any]], Awaitable[object]]) -> None:
        self._loop = loop
        self._send = send
        self._lock = threading.Lock()
        self._unsent: deque[ProgramId] = deque(maxlen=_MOST_UNSENT)
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None  # the event loop itself keeps no reference

    def add(self, program_id: ProgramId) -> None:
        """A program has ended. May be called from any thread."""
        with self._lock:
            self._unsent.append(program_id)
            if self._is_sending:
                return
            self._is_sending = True
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while True:
            with self._lock:
                ended = tuple(self._unsent)
                self._unsent.clear()
                if not ended:
                    self._is_sending = False
                    return
            try:
                await self._send(encode_control(ProgramsEnded(ended)))
            except Exception as error:  # the engine is dying or shutting down, and its schedulers with it
                get_logger().debug("ended programs were not reported to a scheduler", reason=repr(error))
