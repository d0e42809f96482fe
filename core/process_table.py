"""The process table: one row for each running program (Autellix §4.2.1), and the update of Algorithm 1.

Times are seconds of the caller's monotonic clock; durations are seconds. Every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from weft.core.accounts import Account, Attained
from weft.core.class_rows import ClassRow
from weft.core.errors import InvalidIdError, ProgramEndedError
from weft.core.ids import EngineId, ProgramId, ThreadId
from weft.core.locks import fork_safe
from weft.core.prediction import ForecastRow
from weft.core.process_rows import (
    MOST_EARLIER_ENGINES,
    CallIdentity,
    CallRow,
    ProgramInfo,
    ProgramRow,
    ProgramState,
    RunningTool,
    ThreadRow,
)
from weft.core.process_view import programs
from weft.core.tables import ShownAsTable, Table

# A program that runs for days may use a new thread for each call. Older threads without a call are summed up.
KEEP_IDLE_THREADS: Final = 256
KEEP_TOOLS: Final = 256  # running tools of a program that its row lists: those that began last


class ProcessTable(ShownAsTable):
    """One row for each running program. A row leaves the table when its program ends.

    `print(engine.table)`, a terminal and a notebook show the table together with the programs that have ended. If the
    policy learns, what the schedulers know of classes of programs is shown below it.

    Args:
        keep_ended: how many rows of ended programs stay readable by `ended()`.

    Attributes:
        forecasts: returns what forecasts of each program name rest on. The engine sets it.
        classes: the classes of programs as of the schedulers' latest report; empty if their policy keeps none.
    """

    def __init__(self, keep_ended: int = 1000) -> None:
        self._rows: dict[ProgramId, ProgramRow] = {}
        self._ended: deque[ProgramRow] = deque(maxlen=keep_ended)
        self._lock = fork_safe(threading.RLock())
        self._tool_numbers = itertools.count(1)
        self.forecasts: Callable[[], Sequence[ForecastRow]] = tuple
        self.classes: Sequence[ClassRow] = ()

    def open(self, info: ProgramInfo, now_s: float) -> None:
        """Add a row for a program that starts.

        Raises:
            InvalidIdError: the program already has a row.
        """
        with self._lock:
            if info.program_id in self._rows:
                raise InvalidIdError(f"program {info.program_id} is already in the table; ids are used once.")
            self._rows[info.program_id] = ProgramRow(info, start_s=now_s)

    def arrive(self, identity: CallIdentity, engine_id: EngineId | None, now_s: float) -> tuple[CallRow, Attained]:
        """Add a row for a call that is sent to an engine.

        Args:
            engine_id: the engine. None: a balancer chooses one later, and `assign` reports it.

        Returns:
            The call's row, and a copy of the program's attained service and wait, which travels with the call.

        Raises:
            ProgramEndedError: the program has no row, because it has ended or never started.
            InvalidIdError: the call is already in flight.
        """
        with self._lock:
            row = self._rows.get(identity.program_id)
            if row is None:
                raise ProgramEndedError(identity.program_id, identity.program_id)
            if identity.call_id in row.in_flight:
                raise InvalidIdError(f"call {identity.call_id} is already in flight; ids are used once.")
            if row.state is ProgramState.IDLE and row.calls > 0:
                row.interception_s += now_s - row.last_completion_s
            call = CallRow(identity, engine_id, arrival_s=now_s, inherited=replace(row.attained))
            thread = row.threads.get(identity.thread_id)
            if thread is None:
                thread = row.threads[identity.thread_id] = ThreadRow(identity.thread_id, arrival_s=now_s)
            row.idle_threads.pop(identity.thread_id, None)
            thread.active[identity.call_id] = row.in_flight[identity.call_id] = call
            thread.calls += 1
            row.calls += 1
            row.last_arrival_s = now_s
            row.answered_s = math.nan
            row.state = ProgramState.ACTIVE
            if engine_id is not None:
                self.assign(call, engine_id)
            return call, replace(row.attained)

    def assign(self, call: CallRow, engine_id: EngineId) -> EngineId | None:
        """Note the engine that a call goes to: at first, after its engine died, or because it was stolen.

        Returns:
            The engine that has the latest KV of the call's program, if it is another one.
        """
        with self._lock:
            if call.engine_id not in (None, engine_id):
                call.earlier_engine_ids = (*call.earlier_engine_ids, call.engine_id)[-MOST_EARLIER_ENGINES:]
            call.engine_id = engine_id
            row = self._rows.get(call.identity.program_id)
            if row is None:
                return None
            latest = row.engine_ids[-1] if row.engine_ids else engine_id
            if engine_id in row.engine_ids:
                row.engine_ids.remove(engine_id)
            row.engine_ids.append(engine_id)
            return latest if latest != engine_id and not math.isnan(row.last_completion_s) else None

    def lose_engine(self, engine_id: EngineId) -> None:
        """Note that an engine is gone or restarts, so that it holds no program's KV any more."""
        with self._lock:
            for row in self._rows.values():
                if engine_id in row.engine_ids:
                    row.engine_ids.remove(engine_id)

    def leave(self, call: CallRow, now_s: float) -> None:
        """Fold a call that has left the engine, finished or not, into its program (Alg. 1 lines 1-7).

        An aborted call counts as well, because it has used the model executor. A call whose program has ended, or that
        has left before, changes nothing.
        """
        with self._lock:
            thread_id, call_id = call.identity.thread_id, call.identity.call_id
            row = self._rows.get(call.identity.program_id)
            if row is None or row.in_flight.get(call_id) is not call:
                return
            thread = row.threads[thread_id]
            del row.in_flight[call_id], thread.active[call_id]
            thread.account += call.account
            row.account += call.account
            if not thread.active:
                row.idle_threads[thread_id] = None
                if len(row.idle_threads) > KEEP_IDLE_THREADS:
                    _fold(row, next(iter(row.idle_threads)))
            row.attained.fold(call.inherited, call.account.service_s, call.account.wait_s)
            row.last_completion_s = now_s
            if not row.in_flight:
                row.state = ProgramState.IDLE

    def settle(self, call: CallRow, account: Account) -> None:
        """Correct the cost of an aborted call that has left.

        Such a call leaves with the account of its latest output, and its scheduler reports the final account later.
        Only service, wait and preemptions are taken over. A call whose program has ended changes nothing.
        """
        with self._lock:
            row = self._rows.get(call.identity.program_id)
            more_s = account.service_s - call.account.service_s
            if row is None or call.identity.call_id in row.in_flight or more_s < 0:
                return
            more = Account(more_s, account.wait_s - call.account.wait_s, account.preemptions - call.account.preemptions)
            # The call's chain replaces its shorter self, which ended with the account so far.
            row.attained.keep_longer_chain(
                call.inherited.service_s + account.service_s, call.inherited.wait_s + account.wait_s
            )
            row.attained.total_service_s += more.service_s
            row.attained.total_wait_s += more.wait_s
            # The thread may have been folded since the call left.
            sums = row.threads.get(call.identity.thread_id, row.folded)
            sums.account += more
            row.account += more
            call.account = replace(call.account + more, waits=account.waits)

    def tool_started(self, program_id: ProgramId, run: Hashable, name: str, now_s: float) -> RunningTool | None:
        """Note that a program waits for a tool from now on.

        Returns:
            The tool; None if this run is known already, or the program has ended.
        """
        with self._lock:
            row = self._rows.get(program_id)
            if row is None or run in row.tools:
                return None
            tool = row.tools[run] = RunningTool(name, now_s, next(self._tool_numbers))
            if len(row.tools) > KEEP_TOOLS:
                del row.tools[next(iter(row.tools))]
            return tool

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> list[RunningTool]:
        """Note that tools have returned. Unknown runs are ignored.

        Returns:
            The tools that were running.
        """
        with self._lock:
            row = self._rows.get(program_id)
            return [row.tools.pop(run) for run in runs if run in row.tools] if row is not None and row.tools else []

    def close(self, program_id: ProgramId, state: ProgramState, now_s: float) -> ProgramRow | None:
        """Remove the row of a program that has ended, after folding in its calls in flight.

        Returns:
            The program's last row, or None if it has no row. It has ended with its last answer, if that is known: what
            came after is the time in which nobody said that it had ended.
        """
        with self._lock:
            row = self._rows.get(program_id)
            if row is None:
                return None
            for call in row.active.values():
                self.leave(call, now_s)
            row.tools.clear()
            del self._rows[program_id]
            row.state = state
            row.end_s = now_s if math.isnan(row.answered_s) else max(row.answered_s, row.last_completion_s)
            self._ended.appendleft(row)
            return row

    def get(self, program_id: ProgramId) -> ProgramRow | None:
        """Return the row of a running program, None if the program is not in the table."""
        return self._rows.get(program_id)

    def last(self, program_id: ProgramId) -> ProgramRow | None:
        """Return the last row of a program that has ended, None if the row is not kept any more."""
        return next((row for row in self.ended() if row.info.program_id == program_id), None)

    def ended(self) -> list[ProgramRow]:
        """Return the last rows of programs that have ended, the newest first."""
        with self._lock:
            return list(self._ended)

    def to_table(self) -> Table:
        return programs(self)

    def __repr__(self) -> str:
        return f"<weft.ProcessTable: {len(self)} programs, {len(self._ended)} have ended>"

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ProgramRow]:
        with self._lock:
            return iter(list(self._rows.values()))

    def check_integrity(self) -> None:
        """Assert that the sums over calls, threads and rows agree. For tests.

        Raises:
            AssertionError: the sums differ; the message names the program.
        """
        with self._lock:
            for program_id, row in self._rows.items():
                if program_id != row.info.program_id or not _adds_up(row):
                    raise AssertionError(f"process table row of {program_id} does not add up: {row}")


