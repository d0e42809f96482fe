"""What an output brings back from the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from weft.core.accounts import Account
from weft.core.class_rows import ClassRow
from weft.core.ids import CallId, ProgramId
from weft.core.kv_cache.stats import KvStats, SwapStats
from weft.core.policies.history import ProgramEnd
from weft.core.policies.queues import ScheduleStats
from weft.core.show import SchedulerState
from weft.engine.wire.control import CallKey

_ACCOUNT: Final = "weft"
_SWAP: Final = "weft_swap"

CallAccount = dict[str, Any]  # the part of an account that only the scheduler knows


class Report(NamedTuple):
    """What an output brings from the scheduler."""

    account: CallAccount | None  # of the output's own call so far
    swap: SwapStats | None  # of the engine's swap, as of this output


_NO_REPORT: Final = Report(None, None)


def encode_account(account: Account) -> CallAccount:
    """The part of an account that only the scheduler knows."""
    encoded: CallAccount = {
        "service_s": account.service_s,
        "wait_s": account.wait_s,
        "preemptions": account.preemptions,
        "swapped_tokens": account.swapped_tokens,
        "recomputed_tokens": account.recomputed_tokens,
        "fetched_tokens": account.fetched_tokens,
    }
    if account.waits:  # few calls have any
        encoded["waits"] = [list(wait) for wait in account.waits]
    return encoded


def decode_account(encoded: CallAccount, **tokens: int) -> Account:
    """The account, with the numbers of tokens that the scheduler does not know."""
    figures: dict[str, Any] = encoded | tokens
    if "waits" in figures:  # few calls have any
        figures["waits"] = tuple((start_s, length_s) for start_s, length_s in figures["waits"])
    return Account(**figures)


def attach(params: dict[str, Any] | None, report: CallAccount | SwapStats) -> dict[str, Any]:
    """Add a call's account, or the swap's figures, to the `kv_transfer_params` of its output."""
    params = {} if params is None else params
    if isinstance(report, SwapStats):
        params[_SWAP] = tuple(report)
    else:
        params[_ACCOUNT] = report
    return params


def read_report(params: Mapping[str, Any] | None) -> Report:
    """Read the `kv_transfer_params` of an output."""
    if not params:
        return _NO_REPORT
    swap = params.get(_SWAP)
    return Report(params.get(_ACCOUNT), None if swap is None else SwapStats(*swap))


# -- what the scheduler answers to control messages


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
