"""What an engine learns of its programs, kept from one start to the next."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from weft.core.class_rows import together
from weft.core.errors import EngineError, HistoryError
from weft.core.files import replacing
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.policies.history import History, ProgramEnd
from weft.core.prediction import Cost, ExecutionGraphs
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.engine.host.scheduler_messages import Batches
from weft.engine.processes.loop_thread import LoopThread, in_thread
from weft.engine.wire.control import TakeLearned, UseHistory, encode_control
from weft.engine.wire.reports import LearnedReport, read_answer

_MOST_BYTES: Final = 1 << 26
_SAVE_EVERY_S: Final = 10.0


class HistoryFile:
    """A history in memory, and its file. Any thread may use it.

    A file that is damaged, or of a newer version, is set aside with a warning, and a new history begins. The file is
    replaced as a whole, so a crash leaves the old one or the new one. Only its user may read it. Of two engines that
    share a file, the last one to write wins.

    Raises:
        HistoryError: The file cannot be read, set aside or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).expanduser().absolute()  # because the application may change its working directory
        self._lock = fork_safe(threading.Lock())
        self._has_warned = False
        self._saved_graphs = 0
        self._saves: Batches[None] | None = None
        try:
            self._history = self._read()
            self._is_saved = False
            self._write()
        except OSError as error:
            raise HistoryError(
                f"the history {self._path} cannot be kept: {error.strerror or error}. Name a file in a folder that "
                "this user may read and write."
            ) from None

    @property
    def graphs(self) -> ExecutionGraphs:
        """The execution graphs. What they learn is in the file after the next `save`."""
        return self._history.graphs

    def to_json(self) -> str:
        """The history as text, without the execution graphs, which schedulers do not read."""
        with self._lock:
            return self._history.to_json(with_graphs=False)

    def save_on(self, loop: LoopThread) -> None:
        """Save what changes from now on, ten seconds later, on an engine's event loop."""
        self._saves = Batches(loop, self._save_later)

    def add(self, model: str, ends: Iterable[ProgramEnd]) -> None:
        """Programs have ended. They are in the file after the next `save`."""
        with self._lock:
            for end in ends:
                self._history[model].add(end)
                self._is_saved = False
        if not self._is_saved:
            self.changed()

    def changed(self) -> None:
        """The history, or what its graphs have learned, may not be in the file yet."""
        if self._saves is not None:
            self._saves.add(None)

    async def _save_later(self, _changes: tuple[None, ...]) -> None:
        await asyncio.sleep(_SAVE_EVERY_S)
        await in_thread(self.save)

    def save(self) -> None:
        """Write the file if the history has changed. Errors are logged, the first one as a warning."""
        with self._lock:
            try:
                self._write()
            except OSError as error:
                log = get_logger()
                (log.debug if self._has_warned else log.warning)(
                    "the history of programs cannot be written, and is kept in memory until it can",
                    path=str(self._path),
                    reason=error.strerror or str(error),
                )
                self._has_warned = True

    def _read(self) -> History:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return History()
        try:
            if len(data) > _MOST_BYTES:
                raise HistoryError(f"it has more than {_MOST_BYTES} bytes")
            return History.from_json(data)
        except HistoryError as error:
            aside = self._path.with_name(f"{self._path.name}.set-aside")
            self._path.replace(aside)
            get_logger().warning(
                "a history of programs cannot be used, and a new one begins", kept_as=str(aside), reason=str(error)
            )
            return History()

    def _write(self) -> None:
        learned = self.graphs.learned
        if self._is_saved and learned == self._saved_graphs:
            return
        with replacing(self._path, 0o600) as file:
            file.write(self._history.to_json())
            file.flush()
            os.fsync(file.fileno())
        self._is_saved, self._saved_graphs = True, learned


_LEARNED_FROM: Final = (ProgramState.FINISHED, ProgramState.FAILED)


class Forecasts(ProgramObserver):
    """Reports calls and programs to the execution graphs. Any thread may call its methods.

    Programs that were cancelled or abandoned are not learned from, because nothing says where they would have ended.
    """

    def __init__(self, graphs: ExecutionGraphs, file: HistoryFile | None, table: ProcessTable) -> None:
        self.graphs = graphs
        self._file, self._table = file, table

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        if info.graph is not None:
            self.graphs.use_hint(info.name, info.graph)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        label, tools = "", tuple[str, ...]()
        with suppress(KeyError):
            node = graph[identity.call_id]
            label, tools = node.label, node.tools
        self.graphs.arrive(graph.name, identity, label=label, tools=tools, now_s=now_s)
        if self._table.get(identity.program_id) is None:  # it has ended on another thread meanwhile
            self.graphs.end(identity.program_id, learn=False)

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        identity, account, cost = row.identity, row.account, None
        if outcome is CallState.FINISHED:
            computed = max(0, account.prompt_tokens - account.cached_tokens)
            cost = Cost(account.service_s, account.output_tokens, computed)
        self.graphs.leave(identity.program_id, identity.call_id, cost, now_s)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        self.graphs.end(row.info.program_id, learn=state in _LEARNED_FROM)
        if self._file is not None:
            self._file.changed()


_ASK_EVERY_S: Final = 1.0
_LAST_S: Final = 5.0  # for the last question, at shutdown


class LearnedReports(ProgramObserver):
    """Asks the schedulers what their policies have learned, at most once a second, and only after calls or ends.

    A scheduler that starts, or starts again, gets the history, perhaps an empty one. What replicas report is in one
    history, so each of them begins with what all have seen.

    Args:
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

    def begin(self) -> None:
        """The schedulers have started."""
        self._loop.submit(self._send_history())

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        self._asks.add(None)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
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
        found = (read_answer(LearnedReport, answer) for answer in answers)
        reports = [report for report in found if report is not None]
        self._table.classes = together(row for report in reports for row in report.classes)
        if self._file is not None:
            for report in reports:
                self._file.add(report.model, report.ends)
        if not all(report.has_history for report in reports):
            await self._send_history()

    async def _send_history(self) -> None:
        history = self._file.to_json() if self._file is not None else History().to_json()
        try:
            await self._send(encode_control(UseHistory(history)))
        except EngineError as error:  # it is asked again
            get_logger().debug("a scheduler did not get the history", reason=repr(error))
