"""For tests of code that uses Weft: a clock that the test advances, and a backend that has only a process table.

`weft.testing` hands both on to users, together with a scripted engine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from typing import Final

from weft.core.accounts import Account
from weft.core.ids import EngineId, ProgramId
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program


class FakeClock:
    """A clock in seconds that stands still until `advance`. Pass it as any `clock` argument."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # When each sleeper wakes, a number for those that wake at the same time, and how to wake it.
        self._sleepers: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and wake the sleepers whose time has come. May be called from any thread.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s; give 0 or more")
        with self._lock:
            self.now_s += seconds
            due = []
            while self._sleepers and self._sleepers[0][0] <= self.now_s:
                due.append(heapq.heappop(self._sleepers)[2])
        for wake in due:
            with suppress(RuntimeError):  # the sleeper's event loop is closed
                wake()

    async def sleep(self, seconds: float) -> None:
        """Sleep until the clock has been advanced by `seconds`."""
        loop = asyncio.get_running_loop()
        awake = asyncio.Event()
        with self._lock:
            if seconds <= 0:
                return

            def wake() -> None:
                loop.call_soon_threadsafe(awake.set)

            heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._numbers), wake))
        await awake.wait()


class RecordingBackend:
    """A `Backend` without a model. Calls take no time, have the cost that the test passes, and rows in a process table.

    Args:
        clock: returns the time in seconds. Default: a `FakeClock` at 0.

    Attributes:
        table: the process table.
        started: the programs, in the order of their first calls.
        ended: each ended program with its state, in the order of their ends.
        calls: the calls, in the order in which they began.
        tools: each tool that was reported to start, with its program.
        returned: each tool that was reported to have returned, with its program.
        announced: the programs whose next call was announced.
    """

    engine_id: Final = EngineId("recording")

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or FakeClock()
        self.table = ProcessTable()
        self.started: list[ProgramInfo] = []
        self.ended: list[tuple[ProgramId, ProgramState]] = []
        self.calls: list[CallIdentity] = []
        self.tools: list[tuple[ProgramId, str]] = []
        self.returned: list[tuple[ProgramId, str]] = []
        self.announced: list[ProgramId] = []
        self._runs = itertools.count(1)

    def start_session(self, info: ProgramInfo) -> None:
        self.table.open(info, self.clock())
        self.started.append(info)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        self.ended.append((program_id, state))
        return self.table.close(program_id, state, self.clock())

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None:
        if self.table.tool_started(program_id, run, tool, self.clock()) is not None:
            self.tools.append((program_id, tool))

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None:
        self.returned += [(program_id, tool.name) for tool in self.table.tools_ended(program_id, runs)]

    def call_announced(self, program_id: ProgramId) -> None:
        self.announced.append(program_id)

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        return self.table.get(program_id)

    def begin(self, program: Program, run: Hashable) -> CallRow:
        """Begin a call inside `run`, as an integration and an engine do together. `finish` ends the call.

        Raises:
            ProgramEndedError: the program has ended.
        """
        identity = program.reports.start_call(run)
        program.reports.bind(self)
        call, _ = self.table.arrive(identity, self.engine_id, self.clock())
        self.calls.append(identity)
        return call

    def finish(self, program: Program, run: Hashable, call: CallRow, account: Account) -> None:
        """End a call of `run` with a result and this cost."""
        call.account = account
        self.table.leave(call, self.clock())
        program.reports.end_call(run, call.identity)

    def call(self, program: Program, service_s: float = 0.0, parent: Hashable | None = None) -> CallIdentity:
        """Make one whole call, in a new run inside the run `parent`.

        Args:
            program: the program.
            service_s: the service of the call, in seconds.
            parent: the enclosing run; None: the top of the program or branch.
        """
        run = ("call", next(self._runs))
        program.reports.start_run(run, parent)
        try:
            call = self.begin(program, run)
            self.finish(program, run, call, Account(service_s=service_s))
        finally:
            program.reports.end_run(run)
        return call.identity


__all__ = ["FakeClock", "RecordingBackend"]
