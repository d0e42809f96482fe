"""What a scheduler answers about its calls and about the KV of its programs, when the host process asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from weft.core.ids import CallId, ProgramId

MOST_CALLS: Final = 10_000  # calls in one answer of a scheduler, and programs in it


class LiveCall(NamedTuple):
    """A call that waits or runs."""

    call_id: CallId
    program_id: ProgramId
    level: int | None  # of the policy's queue, 0 is served first; None if the policy has one queue only
    runs: bool
    service_s: float  # so far
    wait_s: float  # so far, the present wait included
    prompt_tokens: int
    output_tokens: int  # so far, of all its sequences
    place: int | None = None  # among the calls that wait here, 1 starts next; None if it runs


class ProgramKv(NamedTuple):
    """The tokens of KV that a program holds: in its calls and, if the KV policy knows them, between its calls."""

    program_id: ProgramId
    device_tokens: int
    host_tokens: int


class SchedulerState(NamedTuple):
    """The state of one scheduler between two steps."""

    running: int  # calls, all of them
    waiting: int
    kv_used: float  # share of the device's KV cache that is in use, 0 to 1
    calls: tuple[LiveCall, ...]  # the earliest `MOST_CALLS`
    programs: tuple[ProgramKv, ...]  # programs whose KV is known; at most `MOST_CALLS`, those with calls first

    @property
    def is_cut(self) -> bool:
        """Whether there are more calls than `calls` has."""
        return self.running + self.waiting > len(self.calls)


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """A replica, and what its scheduler does. Figures are None if the scheduler did not answer."""

    engine_id: str
    model: str
    state: str  # starting, ready, draining or down
    running: int | None  # calls
    waiting: int | None
    calls: int  # in flight, of which some may be on their way
    deaths: int
    kv_used: float | None  # share of the device's KV cache that is in use, 0 to 1
    stolen: int = 0  # calls that it has taken over from busier replicas so far


@dataclass(frozen=True, slots=True)
class LiveProgram:
    """A program that is open, or that has ended.

    Attributes:
        program_id, name, session_id, tenant, parent_program_id: Its ids and names. The maker of the program chose them,
            and long ones are cut off: show them with care.
        state: While the program is open: running, waiting, tool or idle. After its end: finished, failed, cancelled or
            abandoned.
        tools: The tools that it waits for, each name once.
        level: The best queue that has one of its calls; 0 is served first. It is None if the program has no call at a
            scheduler, or the policy has one queue.
        threads: Concurrent chains of calls so far.
        calls: Calls so far.
        calls_in_flight: The calls that wait or run now.
        prompt_tokens, output_tokens: Sums over all calls so far, those in flight included.
        service_s: Seconds on the model executor along the longest chain of calls.
        wait_s: Seconds in schedulers' queues, over all calls.
        tools_s: Seconds between calls, with none in flight.
        kv_tokens: Tokens whose KV is on devices or in host memory; None if no scheduler knows.
        preemptions: Preemptions of its calls.
        engine_ids: The replicas that may hold its KV.
        age_s: Seconds from its start until now, or until its end.
        due_in_s: Seconds until it should end, negative when it is late; None without a deadline.
        ended_ago_s: Seconds since its end; None while it is open.
        place: The best place of its waiting calls among all calls that wait at the same replica; 1 starts next. It is
            None if none of its calls waits.
    """

    program_id: str
    name: str
    session_id: str
    tenant: str | None
    state: str
    tools: tuple[str, ...]
    level: int | None
    threads: int
    calls: int
    calls_in_flight: int
    prompt_tokens: int
    output_tokens: int
    service_s: float
    wait_s: float
    tools_s: float
    kv_tokens: int | None
    preemptions: int
    engine_ids: tuple[str, ...]
    age_s: float
    due_in_s: float | None
    parent_program_id: str | None
    ended_ago_s: float | None = None
    place: int | None = None

    @property
    def queue(self) -> str:
        """Where its calls are: "Q2" under a policy with several queues, else "#3" for the first waiting call, or ""."""
        if self.level is not None:
            return f"Q{self.level + 1}"
        return f"#{self.place}" if self.place is not None else ""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.ended_ago_s is None


@dataclass(frozen=True, slots=True)
class LiveState:
    """What an engine does now."""

    at_s: float
    model: str
    policy: str
    replicas: tuple[LiveReplica, ...]
    programs: tuple[LiveProgram, ...]  # open programs, at most `MOST_PROGRAMS`, in the order of their starts
    programs_total: int  # all open programs
    ended: tuple[LiveProgram, ...]  # programs that have ended, the newest first


def to_json(state: LiveState) -> dict[str, Any]:
    """The document as values that JSON can hold."""
    rows = {name: [_plain(row) for row in getattr(state, name)] for name in ("replicas", "programs", "ended")}
    return {**_plain(state), **rows}


def _plain(row: LiveState | LiveReplica | LiveProgram) -> dict[str, Any]:
    """The fields of a row. `asdict` would copy each of them, which takes ten times as long."""
    return {name: getattr(row, name) for name in row.__slots__}