def _fold(row: ProgramRow, thread_id: ThreadId) -> None:
    """Count a thread without a call among those that have no row of their own any more."""
    del row.idle_threads[thread_id]
    thread = row.threads.pop(thread_id)
    row.folded.threads += 1
    row.folded.calls += thread.calls
    row.folded.account += thread.account


def _adds_up(row: ProgramRow) -> bool:
    """Whether the sums over calls, threads and the program agree."""
    threads = row.threads.values()
    summed = sum((thread.account for thread in threads), row.folded.account)
    return (
        row.calls == row.folded.calls + sum(thread.calls for thread in threads)
        and row.in_flight == {call_id: call for thread in threads for call_id, call in thread.active.items()}
        and set(row.idle_threads) == {thread.thread_id for thread in threads if not thread.active}
        and len(row.idle_threads) <= KEEP_IDLE_THREADS
        and math.isclose(row.account.service_s, summed.service_s, abs_tol=1e-6)
        and math.isclose(row.account.wait_s, summed.wait_s, abs_tol=1e-6)
        and math.isclose(row.attained.total_service_s, row.account.service_s, abs_tol=1e-6)
        and math.isclose(row.attained.total_wait_s, row.account.wait_s, abs_tol=1e-6)
        and row.attained.service_s <= row.attained.total_service_s + 1e-6
        and row.attained.wait_s <= row.attained.total_wait_s + 1e-6
        and (row.state is ProgramState.ACTIVE) == bool(row.in_flight)
    )
