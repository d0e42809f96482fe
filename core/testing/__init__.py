"""For tests of code that uses Weft: a clock that stands still, and an engine that only keeps the process table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Final

from weft.core.ids import EngineId, ProgramId
from weft.core.process_table import Account, CallIdentity, CallRow, ProcessTable, ProgramInfo, ProgramRow, ProgramState
from weft.core.program import Program


class FakeClock:
    """A clock in seconds that stands still until it is told to go on; pass it wherever a clock is taken."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Go on by `seconds`.

        Raises:
            ValueError: backwards.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not go back, not even by {-seconds} s")
        self.now_s += seconds


class RecordingBackend:
    """A `Backend` without a model: calls take no time, cost what you say, and stand in a real process table.

    Attributes:
        table: the process table.
        started: the programs in the order they began here.
        ended: how each program ended, in order.
        calls: the calls in the order they began.
    """

    engine_id: Final = EngineId("recording")

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or FakeClock()
        self.table = ProcessTable()
        self.started: list[ProgramInfo] = []
        self.ended: list[tuple[ProgramId, ProgramState]] = []
        self.calls: list[CallIdentity] = []
        self._runs = itertools.count(1)

    def start_session(self, info: ProgramInfo) -> None:
        self.table.open(info, self.clock())
        self.started.append(info)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        self.ended.append((program_id, state))
        return self.table.close(program_id, state, self.clock())

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        return self.table.get(program_id)

    def begin(self, program: Program, run: Hashable) -> CallRow:
        """`run` begins a call, as an integration and an engine do it together; `finish` it, or leave it in flight."""
        identity = program.start_call(run)
        program.bind(self)
        call, _ = self.table.arrive(identity, self.engine_id, self.clock())
        self.calls.append(identity)
        return call

    def finish(self, program: Program, run: Hashable, call: CallRow, account: Account) -> None:
        """The call of `run` gives its result."""
        call.account = account
        self.table.leave(call, self.clock())
        program.end_call(run, call.identity)

    def call(self, program: Program, service_s: float = 0.0, parent: Hashable | None = None) -> CallIdentity:
        """One whole call, as a run of its own inside the run `parent`."""
        run = ("call", next(self._runs))
        program.start_run(run, parent)
        try:
            call = self.begin(program, run)
            self.finish(program, run, call, Account(service_s=service_s))
        finally:
            program.end_run(run)
        return call.identity


__all__ = ["FakeClock", "RecordingBackend"]
