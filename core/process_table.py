"""The process table: one row per running program (Autellix §4.2.1), and Algorithm 1's update.

Times are seconds of the caller's monotonic clock; durations are seconds. Every method may be called from any thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from weft.core.errors import InvalidIdError, ProgramEndedError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId


class ProgramState(StrEnum):
    """Where a program is in its life."""

    IDLE = "idle"  # no call in flight: not begun, or inside a tool or a human's answer (interception)
    ACTIVE = "active"  # at least one call waits or runs on an engine
    FINISHED = "finished"  # the entrypoint returned
    FAILED = "failed"  # the entrypoint raised
    CANCELLED = "cancelled"  # the entrypoint was cancelled or its generator closed early


@dataclass(frozen=True, slots=True)
class Account:
    """What one call has cost so far. It travels back from the engine with the call's output."""

    service_s: float = 0.0  # time on the model executor, summed over the steps the call was part of
    wait_s: float = 0.0  # time in the scheduler's queue, before the first step and while preempted
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    swapped_tokens: int = 0  # after preemptions, tokens whose KV came back from host memory
    recomputed_tokens: int = 0  # after preemptions, tokens whose KV was computed again

    def __add__(self, other: Account) -> Account:
        return Account(
            self.service_s + other.service_s,
            self.wait_s + other.wait_s,
            self.preemptions + other.preemptions,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.swapped_tokens + other.swapped_tokens,
            self.recomputed_tokens + other.recomputed_tokens,
        )


