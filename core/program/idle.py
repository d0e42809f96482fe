"""Programs whose end may not be reported: they end when nothing has happened in them for their time-out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.program.handle import Program


@dataclass(slots=True)
class _Watched:
    program: Program
    timeout_s: float
    reports: int  # that the program had got at `since_s`
    since_s: float


class IdlePrograms:
    """Watches the programs that have a time-out. A program is idle while it gets no report and no call is in flight.

    A check costs time in proportion to the programs that are watched. Any thread may use this object.
    """

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._watched: dict[ProgramId, _Watched] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, program: Program, now_s: float) -> None:
        """Watch a program from now on, if it has a time-out. Watching it twice changes nothing."""
        timeout_s = program.reports.idle_timeout_s
        if timeout_s is not None:
            with self._lock:
                watched = _Watched(program, timeout_s, program.reports.count, now_s)
                self._watched.setdefault(program.program_id, watched)

    def discard(self, program_id: ProgramId) -> None:
        """Watch a program no longer, because it has ended."""
        with self._lock:
            self._watched.pop(program_id, None)

    def check(self, now_s: float, is_busy: Callable[[Program], bool]) -> None:
        """End the programs that have been idle for their time-out since an earlier check.

        Args:
            now_s: the time, in seconds of the monotonic clock that `watch` gets its times from.
            is_busy: whether a call of a program is in flight.
        """
        with self._lock:
            watched = list(self._watched.values())
        for each in watched:
            reports = each.program.reports.count
            if reports != each.reports or is_busy(each.program):
                each.reports, each.since_s = reports, now_s
            elif now_s - each.since_s >= each.timeout_s:
                each.program.reports.abandon(reports)
                if each.program.state.has_ended:  # perhaps ended by someone else
                    self.discard(each.program.program_id)
