"""The rows of the process table: programs, their threads, calls and tools. Times are seconds of the caller's clock."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from weft.core.accounts import Account, Attained
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.ids import CallIdentity as CallIdentity  # noqa: PLC0414  who reads rows reads ids, too
from weft.core.prediction import StaticGraph
from weft.core.process_view import facts
from weft.core.tables import ShownAsTable, Table


class ProgramState(StrEnum):
    """The state of a program."""

    IDLE = "idle"  # no call is in flight: before the first call, or during an interception (a tool, a human's answer)
    ACTIVE = "active"  # at least one call waits or runs on an engine
    FINISHED = "finished"  # the entrypoint returned, or a client over HTTP has its last answer and asks no more
    FAILED = "failed"  # the entrypoint raised
    CANCELLED = "cancelled"  # the entrypoint was cancelled or its generator closed early
    ABANDONED = "abandoned"  # nothing happened for the program's idle time-out, and nobody reported its end

    @property
    def has_ended(self) -> bool:
        """Whether the program takes no more calls."""
        return self not in (ProgramState.IDLE, ProgramState.ACTIVE)


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """The facts about a program that are known when it starts."""

    program_id: ProgramId
    session_id: SessionId
    name: str
    tenant: str | None = None
    timeout_s: float | None = None  # seconds from its first call on, after which its calls are aborted
    deadline_s: float | None = None  # seconds from its first call on within which policies try to end it
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    parent_program_id: ProgramId | None = None  # the program that started this one inside one of its runs
    graph: StaticGraph | None = None  # the steps that its author has drawn
    scope: str = ""  # what a server has put before the ids, so that those of different API keys differ

    def shown(self, an_id: str) -> str:
        """An id of the program, its session or its calls, as the program's maker knows it: every surface shows this."""
        return an_id.removeprefix(self.scope)

    @property
    def due_after_s(self) -> float:
        """Seconds from the program's first call on within which it should end; inf if it may take any time."""
        return min(limit for limit in (self.timeout_s, self.deadline_s, math.inf) if limit is not None)


MOST_EARLIER_ENGINES: Final = 4  # earlier engines that the row of a call keeps


@dataclass(slots=True)
class Answer:
    """What is known of a call's answer, less its texts.

    Attributes:
        answer_id: The id that its caller reads; "" before the answer begins.
        model: Of which model the answer says that it is; "" before it begins.
        finish_reasons: Why choices have ended, by their number: `stop`, `length`, ….
    """

    answer_id: str = ""
    model: str = ""
    finish_reasons: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class CallRow:
    """A call in flight."""

    identity: CallIdentity
    engine_id: EngineId | None  # None until the call is assigned to an engine
    arrival_s: float
    inherited: Attained  # a copy of the program's values on arrival (Alg. 1 line 11)
    account: Account = field(default_factory=Account)  # as of the call's latest output
    model: str = ""  # its name; "" if the engine does not say
    settings: Mapping[str, float] = field(default_factory=dict)  # that its request asks for: temperature, max_tokens, …
    answer: Answer = field(default_factory=Answer)
    earlier_engine_ids: tuple[EngineId, ...] = ()  # the latest engines that it was on before, the first one first


@dataclass(slots=True)
class ThreadRow:
    """A chain of calls of one program."""

    thread_id: ThreadId
    arrival_s: float  # of the thread's first call
    active: dict[CallId, CallRow] = field(default_factory=dict)  # the calls in flight
    calls: int = 0  # calls that have arrived so far
    account: Account = field(default_factory=Account)  # sum over the calls that have left the engine


class RunningTool(NamedTuple):
    """A tool that a program waits for. A human's answer counts as the tool "human"."""

    name: str
    start_s: float
    number: int = 0  # tells this run of a tool from all others in the table


@dataclass(slots=True)
class FoldedThreads:
    """The sums over the threads of a program that have no row of their own any more."""

    threads: int = 0  # a thread that continues after it was folded counts again
    calls: int = 0
    account: Account = field(default_factory=Account)


@dataclass(slots=True)
class ProgramRow(ShownAsTable):
    """The row of a program.

    Only the process table changes it.

    The six metrics of §4.2.1 are `attained` (service and wait), `engine_ids`, `threads`, `last_arrival_s` and
    `last_completion_s`. The other fields are for users and traces. The time from a program's first call to its last
    consists of service, wait, interception and the way to the engine.

    `threads` has the threads with a call in flight, and of the others those that were last in use, as many as
    `KEEP_IDLE_THREADS` of the table says. The older ones are in `folded`.
    """

    info: ProgramInfo
    start_s: float
    state: ProgramState = ProgramState.IDLE
    attained: Attained = field(default_factory=Attained)
    engine_ids: list[EngineId] = field(default_factory=list)  # engines that may hold its KV, the one used last is last
    threads: dict[ThreadId, ThreadRow] = field(default_factory=dict)
    folded: FoldedThreads = field(default_factory=FoldedThreads)
    last_arrival_s: float = math.nan  # identifies stale programs; nan before the first call
    last_completion_s: float = math.nan  # identifies long interceptions; nan before the first call has left
    answered_s: float = math.nan  # when its last answer asked for nothing more; NaN: it has not, or goes on since
    interception_s: float = 0.0  # time between calls, with none in flight: tools, humans, the program's own code
    end_s: float = math.nan
    calls: int = 0  # calls that have arrived so far
    fingerprint: str = ""  # of the system prompt and the tools of its first call
    account: Account = field(default_factory=Account)  # sum over the calls that have left the engine
    in_flight: dict[CallId, CallRow] = field(default_factory=dict)  # over all threads; `active` is a copy
    idle_threads: dict[ThreadId, None] = field(default_factory=dict, repr=False)  # without a call, longest idle first
    tools: dict[Hashable, RunningTool] = field(default_factory=dict, repr=False)  # by run, the oldest first
    due_s: float = field(init=False)  # the time by which the program should end; inf if it may take any time

    def __post_init__(self) -> None:
        self.due_s = self.start_s + self.info.due_after_s

    @property
    def active(self) -> dict[CallId, CallRow]:
        """The calls in flight, over all threads."""
        return dict(self.in_flight)  # a copy, because another thread may change the dictionary

    @property
    def tools_running(self) -> tuple[RunningTool, ...]:
        """The tools that the program waits for, in the order in which they began."""
        return tuple(self.tools.copy().values())  # a copy, because another thread may change the dictionary

    @property
    def thread_count(self) -> int:
        """How many threads the program has had."""
        return len(self.threads) + self.folded.threads

    def to_table(self) -> Table:
        return facts(self)
