"""The process table: one row for each running program (Autellix §4.2.1), and the update of Algorithm 1.

Times are seconds of the caller's monotonic clock; durations are seconds. Every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.class_rows import ClassRow
from weft.core.errors import InvalidIdError, ProgramEndedError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.locks import fork_safe
from weft.core.prediction import ForecastRow, StaticGraph
from weft.core.process_view import facts, programs
from weft.core.tables import ShownAsTable, Table

# A program that runs for days may use a new thread for each call. Older threads without a call are summed up.
KEEP_IDLE_THREADS: Final = 256
KEEP_TOOLS: Final = 256  # that run in a program at once, those that began last


class ProgramState(StrEnum):
    """The state of a program."""

    IDLE = "idle"  # no call is in flight: before the first call, or during an interception (a tool, a human's answer)
    ACTIVE = "active"  # at least one call waits or runs on an engine
    FINISHED = "finished"  # the entrypoint returned
    FAILED = "failed"  # the entrypoint raised
    CANCELLED = "cancelled"  # the entrypoint was cancelled or its generator closed early
    ABANDONED = "abandoned"  # nothing happened for the program's idle time-out, and nobody reported its end


@dataclass(frozen=True, slots=True)
class Account:
    """The cost of one call so far. The account travels back from the engine with the call's output."""

    service_s: float = 0.0  # seconds on the model executor, summed over the steps that the call was part of
    wait_s: float = 0.0  # seconds in the scheduler's queue, before the first step and while preempted or stalled
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed: found in the prefix cache, or fetched
    swapped_tokens: int = 0  # tokens whose KV was copied back from host memory after preemptions
    # Tokens whose KV was computed again: of the prompt, in full blocks, what an earlier call of the program had
    # computed, and what the call itself had computed before a preemption.
    recomputed_tokens: int = 0
    fetched_tokens: int = 0  # of `cached_tokens`, those whose KV was copied from host memory when the call began

    @property
    def found_tokens(self) -> int:
        """Prompt tokens that were found on the device."""
        return max(0, self.cached_tokens - self.fetched_tokens)

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
            self.fetched_tokens + other.fetched_tokens,
        )


@dataclass(slots=True)
class Attained:
    """The service that a program has attained, and its wait: the part of a row that schedulers read.

    The front end's table and each engine's scheduler keep a copy. Both change it only by `fold` and `merge`. All values
    are seconds.

    A chain is a sequence of calls of which each arrived after the one before it had left. The longest chain is the one
    with the most service. Of chains with equal service it is the one with the longest wait.
    """

    service_s: float = 0.0  # of the longest chain: the scalar of ATLAS, Alg. 1 line 4
    total_service_s: float = 0.0  # sum over all calls: PLAS, eq. 1. It equals service_s for a single thread
    # Anti-starvation compares the wait W_total with the service T_total, which must be of the same calls. The waits of
    # a wide program's parallel calls add up while its critical path does not, so it would always seem to starve.
    wait_s: float = 0.0  # of the longest chain. It falls when a chain that waited less becomes the longest
    total_wait_s: float = 0.0  # sum over all calls

    def fold(self, inherited: Attained, account: Account) -> None:
        """Add a call that has left the engine (Alg. 1 lines 1-7).

        Args:
            inherited: the program's values when the call arrived (line 11, `c.service`).
            account: the cost of the call. Its `service_s` is `c.model_time`.
        """
        self.keep_longer_chain(inherited.service_s + account.service_s, inherited.wait_s + account.wait_s)
        self.total_service_s += account.service_s
        self.total_wait_s += account.wait_s

    def merge(self, other: Attained) -> None:
        """Take over newer values from another copy. Sums and the longest chain only grow, so the larger is newer."""
        self.keep_longer_chain(other.service_s, other.wait_s)
        self.total_service_s = max(self.total_service_s, other.total_service_s)
        self.total_wait_s = max(self.total_wait_s, other.total_wait_s)

    def keep_longer_chain(self, service_s: float, wait_s: float) -> None:
        """Take over the service and the wait of a chain if it is longer than the longest one so far."""
        self.service_s, self.wait_s = max((self.service_s, self.wait_s), (service_s, wait_s))


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """The facts about a program that are known when it starts."""

    program_id: ProgramId
    session_id: SessionId
    name: str
    tenant: str | None = None
    timeout_s: float | None = None  # from its first call on; then its calls are aborted
    deadline_s: float | None = None  # from its first call on; policies try to keep it
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent_program_id: ProgramId | None = None  # the program inside one of whose runs this program runs
    graph: StaticGraph | None = None  # the steps that its author has drawn

    @property
    def due_after_s(self) -> float:
        """Seconds from the program's first call on within which it should end; inf if it may take any time."""
        return min(limit for limit in (self.timeout_s, self.deadline_s, math.inf) if limit is not None)


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """The ids that travel with one call, passed explicitly from the program to the engine."""

    program_id: ProgramId
    thread_id: ThreadId
    call_id: CallId
    parents: tuple[CallId, ...] = ()  # the calls that had to finish first


