"""Makes the document `LiveState` of an engine from its process table and the answers of its schedulers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId
from weft.core.process_rows import CallRow, ProgramRow, ProgramState
from weft.core.routing.replicas import ReplicaHealth
from weft.core.show.documents import LiveCall, LiveProgram, LiveReplica, LiveState, SchedulerState

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
