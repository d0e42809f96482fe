"""What the schedulers' policies learn: shown in the process table, and kept in a history."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from weft.core.class_rows import together
from weft.core.errors import EngineError
from weft.core.log import get_logger
from weft.core.policies.history import History
from weft.core.process_table import ProcessTable
from weft.engine.frontend.history_file import HistoryFile
from weft.engine.frontend.scheduler_messages import Batches
from weft.engine.processes.loop_thread import LoopThread, in_thread
from weft.engine.wire.answers import read_learned
from weft.engine.wire.control import TakeLearned, UseHistory, encode_control

_ASK_EVERY_S: Final = 1.0
_SAVE_EVERY_S: Final = 10.0
_LAST_S: Final = 5.0  # for the last question, at shutdown


class LearnedReports:
    """Asks the schedulers what their policies have learned, at most once a second, and only after calls or ends.

    A scheduler that starts, or starts again, gets the history, perhaps an empty one. What replicas report is in one
    history, so each of them begins with what all have seen.

    Args:
        loop: The engine's event loop.
        send: Sends a control message to every scheduler; see `SchedulerMessages`.
        table: The engine's process table.
        file: Where the history is kept; None: nowhere.
        is_told: Whether the schedulers know of all programs that have ended.
    """

    def __init__(
        self,
        loop: LoopThread,
        send: Callable[[Mapping[str, Any]], Awaitable[list[Any] | None]],
        table: ProcessTable,
        file: HistoryFile | None,
        is_told: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = loop
        self._send = send
        self._table = table
        self._file = file
        self._is_told = is_told
        self._asks = Batches[None](loop, self._ask_later)
        self._saves = Batches[None](loop, self._save_later)

    def begin(self) -> None:
        """The schedulers have started."""
        self._loop.submit(self._send_history())

    def touch(self) -> None:
        """A call has arrived, or a program has ended. May be called from any thread."""
        self._asks.add(None)

    def close(self) -> None:
        """Ask once more, and save the history. Blocks for up to `_LAST_S` seconds."""
        if self._file is None:
            return
        with suppress(EngineError, TimeoutError):  # the engine has died, or is stuck
            self._loop.submit(self._ask_last()).result(timeout=_LAST_S)
        self._file.save()

    async def _ask_later(self, _touches: tuple[None, ...]) -> None:
        await asyncio.sleep(_ASK_EVERY_S)
        await self._ask()

    async def _ask_last(self) -> None:
        while not self._is_told():  # noqa: ASYNC110  no event announces it
            await asyncio.sleep(0.01)
        await self._ask()

    async def _ask(self) -> None:
        answers = await self._send(encode_control(TakeLearned())) or []
        reports = [report for report in map(read_learned, answers) if report is not None]
        self._table.classes = together(row for report in reports for row in report.classes)
        if self._file is not None and any(report.ends for report in reports):
            for report in reports:
                self._file.add(report.model, report.ends)
            self._saves.add(None)
        if not all(report.has_history for report in reports):
            await self._send_history()

    async def _send_history(self) -> None:
        history = self._file.to_json() if self._file is not None else History().to_json()
        try:
            await self._send(encode_control(UseHistory(history)))
        except EngineError as error:  # it is asked again
            get_logger().debug("a scheduler did not get the history", reason=repr(error))

    async def _save_later(self, _changes: tuple[None, ...]) -> None:
        await asyncio.sleep(_SAVE_EVERY_S)
        if self._file is not None:
            await in_thread(self._file.save)
