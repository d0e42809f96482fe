"""The observers of an engine's programs."""

from __future__ import annotations

from collections.abc import Callable

from weft.core.ids import ProgramId
from weft.core.log import get_logger
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.routing.refusals import Refused


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
