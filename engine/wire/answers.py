"""What the scheduler answers to control messages.

A reader takes None for an answer that did not come, because the scheduler's process does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from weft.core.accounts import Account
from weft.core.class_rows import Branch, ClassRow, together
from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.stats import COUNTS, KvStats, ToolStats
from weft.core.policies.history import ProgramEnd
from weft.core.policies.queues.levels import LevelStats, ScheduleStats
from weft.core.show import LiveCall, ProgramKv, SchedulerState
from weft.engine.wire.control import CallKey
from weft.engine.wire.reports import CallAccount, decode_account


def encode_aborted(accounts: Mapping[CallKey, CallAccount]) -> dict[str, Any]:
    """A scheduler's answer to `AbortedCalls`."""
    return {"aborted": [[*call, account] for call, account in accounts.items()]}


def read_aborted(answer: Mapping[str, Any] | None) -> dict[CallKey, Account]:
    """Read a scheduler's answer to `AbortedCalls`: the accounts of those that it knows; the tokens are not counted."""
    accounts = (answer or {}).get("aborted") or ()
    return {(ProgramId(program), CallId(call)): decode_account(account) for program, call, account in accounts}


class LearnedReport(NamedTuple):
    """What the policy of one scheduler has learned."""

    model: str
    classes: tuple[ClassRow, ...]  # of many classes, those with programs in progress first
    ends: tuple[ProgramEnd, ...]  # since the last answer
    has_history: bool  # the scheduler got a `UseHistory`


_MOST_CLASSES: Final = 100  # in an answer


def encode_learned(learned: LearnedReport) -> dict[str, Any]:
    """A scheduler's answer to `TakeLearned`."""
    return {
        "model": learned.model,
        "classes": [
            [
                *(row.tenant, row.name, row.ended, row.live, row.median_tokens, row.p95_tokens),
                *(row.branch.value, row.held),
            ]
            for row in together(learned.classes)[:_MOST_CLASSES]
        ],
        "ends": [list(end) for end in learned.ends],
        "has_history": learned.has_history,
    }


def read_learned(answer: Mapping[str, Any] | None) -> LearnedReport | None:
    """Read a scheduler's answer to `TakeLearned`."""
    if not answer:
        return None
    return LearnedReport(
        answer["model"],
        tuple(
            ClassRow(tenant, name, ended, live, median_tokens, p95_tokens, Branch(branch), held)
            for tenant, name, ended, live, median_tokens, p95_tokens, branch, held in answer["classes"]
        ),
        tuple(ProgramEnd(*end) for end in answer["ends"]),
        answer["has_history"],
    )


def encode_kv_stats(stats: KvStats) -> dict[str, Any]:
    """A scheduler's answer to `TakeKvStats`."""
    counts = {name: getattr(stats, name) for name in COUNTS}
    return {"policy": stats.policy, **counts, "tools": [list(tool) for tool in stats.tools]}


def read_kv_stats(answer: Mapping[str, Any] | None) -> KvStats | None:
    """Read a scheduler's answer to `TakeKvStats`."""
    return KvStats(**{**answer, "tools": tuple(ToolStats(*tool) for tool in answer["tools"])}) if answer else None


def encode_schedule_stats(stats: ScheduleStats) -> dict[str, Any]:
    """A scheduler's answer to `TakeScheduleStats`."""
    return {"levels": [list(level) for level in stats.levels], "promotions": stats.promotions}


def read_schedule_stats(answer: Mapping[str, Any] | None) -> ScheduleStats | None:
    """Read a scheduler's answer to `TakeScheduleStats`."""
    if not answer:
        return None
    return ScheduleStats(tuple(LevelStats(*level) for level in answer["levels"]), answer["promotions"])


def encode_state(state: SchedulerState) -> dict[str, Any]:
    """A scheduler's answer to `TakeState`."""
    return {
        "running": state.running,
        "waiting": state.waiting,
        "kv_used": state.kv_used,
        "calls": [list(call) for call in state.calls],
        "programs": [list(program) for program in state.programs],
    }


def read_state(answer: Mapping[str, Any] | None) -> SchedulerState | None:
    """Read a scheduler's answer to `TakeState`."""
    if not answer:
        return None
    calls = (LiveCall(CallId(call_id), ProgramId(program_id), *rest) for call_id, program_id, *rest in answer["calls"])
    programs = (ProgramKv(ProgramId(program_id), *rest) for program_id, *rest in answer["programs"])
    return SchedulerState(answer["running"], answer["waiting"], answer["kv_used"], tuple(calls), tuple(programs))
