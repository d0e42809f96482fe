"""The calls that an engine is busy with, from their admission to their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ProgramId
from weft.core.locks import fork_safe
from weft.core.process_table import ProcessTable
from weft.engine.frontend.calls import InFlight


class InFlightCalls:
    """Keeps the calls in flight. May be used from any thread.

    Args:
        table: The engine's process table.
        clock: Monotonic seconds.
    """

    def __init__(self, table: ProcessTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self._lock = fork_safe(threading.Lock())
        self._calls: dict[CallId, InFlight] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: CallId) -> bool:
        return call_id in self._calls

    def add(self, call: InFlight) -> None:
        """A call was admitted."""
        with self._lock:
            self._calls[call.identity.call_id] = call

    def leave(self, call: InFlight) -> bool:
        """A call has left the engine, finished or not.

        Returns:
            Whether it was in flight. Leaving twice changes nothing.
        """
        call_id = call.identity.call_id
        with self._lock:
            if self._calls.pop(call_id, None) is None:
                return False
        now_s = self._clock()
        account = call.row.account
        call.endpoint.admission.leave(now_s)
        self._table.leave(call.row, now_s)
        row = call.row
        call.program.reports.call_left(
            call_id,
            now_s,
            account,
            call.outcome,
            engine_id=row.engine_id,
            earlier_engine_ids=row.earlier_engine_ids,
        )
        call.program.log.debug(
            "call left the engine",
            thread_id=call.identity.thread_id,
            call_id=call_id,
            service_s=round(account.service_s, 6),
            wait_s=round(account.wait_s, 6),
            preemptions=account.preemptions,
        )
        return True

    def abort(self, program_id: ProgramId | None = None) -> None:
        """Abort the calls of a program that has ended; None: all calls, because the engine is being shut down."""
        with self._lock:
            calls = [call for call in self._calls.values() if program_id in (None, call.identity.program_id)]
        for call in calls:
            call.abort()

    def account(self, call_id: CallId, account: Account) -> None:
        """An output brought a call's account so far. Outputs of a call that has left come late and change nothing."""
        call = self._calls.get(call_id)
        if call is not None:
            call.row.account = account

    def assign(self, call_id: CallId, engine_id: EngineId) -> None:
        """A call was assigned to a replica."""
        call = self._calls.get(call_id)
        if call is not None:
            self._table.assign(call.row, engine_id)
