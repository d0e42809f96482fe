"""The programs of an engine: it registers them, hears of their tools, tells observers, and ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Concatenate, Final, ParamSpec

from weft.core.errors import EngineClosedError
from weft.core.ids import ProgramId, SessionId
from weft.core.locks import fork_safe
from weft.core.log import get_logger
from weft.core.prediction.times import MOST_LETTERS
from weft.core.process_rows import ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import check_timeout
from weft.engine.host.idle_checks import IdleChecks
from weft.engine.host.in_flight import InFlightCalls, Life
from weft.engine.host.scheduler_messages import SchedulerMessages
from weft.engine.options import EngineOptions
from weft.engine.wire.control import EventKind, ProgramEvent

P = ParamSpec("P")


class Sessions:
    """A session begins with its first program and ends with its last one (Autellix §5). Any thread may use it."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._programs: dict[SessionId, set[ProgramId]] = {}

    def begin(self, info: ProgramInfo) -> None:
        with self._lock:
            self._programs.setdefault(info.session_id, set()).add(info.program_id)

    def end(self, info: ProgramInfo) -> None:
        with self._lock:
            programs = self._programs[info.session_id]
            programs.discard(info.program_id)
            if not programs:
                del self._programs[info.session_id]

    def is_open(self, session_id: SessionId) -> bool:
        """Whether a program of the session runs."""
        return session_id in self._programs

    def snapshot(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        with self._lock:
            return {session: frozenset(programs) for session, programs in self._programs.items()}


class Observers:
    """Tells observers what happens. One that fails is warned of once, and changes nothing for calls and for others."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[ProgramObserver, ...]] = {}  # by event
        self._failed: set[int] = set()

    def add(self, observer: ProgramObserver) -> None:
        """Tell this one from now on of the events that its class implements."""
        for event in _EVENTS:
            if getattr(type(observer), event) is not getattr(ProgramObserver, event):
                self._told[event] = (*self._told.get(event, ()), observer)

    def tell(self, event: Callable[Concatenate[ProgramObserver, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tell of an event, which is a method of `ProgramObserver`."""
        for observer in self._told.get(event.__name__, ()):
            try:
                getattr(observer, event.__name__)(*args, **kwargs)
            except Exception as error:
                self._warn(observer, error)

    def _warn(self, observer: ProgramObserver, error: Exception) -> None:
        if id(observer) not in self._failed:
            self._failed.add(id(observer))
            get_logger().warning("an observer of programs failed", observer=type(observer).__name__, exc_info=error)


_EVENTS: Final = tuple(name for name in vars(ProgramObserver) if not name.startswith("_"))


class Programs:
    """The programs of an engine, which call it as their `weft.core.program.state.Backend`.

    Args:
        hears_events: Whether they want to know what happens between calls.
    """

    def __init__(
        self,
        options: EngineOptions,
        life: Life,
        in_flight: InFlightCalls,
        idle: IdleChecks,
        messages: SchedulerMessages,
        *,
        hears_events: bool,
    ) -> None:
        self.observers = Observers()
        self.sessions = Sessions()
        self.life = life
        self.table = in_flight.table
        self.in_flight = in_flight
        self.idle = idle
        self.messages = messages
        self._timeout_s = options.program_timeout_s
        self._clock = options.clock
        self._hears_events = hears_events

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session, which begins with its first program (Autellix §5). Raises
        InvalidRequestError if the program's metadata have a time-out that is no time."""
        self.life.check_process()
        if self.life.is_closed:
            raise EngineClosedError
        timeout_s = info.timeout_s
        if timeout_s is None:
            given = info.metadata.get("timeout_s", self._timeout_s)
            timeout_s = check_timeout(given, "metadata['timeout_s']")
        info = replace(info, timeout_s=timeout_s)
        now_s = self._clock()
        self.table.open(info, now_s)
        self.sessions.begin(info)
        self.observers.tell(ProgramObserver.program_started, info, now_s)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort a program's calls in flight and take its row out. A session ends with its last program.

        Returns the last row, also of a program that `end_program` has ended.

        Nothing happens in a forked child: the program goes on in the parent.
        """
        if self.life.is_forked:
            return None
        self.in_flight.abort(program_id)
        self.idle.discard(program_id)
        now_s = self._clock()
        row = self.table.close(program_id, state, now_s)
        if row is not None:
            self.in_flight.abort(program_id)  # a call that came on another thread before the row was gone
            self.sessions.end(row.info)
            self.messages.program_ended(program_id, state)
            self.observers.tell(ProgramObserver.program_ended, row, state, row.end_s)
        return row or self.table.last(program_id)

    def end_program(self, program_id: ProgramId) -> bool:
        """End a program from outside, if it is open: its calls in flight and those to come raise `ProgramEndedError`.
        Returns whether it was."""
        is_open = self.table.get(program_id) is not None
        self.end_session(program_id, ProgramState.CANCELLED)
        return is_open

    # What happens between two calls. The schedulers are told if their KV policy predicts anything. What is lost costs a
    # guess. A forked child changes nothing.

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None:
        if self.life.is_forked:
            return
        started = self.table.tool_started(program_id, run, tool, self._clock())
        if started is None:
            return
        self.observers.tell(ProgramObserver.tool_started, program_id, started)
        if self._hears_events:
            name = self._learned_name(program_id, started)
            self.messages.happened(ProgramEvent(EventKind.TOOL_STARTED, program_id, name, started.number))

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None:
        if self.life.is_forked:
            return
        now_s = self._clock()
        for tool in self.table.tools_ended(program_id, runs):
            self.observers.tell(ProgramObserver.tool_ended, program_id, tool, now_s)
            if self._hears_events:
                name, took_s = self._learned_name(program_id, tool), now_s - tool.start_s
                self.messages.happened(ProgramEvent(EventKind.TOOL_ENDED, program_id, name, tool.number, took_s))

    def _learned_name(self, program_id: ProgramId, tool: RunningTool) -> str:
        """The name by which schedulers learn how long a tool takes. No API key learns another one's times."""
        row = self.table.get(program_id)
        return f"{row.info.scope if row is not None else ''}{tool.name}"[:MOST_LETTERS]

    def call_announced(self, program_id: ProgramId) -> None:
        """A program's next call comes soon."""
        if self._hears_events and not self.life.is_forked:
            self.messages.happened(ProgramEvent(EventKind.PREFETCH, program_id))

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """A running program's row."""
        return self.table.get(program_id)