@dataclass(slots=True)
class CallRow:
    """A call in flight."""

    identity: CallIdentity
    engine_id: EngineId | None  # None until the call is assigned to an engine
    arrival_s: float
    inherited: Attained  # a copy of the program's values on arrival (Alg. 1 line 11)
    account: Account = Account()  # as of the call's latest output


@dataclass(slots=True)
class ThreadRow:
    """A chain of calls of one program."""

    thread_id: ThreadId
    arrival_s: float  # of the thread's first call
    active: dict[CallId, CallRow] = field(default_factory=dict)  # the calls in flight
    calls: int = 0  # that have arrived so far
    account: Account = Account()  # sum over the calls that have left the engine


class RunningTool(NamedTuple):
    """A tool that a program waits for, or a human's answer ("human")."""

    name: str
    start_s: float
    number: int = 0  # tells this run of a tool from others of the table


@dataclass(slots=True)
class FoldedThreads:
    """The sums over the threads of a program that have no row of their own any more."""

    threads: int = 0  # a thread that continues after it was folded counts again
    calls: int = 0
    account: Account = Account()


@dataclass(slots=True)
class ProgramRow(ShownAsTable):
    """The row of a program.

    The six metrics of §4.2.1 are `attained` (service and wait), `engine_ids`, `threads`, `last_arrival_s` and
    `last_completion_s`. The other fields are for users and traces. The time from a program's first call to its last
    consists of service, wait, interception and the way to the engine.

    `threads` has the threads with a call in flight and `KEEP_IDLE_THREADS` others, those that were last in use. The
    older ones are in `folded`.
    """

    info: ProgramInfo
    start_s: float
    state: ProgramState = ProgramState.IDLE
    attained: Attained = field(default_factory=Attained)
    engine_ids: list[EngineId] = field(default_factory=list)  # engines that may hold its KV, in the order of first use
    threads: dict[ThreadId, ThreadRow] = field(default_factory=dict)
    folded: FoldedThreads = field(default_factory=FoldedThreads)
    last_arrival_s: float = math.nan  # identifies stale programs; nan before the first call
    last_completion_s: float = math.nan  # identifies long interceptions; nan before the first call has left
    interception_s: float = 0.0  # time between calls, with none in flight: tools, humans, the program's own code
    end_s: float = math.nan
    calls: int = 0  # that have arrived so far
    fingerprint: str = ""  # of the system prompt and the tools of its first call
    account: Account = Account()  # sum over the calls that have left the engine
    in_flight: dict[CallId, CallRow] = field(default_factory=dict)  # over all threads; `active` is a copy
    _idle: dict[ThreadId, None] = field(default_factory=dict, repr=False)  # without a call, the longest idle first
    _tools: dict[Hashable, RunningTool] = field(default_factory=dict, repr=False)  # by run, the oldest first

    @property
    def active(self) -> dict[CallId, CallRow]:
        """The calls in flight, over all threads."""
        return dict(self.in_flight)  # a copy, because another thread may change the dictionary

    @property
    def due_s(self) -> float:
        """The time by which the program should have ended; inf: any."""
        return self.start_s + self.info.due_after_s

    @property
    def tools_running(self) -> tuple[RunningTool, ...]:
        """The tools that the program waits for, those that began first first."""
        return tuple(self._tools.copy().values())  # a copy, because another thread may change the dictionary

    def start_tool(self, run: Hashable, tool: RunningTool) -> bool:
        """A tool begins. Only the process table calls this. Returns whether it did not run yet."""
        if run in self._tools:
            return False
        self._tools[run] = tool
        if len(self._tools) > KEEP_TOOLS:
            del self._tools[next(iter(self._tools))]
        return True

    def end_tools(self, runs: Collection[Hashable]) -> list[RunningTool]:
        """Those of these tools that ran end. Only the process table calls this. Returns them."""
        return [self._tools.pop(run) for run in runs if run in self._tools] if self._tools else []

    @property
    def thread_count(self) -> int:
        """How many threads the program has had."""
        return len(self.threads) + self.folded.threads

    def to_table(self) -> Table:
        return facts(self)

    def enter(self, call: CallRow, now_s: float) -> None:
        """Add a call that arrives. Only the process table calls this."""
        thread_id, call_id = call.identity.thread_id, call.identity.call_id
        thread = self.threads.get(thread_id)
        if thread is None:
            thread = self.threads[thread_id] = ThreadRow(thread_id, arrival_s=now_s)
        self._idle.pop(thread_id, None)
        thread.active[call_id] = self.in_flight[call_id] = call
        thread.calls += 1
        self.calls += 1

    def exit(self, call: CallRow) -> bool:
        """Remove a call that leaves, and add its account. Only the process table calls this.

        Returns:
            Whether the call was in flight. If not, nothing changes.
        """
        thread_id, call_id = call.identity.thread_id, call.identity.call_id
        if self.in_flight.get(call_id) is not call:
            return False
        thread = self.threads[thread_id]
        del self.in_flight[call_id], thread.active[call_id]
        thread.account += call.account
        self.account += call.account
        if not thread.active:
            self._idle[thread_id] = None
            if len(self._idle) > KEEP_IDLE_THREADS:
                self._fold(next(iter(self._idle)))
        return True

    def adds_up(self) -> bool:
        """Whether the sums over calls, threads and the program agree. For tests."""
        threads = self.threads.values()
        summed = sum((thread.account for thread in threads), self.folded.account)
        return (
            self.calls == self.folded.calls + sum(thread.calls for thread in threads)
            and self.in_flight == {call_id: call for thread in threads for call_id, call in thread.active.items()}
            and set(self._idle) == {thread.thread_id for thread in threads if not thread.active}
            and len(self._idle) <= KEEP_IDLE_THREADS
            and math.isclose(self.account.service_s, summed.service_s, abs_tol=1e-6)
            and math.isclose(self.account.wait_s, summed.wait_s, abs_tol=1e-6)
            and math.isclose(self.attained.total_service_s, self.account.service_s, abs_tol=1e-6)
            and math.isclose(self.attained.total_wait_s, self.account.wait_s, abs_tol=1e-6)
            and self.attained.service_s <= self.attained.total_service_s + 1e-6
            and self.attained.wait_s <= self.attained.total_wait_s + 1e-6
            and (self.state is ProgramState.ACTIVE) == bool(self.in_flight)
        )

    def _fold(self, thread_id: ThreadId) -> None:
        del self._idle[thread_id]
        thread = self.threads.pop(thread_id)
        self.folded.threads += 1
        self.folded.calls += thread.calls
        self.folded.account += thread.account


