"""What the scheduler answers to control messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from weft.core.accounts import Account
from weft.core.class_rows import ClassRow
from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.stats import KvStats
from weft.core.policies.history import ProgramEnd
from weft.core.policies.queues import ScheduleStats
from weft.core.show import SchedulerState
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


Answer = LearnedReport | KvStats | ScheduleStats | SchedulerState
T = TypeVar("T", LearnedReport, KvStats, ScheduleStats, SchedulerState)

_ADAPTERS: Final[dict[type, TypeAdapter[Any]]] = {
    kind: TypeAdapter(kind) for kind in (LearnedReport, KvStats, ScheduleStats, SchedulerState)
}


def encode_answer(answer: Answer) -> Any:
    """A scheduler's answer to a question, as msgpack carries it."""
    return to_jsonable_python(answer, inf_nan_mode="constants")


def read_answer(kind: type[T], answer: Any) -> T | None:
    """Read a scheduler's answer to a question; None if none came, because the scheduler's process does not run."""
    return _ADAPTERS[kind].validate_python(answer) if answer else None