@dataclass(slots=True)
class Attained:
    """What a program has attained: the part of its row that schedulers read.

    The front end's table and each engine's scheduler keep one, and both change it only by `fold` and `merge`.
    """

    service_s: float = 0.0  # longest observed critical path: ATLAS's scalar, Alg. 1 line 4
    total_service_s: float = 0.0  # sum over all calls: PLAS, eq. 1. Equal to service_s for a single thread
    # For anti-starvation, likewise: W_total and T_total must be of the same calls, or a wide program, whose waits add
    # up while its service does not, would always seem to starve.
    wait_s: float = 0.0  # longest chain of waits
    total_wait_s: float = 0.0  # sum over all calls

    def fold(self, inherited: Attained, account: Account) -> None:
        """Add a call that has left the engine (Alg. 1 lines 1-7).

        Args:
            inherited: what the program had attained when the call arrived (line 11, `c.service`).
            account: what the call cost (`c.model_time` is its `service_s`).
        """
        self.service_s = max(self.service_s, inherited.service_s + account.service_s)
        self.total_service_s += account.service_s
        self.wait_s = max(self.wait_s, inherited.wait_s + account.wait_s)
        self.total_wait_s += account.wait_s

    def merge(self, other: Attained) -> None:
        """Take over what another copy knows. All values only grow, so the larger is the newer."""
        self.service_s = max(self.service_s, other.service_s)
        self.total_service_s = max(self.total_service_s, other.total_service_s)
        self.wait_s = max(self.wait_s, other.wait_s)
        self.total_wait_s = max(self.total_wait_s, other.total_wait_s)


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """What is known of a program when it starts."""

    program_id: ProgramId
    session_id: SessionId
    name: str
    tenant: str | None = None
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The ids that travel with one call, handed over explicitly from the program to the engine."""

    program_id: ProgramId
    thread_id: ThreadId
    call_id: CallId
    parents: tuple[CallId, ...] = ()  # the calls that had to finish first


@dataclass(slots=True)
class CallRow:
    """A call in flight."""

    identity: CallIdentity
    engine_id: EngineId | None  # None while it waits to be placed
    arrival_s: float
    inherited: Attained  # a copy of what the program had attained on arrival (Alg. 1 line 11)
    account: Account = Account()  # as of its latest output


@dataclass(slots=True)
class ThreadRow:
    """A chain of calls of one program."""

    thread_id: ThreadId
    arrival_s: float  # of its first call
    active: dict[CallId, CallRow] = field(default_factory=dict)
    calls: int = 0  # arrived so far
    account: Account = Account()  # over its calls that have left the engine


@dataclass(slots=True)
class ProgramRow:
    """A program's row. The six metrics of §4.2.1 are `attained` (service and wait), `engine_ids`, `threads`,
    `last_arrival_s` and `last_completion_s`; the rest serves people and traces. The time between a program's first call
    and its last is in part service, in part wait, in part interception, and for the rest on the way to the engine."""

    info: ProgramInfo
    start_s: float
    state: ProgramState = ProgramState.IDLE
    attained: Attained = field(default_factory=Attained)
    engine_ids: list[EngineId] = field(default_factory=list)  # those it may have KV on, in the order of first use
    threads: dict[ThreadId, ThreadRow] = field(default_factory=dict)
    last_arrival_s: float = math.nan  # tells stale programs
    last_completion_s: float = math.nan  # tells long interceptions
    interception_s: float = 0.0  # between calls, with none in flight: in tools, in people, in the program's own code
    end_s: float = math.nan
    calls: int = 0
    account: Account = Account()  # over all calls that have left the engine

    @property
    def active(self) -> dict[CallId, CallRow]:
        """The calls in flight, over all threads."""
        threads = list(self.threads.values())  # copies: another thread may be at it
        return {call_id: call for thread in threads for call_id, call in dict(thread.active).items()}


class ProcessTable:
    """One row per running program; a row leaves when its program ends.

    Args:
        keep_ended: how many ended programs' last rows to keep for reading, the newest first out of `ended()`.
    """

    def __init__(self, keep_ended: int = 1000) -> None:
        self._rows: dict[ProgramId, ProgramRow] = {}
        self._ended: deque[ProgramRow] = deque(maxlen=keep_ended)
        self._lock = threading.RLock()

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
        """Note a call that is sent to an engine.

        Args:
            identity: the call.
            engine_id: the engine; None: a balancer has yet to choose one (`place`).
            now_s: the time.

        Returns:
            The call's row, and a copy of what its program has attained, to send along.

        Raises:
            ProgramEndedError: the program has no row any more.
            InvalidIdError: the call is already in flight.
        """
        with self._lock:
            row = self._rows.get(identity.program_id)
            if row is None:
                raise ProgramEndedError(identity.program_id, identity.program_id)
            if any(identity.call_id in other.active for other in row.threads.values()):
                raise InvalidIdError(f"call {identity.call_id} is already in flight; ids are used once.")
            thread = row.threads.get(identity.thread_id)
            if thread is None:
                thread = row.threads[identity.thread_id] = ThreadRow(identity.thread_id, arrival_s=now_s)
            if row.state is ProgramState.IDLE and row.calls > 0:
                row.interception_s += now_s - row.last_completion_s
            call = CallRow(identity, engine_id, arrival_s=now_s, inherited=replace(row.attained))
            thread.active[identity.call_id] = call
            thread.calls += 1
            row.calls += 1
            row.last_arrival_s = now_s
            row.state = ProgramState.ACTIVE
            if engine_id is not None:
                self.place(call, engine_id)
            return call, replace(row.attained)

    def place(self, call: CallRow, engine_id: EngineId) -> None:
        """Note which engine a call goes to, the first time or after it has lost its engine."""
        with self._lock:
            call.engine_id = engine_id
            row = self._rows.get(call.identity.program_id)
            if row is not None and engine_id not in row.engine_ids:
                row.engine_ids.append(engine_id)

    def lose_engine(self, engine_id: EngineId) -> None:
        """An engine is gone, or starts anew: no program has KV there any more."""
        with self._lock:
            for row in self._rows.values():
                if engine_id in row.engine_ids:
                    row.engine_ids.remove(engine_id)

    def leave(self, call: CallRow, now_s: float) -> None:
        """Fold a call that has left the engine, finished or not, into its program (Alg. 1 lines 1-7).

        A call that was aborted has used the model executor too, so it counts. A call whose program has ended, or that
        has left before, changes nothing.
        """
        with self._lock:
            row = self._rows.get(call.identity.program_id)
            if row is None:
                return
            thread = row.threads.get(call.identity.thread_id)
            if thread is None or thread.active.pop(call.identity.call_id, None) is not call:
                return
            row.attained.fold(call.inherited, call.account)
            thread.account += call.account
            row.account += call.account
            row.last_completion_s = now_s
            if not any(other.active for other in row.threads.values()):
                row.state = ProgramState.IDLE

    def settle(self, call: CallRow, account: Account) -> None:
        """A call that was aborted turns out to have cost more than its latest output said.

        Only service, wait and preemptions are taken over. A call whose program has ended changes nothing.
        """
        with self._lock:
            row = self._rows.get(call.identity.program_id)
            thread = row.threads.get(call.identity.thread_id) if row is not None else None
            more_s = account.service_s - call.account.service_s
            if row is None or thread is None or call.identity.call_id in thread.active or more_s < 0:
                return
            more = Account(more_s, account.wait_s - call.account.wait_s, account.preemptions - call.account.preemptions)
            # The longest chains are maxima, so folding the whole account in again is right for them.
            longest = replace(row.attained)
            longest.fold(call.inherited, account)
            row.attained.service_s, row.attained.wait_s = longest.service_s, longest.wait_s
            row.attained.total_service_s += more.service_s
            row.attained.total_wait_s += more.wait_s
            thread.account += more
            row.account += more
            call.account += more

    def close(self, program_id: ProgramId, state: ProgramState, now_s: float) -> ProgramRow | None:
        """Take a program's row out, folding in its calls still in flight.

        Returns:
            The row as it last was, or None if the program has no row (any more).
        """
        with self._lock:
            row = self._rows.get(program_id)
            if row is None:
                return None
            for call in row.active.values():
                self.leave(call, now_s)
            del self._rows[program_id]
            row.state = state
            row.end_s = now_s
            self._ended.appendleft(row)
            return row

    def get(self, program_id: ProgramId) -> ProgramRow | None:
        """The live row of a running program."""
        return self._rows.get(program_id)

    def ended(self) -> list[ProgramRow]:
        """The last rows of programs that have ended, the newest first."""
        with self._lock:
            return list(self._ended)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ProgramRow]:
        with self._lock:
            return iter(list(self._rows.values()))

    def check_integrity(self) -> None:
        """Assert that sums over calls, threads and rows agree. For tests.

        Raises:
            AssertionError: they do not; the message names the program.
        """
        with self._lock:
            for program_id, row in self._rows.items():
                threads = row.threads.values()
                summed = sum((thread.account for thread in threads), Account())
                ok = (
                    program_id == row.info.program_id
                    and row.calls == sum(thread.calls for thread in threads)
                    and math.isclose(row.account.service_s, summed.service_s, abs_tol=1e-6)
                    and math.isclose(row.account.wait_s, summed.wait_s, abs_tol=1e-6)
                    and math.isclose(row.attained.total_service_s, row.account.service_s, abs_tol=1e-6)
                    and math.isclose(row.attained.total_wait_s, row.account.wait_s, abs_tol=1e-6)
                    and row.attained.service_s <= row.attained.total_service_s + 1e-6
                    and row.attained.wait_s <= row.attained.total_wait_s + 1e-6
                    and (row.state is ProgramState.ACTIVE) == bool(row.active)
                )
                if not ok:
                    raise AssertionError(f"process table row of {program_id} does not add up: {row}")