class ProcessTable(ShownAsTable):
    """One row for each running program. A row leaves the table when its program ends.

    A terminal and a notebook show the table with the programs that have ended, `print(engine.table)` too. Below it is
    what the schedulers know of classes of programs, if their policy learns.

    Args:
        keep_ended: how many rows of ended programs stay readable by `ended()`.
    """

    def __init__(self, keep_ended: int = 1000) -> None:
        self._rows: dict[ProgramId, ProgramRow] = {}
        self._ended: deque[ProgramRow] = deque(maxlen=keep_ended)
        self._lock = fork_safe(threading.RLock())
        self._tool_numbers = itertools.count(1)
        self.forecasts: Callable[[], Sequence[ForecastRow]] = tuple  # what forecasts of each name rest on
        self.classes: Sequence[ClassRow] = ()  # as of the latest report of the schedulers; empty: they keep none

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
            identity: the call.
            engine_id: the engine. None: a balancer chooses one later, and `assign` reports it.
            now_s: the time.

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
            row.enter(call, now_s)
            row.last_arrival_s = now_s
            row.state = ProgramState.ACTIVE
            if engine_id is not None:
                self.assign(call, engine_id)
            return call, replace(row.attained)

    def assign(self, call: CallRow, engine_id: EngineId) -> None:
        """Note the engine that a call goes to, at first or after its engine died."""
        with self._lock:
            call.engine_id = engine_id
            row = self._rows.get(call.identity.program_id)
            if row is not None and engine_id not in row.engine_ids:
                row.engine_ids.append(engine_id)

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
            row = self._rows.get(call.identity.program_id)
            if row is None or not row.exit(call):
                return
            row.attained.fold(call.inherited, call.account)
            row.last_completion_s = now_s
            if not row.in_flight:
                row.state = ProgramState.IDLE

    def settle(self, call: CallRow, account: Account) -> None:
        """Correct the cost of an aborted call that has left: its final account exceeds that of its latest output.

        Only service, wait and preemptions are taken over. A call whose program has ended changes nothing.

        Args:
            call: the call's row.
            account: the final account.
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
            call.account += more

    def tool_started(self, program_id: ProgramId, run: Hashable, name: str, now_s: float) -> RunningTool | None:
        """A program waits for a tool from now on.

        Args:
            program_id: the program.
            run: the tool's run, used once.
            name: the tool's name.
            now_s: the time.

        Returns:
            The tool; None if it ran already, or the program has ended.
        """
        with self._lock:
            row = self._rows.get(program_id)
            if row is None:
                return None
            tool = RunningTool(name, now_s, next(self._tool_numbers))
            return tool if row.start_tool(run, tool) else None

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> list[RunningTool]:
        """Tools have returned. Runs that are no tools, or that have ended, change nothing.

        Returns:
            Those of the tools that ran until now.
        """
        with self._lock:
            row = self._rows.get(program_id)
            return row.end_tools(runs) if row is not None else []

    def close(self, program_id: ProgramId, state: ProgramState, now_s: float) -> ProgramRow | None:
        """Remove the row of a program that has ended, after folding in its calls in flight.

        Args:
            program_id: the program.
            state: how it ended.
            now_s: the time.

        Returns:
            The program's last row, or None if it has no row.
        """
        with self._lock:
            row = self._rows.get(program_id)
            if row is None:
                return None
            for call in row.active.values():
                self.leave(call, now_s)
            row.end_tools([*row._tools])  # noqa: SLF001  of this module
            del self._rows[program_id]
            row.state = state
            row.end_s = now_s
            self._ended.appendleft(row)
            return row

    def get(self, program_id: ProgramId) -> ProgramRow | None:
        """Return the row of a running program, None if the program is not in the table."""
        return self._rows.get(program_id)

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
                if program_id != row.info.program_id or not row.adds_up():
                    raise AssertionError(f"process table row of {program_id} does not add up: {row}")
