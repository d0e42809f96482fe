"""What a scheduler answers about its calls and about the KV of its programs, when the host process asks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId
from weft.core.process_rows import CallRow, ProgramRow, ProgramState
from weft.core.routing.replicas import ReplicaHealth

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


# -- the document `LiveState` of an engine, made from its process table and the answers of its schedulers


MOST_PROGRAMS: Final = 500  # open programs in a document: those whose calls arrived last
MOST_ENDED: Final = 50  # programs that have ended in a document: those that ended last
_MOST_TOOLS: Final = 16
_MOST_LETTERS: Final = 200  # of a name


class LiveRow(NamedTuple):
    """A replica, and the answer of its scheduler."""

    model: str
    health: ReplicaHealth
    scheduler: SchedulerState | None  # None if it did not answer


class _Known(NamedTuple):
    """What all schedulers together have answered."""

    calls: Mapping[tuple[ProgramId, CallId], LiveCall]
    kv_tokens: Mapping[ProgramId, int]
    is_complete: bool  # every scheduler has named all its calls, so a call that none has named has not reached one


def compose(
    open_rows: Sequence[ProgramRow],
    ended_rows: Sequence[ProgramRow],
    replicas: Sequence[LiveRow],
    *,
    now_s: float,
    model: str,
    policy: str,
    scope: str = "",
) -> LiveState:
    """Make the document. It takes no lock, so the rows may change meanwhile.

    Args:
        ended_rows: The rows of programs that have ended, the newest first.
        scope: Only programs whose id begins with it are shown.
    """
    mine = [row for row in open_rows if row.info.program_id.startswith(scope)]
    shown = sorted(heapq.nlargest(MOST_PROGRAMS, mine, key=_used_s), key=lambda row: row.start_s)
    known = _known(replicas)
    ended = [row for row in ended_rows if row.info.program_id.startswith(scope)][:MOST_ENDED]
    return LiveState(
        at_s=now_s,
        model=cut(model),
        policy=policy,
        replicas=tuple(map(_replica, replicas)),
        programs=tuple(_program(row, known, now_s) for row in shown),
        programs_total=len(mine),
        ended=tuple(_program(row, known, now_s) for row in ended),
    )


def _used_s(row: ProgramRow) -> float:
    return row.start_s if math.isnan(row.last_arrival_s) else row.last_arrival_s


def _known(replicas: Sequence[LiveRow]) -> _Known:
    answers = [row.scheduler for row in replicas if row.scheduler is not None]
    kv_tokens: dict[ProgramId, int] = {}
    for answer in answers:
        for program_id, device_tokens, host_tokens in answer.programs:
            kv_tokens[program_id] = kv_tokens.get(program_id, 0) + device_tokens + host_tokens
    calls = {(call.program_id, call.call_id): call for answer in answers for call in answer.calls}
    is_complete = bool(replicas) and len(answers) == len(replicas) and not any(answer.is_cut for answer in answers)
    return _Known(calls, kv_tokens, is_complete)


def _replica(row: LiveRow) -> LiveReplica:
    health, scheduler = row.health, row.scheduler
    return LiveReplica(
        engine_id=health.engine_id,
        model=cut(row.model),
        state=str(health.state),
        running=scheduler.running if scheduler is not None else None,
        waiting=scheduler.waiting if scheduler is not None else None,
        calls=health.calls,
        deaths=health.deaths,
        kv_used=scheduler.kv_used if scheduler is not None else None,
        stolen=health.stolen,
    )


def _program(row: ProgramRow, known: _Known, now_s: float) -> LiveProgram:
    info, account, attained = row.info, row.account, row.attained
    calls = list(row.active.values())
    at_schedulers = [found for call in calls if (found := _at_scheduler(call, known)) is not None]
    tools = tuple(dict.fromkeys(cut(tool.name) for tool in row.tools_running))[:_MOST_TOOLS]
    levels = [call.level for call in at_schedulers if call.level is not None]
    places = [call.place for call in at_schedulers if call.place is not None]
    accounts = [_account(call, known) for call in calls]
    chains_s = [call.inherited.service_s + each.service_s for call, each in zip(calls, accounts, strict=True)]
    has_ended = not math.isnan(row.end_s)
    waits = row.calls > 0 and not calls and not has_ended and math.isnan(row.answered_s)
    pause_s = now_s - row.last_completion_s if waits else 0.0
    return LiveProgram(
        program_id=info.shown(info.program_id),
        name=cut(info.name),
        session_id=info.shown(info.session_id),
        tenant=info.tenant,
        state=str(row.state) if has_ended else _state(calls, at_schedulers, tools, known),
        tools=tools,
        level=min(levels, default=None),
        place=min(places, default=None),
        threads=row.thread_count,
        calls=row.calls,
        calls_in_flight=len(calls),
        prompt_tokens=account.prompt_tokens + sum(each.prompt_tokens for each in accounts),
        output_tokens=account.output_tokens + sum(each.output_tokens for each in accounts),
        service_s=max([attained.service_s, *chains_s]),
        wait_s=attained.total_wait_s + sum(each.wait_s for each in accounts),
        tools_s=row.interception_s + (pause_s if pause_s > 0 else 0.0),
        kv_tokens=None if has_ended else known.kv_tokens.get(info.program_id),
        preemptions=account.preemptions + sum(each.preemptions for each in accounts),
        engine_ids=tuple(map(str, row.engine_ids[:_MOST_TOOLS])),
        age_s=(row.end_s if has_ended else now_s) - row.start_s,
        due_in_s=None if has_ended or math.isinf(row.due_s) else row.due_s - now_s,
        parent_program_id=info.parent_program_id and info.shown(info.parent_program_id),
        ended_ago_s=now_s - row.end_s if has_ended else None,
    )


def _at_scheduler(call: CallRow, known: _Known) -> LiveCall | None:
    """What the scheduler says of a call. Two programs may have chosen one call id."""
    return known.calls.get((call.identity.program_id, call.identity.call_id))


def _account(call: CallRow, known: _Known) -> Account:
    """The account of a call in flight: the larger of what its scheduler says and what its latest output said."""
    found, account = _at_scheduler(call, known), call.account
    if found is None:
        return account
    return replace(
        account,
        service_s=max(found.service_s, account.service_s),
        wait_s=max(found.wait_s, account.wait_s),
        prompt_tokens=max(found.prompt_tokens, account.prompt_tokens),
        output_tokens=max(found.output_tokens, account.output_tokens),
    )


def _state(calls: Sequence[CallRow], found: Sequence[LiveCall], tools: Sequence[str], known: _Known) -> str:
    if not calls:
        return "tool" if tools else str(ProgramState.IDLE)
    if any(call.runs for call in found) or any(call.account.output_tokens for call in calls if not found):
        return "running"
    return "waiting" if found or known.is_complete else "running"


def cut(text: str) -> str:
    """Cut a name off after 200 letters, and replace what is not valid Unicode. Users choose names freely."""
    shown = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return shown.encode("utf-8", "replace").decode()
