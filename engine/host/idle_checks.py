"""The end of programs that the engine's users have abandoned."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Final

from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.idle import IdlePrograms
from weft.engine.host.in_flight import weakly
from weft.engine.processes.loop_thread import LoopThread

_CHECKS_A_TIMEOUT: Final = 4  # so a program ends at most a quarter of its time-out late


class IdleChecks:
    """Checks the programs that have a time-out, now and then while there are any. Any thread may use it."""

    def __init__(self, loop: LoopThread, table: ProcessTable, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._table = table
        self._clock = clock
        self._programs = IdlePrograms()
        self._lock = fork_safe(threading.Lock())
        self._interval_s = math.inf  # infinite while there is no timer
        self._timer: asyncio.TimerHandle | None = None  # of the event loop only

    def __len__(self) -> int:
        return len(self._programs)

    def watch(self, program: Program) -> None:
        """Watch a program that makes its first call, if it has a time-out."""
        timeout_s = program.reports.idle_timeout_s
        if timeout_s is None:
            return
        self._programs.watch(program, self._clock())
        with self._lock:
            if timeout_s / _CHECKS_A_TIMEOUT >= self._interval_s:
                return
            self._interval_s = timeout_s / _CHECKS_A_TIMEOUT
        self._loop.call_soon(weakly(self._set_timer))

    def discard(self, program_id: ProgramId) -> None:
        """Watch a program no longer, because it has ended."""
        self._programs.discard(program_id)

    def check(self) -> None:
        """End the programs that have been idle for their time-out."""
        self._programs.check(self._clock(), self._is_busy)

    def _is_busy(self, program: Program) -> bool:
        row = self._table.get(program.program_id)
        return row is not None and row.state is ProgramState.ACTIVE

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, weakly(self._on_time))

    def _on_time(self) -> None:
        try:
            self.check()
        finally:
            with self._lock:
                if not self._programs:
                    self._interval_s, self._timer = math.inf, None
            if self._timer is not None:
                self._set_timer()
