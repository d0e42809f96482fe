"""What the front end tells and asks the schedulers, many items to a message."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.process_rows import CallRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire.control import AbortedCalls, ProgramEvent, ProgramEvents, ProgramsEnded, encode_control
from weft.engine.wire.reports import read_aborted

T = TypeVar("T")

_MOST_UNSENT: Final = 10_000  # of an engine that does not answer; the oldest are dropped
_ASKED: Final = 2  # A question may overtake the abort that it follows at once; a second question does not.


class Batches(Generic[T]):
    """Sends items in messages. Items that come while a message is under way share the next one.

    Failures are logged and not raised, so nothing may depend on the arrival of an item.

    Args:
        send: Sends the items that have come since the last message.
    """

    def __init__(self, loop: LoopThread, send: Callable[[tuple[T, ...]], Awaitable[None]]) -> None:
        self._loop = loop
        self._send = send
        self._lock = fork_safe(threading.Lock())
        self._unsent: deque[T] = deque(maxlen=_MOST_UNSENT)
        self._is_sending = False
        self._task: asyncio.Task[None] | None = None  # the event loop itself keeps no reference

    @property
    def is_idle(self) -> bool:
        """Whether every item was sent."""
        return not self._is_sending

    def add(self, item: T) -> None:
        """Send an item. May be called from any thread."""
        with self._lock:
            self._unsent.append(item)
            if self._is_sending:
                return
            self._is_sending = True
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._send_all())

    async def _send_all(self) -> None:
        while True:
            with self._lock:
                items = tuple(self._unsent)
                self._unsent.clear()
                if not items:
                    self._is_sending = False
                    return
            try:
                await self._send(items)
            except Exception as error:  # the engine is dying or shutting down, and its schedulers with it
                get_logger().debug("a scheduler was not reached", reason=repr(error))


class AbortedCall(NamedTuple):
    """A call that has left, and whose final account only its scheduler knows."""

    program: Program
    row: CallRow


class SchedulerMessages:
    """Tells schedulers which programs have ended and what happens between calls, and asks for the accounts of aborted
    calls.

    A lost notice costs memory in a scheduler, which forgets programs by itself, too. A lost account leaves a program's
    service a little low.

    Args:
        send: Sends a control message to every scheduler of the engine, and returns their answers; None from a replica
            that does not run, and instead of the list if the engine is gone.
    """

    def __init__(
        self, loop: LoopThread, send: Callable[[Mapping[str, Any]], Awaitable[list[Any] | None]], table: ProcessTable
    ) -> None:
        self._send = send
        self._table = table
        self._ended = Batches(loop, self._report_ends)
        self._aborted = Batches(loop, self._settle)
        self._events = Batches(loop, self._report_events)

    @property
    def is_idle(self) -> bool:
        """Whether every notice was sent and every account is in the table."""
        return self._ended.is_idle and self._aborted.is_idle

    def program_ended(self, program_id: ProgramId, state: ProgramState) -> None:
        """A program has ended in a state. May be called from any thread."""
        self._ended.add((program_id, state))

    def happened(self, event: ProgramEvent) -> None:
        """Something happened between two calls of a program. May be called from any thread."""
        self._events.add(event)

    def call_aborted(self, call: AbortedCall) -> None:
        """A call has left after an abort. May be called from any thread."""
        self._aborted.add(call)

    async def _report_ends(self, programs: tuple[tuple[ProgramId, ProgramState], ...]) -> None:
        def those(*states: ProgramState) -> tuple[ProgramId, ...]:
            return tuple(program_id for program_id, state in programs if state in states)

        abandoned, failed, cancelled = ProgramState.ABANDONED, ProgramState.FAILED, ProgramState.CANCELLED
        ended = those(*(state for state in ProgramState if state is not abandoned))
        await self._send(encode_control(ProgramsEnded(ended, those(abandoned), those(failed), those(cancelled))))

    async def _report_events(self, events: tuple[ProgramEvent, ...]) -> None:
        await self._send(encode_control(ProgramEvents(tuple(dict.fromkeys(events)))))

    async def _settle(self, calls: tuple[AbortedCall, ...]) -> None:
        """Correct the cost of aborted calls. A call that no scheduler knows never reached one."""
        waiting = {(call.row.identity.program_id, call.row.identity.call_id): call for call in calls}
        for _ in range(_ASKED):
            answers = await self._send(encode_control(AbortedCalls(tuple(waiting))))
            for answer in answers or ():
                for key, account in read_aborted(answer).items():
                    program, row = waiting.pop(key)
                    self._table.settle(row, account)
                    program.reports.call_settled(row.identity.call_id, row.account)
            if not waiting:
                return
