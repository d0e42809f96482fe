"""The programs of an engine: it registers them, hears of their tools, tells observers, and ends them."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

from weft.core.errors import EngineClosedError, EngineForkedError
from weft.core.ids import ProgramId, SessionId
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.policies import registration
from weft.core.prediction import ExecutionGraphs
from weft.core.prediction.times import MOST_LETTERS
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.process_table import ProcessTable
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import check_timeout
from weft.core.routing.refusals import Refused
from weft.core.trace.recorder import Recorder
from weft.engine.host.idle_checks import IdleChecks
from weft.engine.host.in_flight import InFlightCalls
from weft.engine.host.learning import Forecasts, HistoryFile, LearnedReports
from weft.engine.host.scheduler_messages import SchedulerMessages
from weft.engine.host.weak import weakly_async
from weft.engine.options import EngineOptions
from weft.engine.processes.fork import survive_forks
from weft.engine.processes.host import keep_exit_code_of_ctrl_c
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire.control import EventKind, ProgramEvent


class Sessions:
    """A session begins with its first program and ends with its last one (Autellix §5). Any thread may use it."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._programs: dict[SessionId, set[ProgramId]] = {}

    def begin(self, info: ProgramInfo) -> None:
        """A program begins."""
        with self._lock:
            self._programs.setdefault(info.session_id, set()).add(info.program_id)

    def end(self, info: ProgramInfo) -> bool:
        """A program has ended.

        Returns:
            Whether its session ended with it.
        """
        with self._lock:
            programs = self._programs[info.session_id]
            programs.discard(info.program_id)
            if not programs:
                del self._programs[info.session_id]
            return not programs

    def snapshot(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        with self._lock:
            return {session: frozenset(programs) for session, programs in self._programs.items()}


class Observers(ProgramObserver):
    """Tells every observer. One that fails is warned of once, and changes nothing for calls and for other observers."""

    def __init__(self) -> None:
        self._observers: tuple[ProgramObserver, ...] = ()
        self._failed: set[int] = set()

    def add(self, observer: ProgramObserver) -> None:
        """Tell this one, too, from now on."""
        self._observers = (*self._observers, observer)

    def _tell(self, tell: Callable[[ProgramObserver], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception as error:
                self._warn(observer, error)

    def _warn(self, observer: ProgramObserver, error: Exception) -> None:
        if id(observer) not in self._failed:
            self._failed.add(id(observer))
            get_logger().warning("an observer of programs failed", observer=type(observer).__name__, exc_info=error)

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        self._tell(lambda each: each.program_started(info, now_s))

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        self._tell(lambda each: each.call_arrived(identity, graph, now_s))

    def call_refused(self, identity: CallIdentity, error: BaseException, now_s: float) -> None:
        self._tell(lambda each: each.call_refused(identity, error, now_s))

    def request_refused(self, reason: Refused, tenant: str | None, now_s: float) -> None:
        self._tell(lambda each: each.request_refused(reason, tenant, now_s))

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        self._tell(lambda each: each.call_left(row, outcome, now_s))

    def tool_started(self, program_id: ProgramId, tool: RunningTool) -> None:
        self._tell(lambda each: each.tool_started(program_id, tool))

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        self._tell(lambda each: each.tool_ended(program_id, tool, now_s))

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        self._tell(lambda each: each.program_ended(row, state, now_s))


class ProgramBackend(ABC):
    """What an engine knows of its programs, and the operations that programs call: `weft.core.program.state.Backend`.

    Args:
        options: The engine's options.
        recorder: Records the programs as a trace; None: nothing does.
        history: Keeps what programs did; None: it is forgotten.
    """

    _closed: bool  # True also until the engine has started
    _process: int  # the number of the process that started the engine

    def __init__(self, options: EngineOptions, *, recorder: Recorder | None, history: HistoryFile | None) -> None:
        self._options = options
        self.policy = options.policy
        self._clock = options.clock
        self._recorder = recorder
        self._history = history
        self.table = ProcessTable()
        self._sessions = Sessions()
        self._in_flight = InFlightCalls(self.table, options.clock)
        self._observers = Observers()

    def _run_on(self, loop: LoopThread) -> None:
        """Use this event loop, once all arguments have been checked."""
        survive_forks(self)
        keep_exit_code_of_ctrl_c()
        self._loop = loop
        self._idle = IdleChecks(loop, self.table, self._clock)
        send = weakly_async(self._send_to_schedulers)
        self._messages = messages = SchedulerMessages(loop, send, self.table)
        graphs = self._history.graphs if self._history is not None else ExecutionGraphs()
        self._forecasts = Forecasts(graphs, loop, self._history)
        self.table.forecasts = graphs.rows
        self._learned = (
            LearnedReports(loop, send, self.table, self._history, lambda: messages.is_idle)
            if registration(self.policy.name).kind.learns
            else None
        )

    @abstractmethod
    async def _send_to_schedulers(self, message: Mapping[str, Any]) -> list[Any]:
        """Send a control message to every scheduler of the engine, on the engine's event loop.

        Returns:
            Their answers; None from a replica that does not run.
        """

    def _program_ended(self, info: ProgramInfo, state: ProgramState, *, session_ended: bool) -> None:
        """A program has ended, and with it perhaps its session."""
        del session_ended
        self._messages.program_ended(info.program_id, state)
        if self._learned is not None:
            self._learned.touch()

    def observe(self, observer: ProgramObserver) -> None:
        """Tell an observer what happens to programs from now on."""
        self._observers.add(observer)

    def request_refused(self, reason: Refused, tenant: str | None) -> None:
        """A server over the engine has refused a request before it made a call; see `ProgramObserver`."""
        self._observers.request_refused(reason, tenant, self._clock())

    def now_s(self) -> float:
        """Monotonic seconds, by the engine's clock."""
        return self._clock()

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a forked child of the one that started the engine."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Raise an error in a forked child. Every use of the engine calls this first, because it could hang there.

        Raises:
            EngineForkedError: This is a forked child.
        """
        if self._is_forked:
            raise EngineForkedError(self._process)

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session. A session begins with its first program (Autellix §5).

        Raises:
            InvalidRequestError: the program's metadata have a time-out that is no time.
        """
        self._check_process()
        if self._closed:
            raise EngineClosedError
        timeout_s = info.timeout_s
        if timeout_s is None:
            given = info.metadata.get("timeout_s", self._options.program_timeout_s)
            timeout_s = check_timeout(given, "metadata['timeout_s']")
        info = replace(info, timeout_s=timeout_s)
        now_s = self._clock()
        self.table.open(info, now_s)
        self._forecasts.program_started(info)
        if self._recorder is not None:
            self._recorder.begin(info)
        self._sessions.begin(info)
        self._observers.program_started(info, now_s)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort a program's calls in flight and take its row out. A session ends with its last program.

        Returns the last row, also of a program that `end_program` has ended.

        Nothing happens in a forked child: the program goes on in the parent.
        """
        if self._is_forked:
            return None
        self._in_flight.abort(program_id)
        self._idle.discard(program_id)
        now_s = self._clock()
        row = self.table.close(program_id, state, now_s)
        if row is not None:
            self._forecasts.program_ended(program_id, state)
            self._program_ended(row.info, state, session_ended=self._sessions.end(row.info))
            if self._recorder is not None:
                self._recorder.end(program_id)
            self._observers.program_ended(row, state, row.end_s)
        return row or self.table.last(program_id)

    def end_program(self, program_id: ProgramId) -> bool:
        """End a program from outside: its calls in flight and those to come raise `ProgramEndedError`.

        Returns:
            Whether it was open.
        """
        is_open = self.table.get(program_id) is not None
        self.end_session(program_id, ProgramState.CANCELLED)
        return is_open

    # What happens between two calls. The schedulers are told if their KV policy predicts anything. What is lost costs a
    # guess. A forked child changes nothing.

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None:
        """A program waits for a tool from now on."""
        if self._is_forked:
            return
        started = self.table.tool_started(program_id, run, tool, self._clock())
        if started is None:
            return
        self._observers.tool_started(program_id, started)
        if self._predicts:
            name = self._learned_name(program_id, started)
            self._messages.happened(ProgramEvent(EventKind.TOOL_STARTED, program_id, name, started.number))

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None:
        """Tools have returned."""
        if self._is_forked:
            return
        now_s = self._clock()
        for tool in self.table.tools_ended(program_id, runs):
            self._observers.tool_ended(program_id, tool, now_s)
            if self._predicts:
                name, took_s = self._learned_name(program_id, tool), now_s - tool.start_s
                self._messages.happened(ProgramEvent(EventKind.TOOL_ENDED, program_id, name, tool.number, took_s))

    def _learned_name(self, program_id: ProgramId, tool: RunningTool) -> str:
        """The name by which schedulers learn how long a tool takes. No API key learns another one's times."""
        row = self.table.get(program_id)
        return f"{row.info.scope if row is not None else ''}{tool.name}"[:MOST_LETTERS]

    def call_announced(self, program_id: ProgramId) -> None:
        """A program's next call comes soon."""
        if self._predicts and not self._is_forked:
            self._messages.happened(ProgramEvent(EventKind.PREFETCH, program_id))

    @property
    def _predicts(self) -> bool:
        return self._options.predicts

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """A running program's row."""
        return self.table.get(program_id)
