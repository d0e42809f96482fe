"""The wire format: the only module that reads or writes what travels between the host and vLLM's scheduler process.

- A call carries a `CallHeader` to the scheduler, in `SamplingParams.extra_args` (`vllm_xargs` of a chat request), which
  takes scalars and flat lists.
- Outputs carry a `Report` back, in `RequestOutput.kv_transfer_params`, the one field of an output that a scheduler
  plugin can fill.
- Control messages go to the scheduler on a channel of their own (`weft.engine.vllm_compat.control`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from weft.core.errors import InvalidIdError, InvalidRequestError
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId, check_id
from weft.core.kv_cache.stats import SwapStats
from weft.core.process_table import Account, Attained, CallIdentity

ExtraArgs = dict[str, str | int | float | list[str | int | float]]

# -- to the scheduler, with a call


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What a scheduler is told of a call."""

    identity: CallIdentity
    attained: Attained = field(default_factory=Attained)  # of the program, as of the call's arrival
    session_id: SessionId | None = None  # travels as vLLM's own `session_id`, not in `extra_args`
    program_name: str = ""
    tenant: str | None = None
    program_calls: int = 0  # of the program so far, on all engines, this one included; 0 if unknown
    time_left_s: float = math.inf  # until the call's deadline
    ends_program: bool = False  # the program ends with this call


_IDS: Final = ("program_id", "thread_id", "call_id")
_TEXTS: Final = ("program_name", "tenant")
_SECONDS: Final = ("service_s", "total_service_s", "wait_s", "total_wait_s", "time_left_s")


def encode_call(header: CallHeader) -> ExtraArgs:
    """The `extra_args` of a call. A value that is unknown or has its default is left out."""
    identity, attained = header.identity, header.attained
    args: ExtraArgs = {
        "program_id": identity.program_id,
        "thread_id": identity.thread_id,
        "call_id": identity.call_id,
        "parents": list(identity.parents),
        "service_s": attained.service_s,
        "total_service_s": attained.total_service_s,
        "wait_s": attained.wait_s,
        "total_wait_s": attained.total_wait_s,
    }
    if header.program_name:
        args["program_name"] = header.program_name
    if header.tenant is not None:
        args["tenant"] = header.tenant
    if header.program_calls:
        args["program_calls"] = header.program_calls
    if header.time_left_s < math.inf:
        args["time_left_s"] = header.time_left_s
    if header.ends_program:
        args["program_end"] = 1
    return args


def decode_call(extra_args: Mapping[str, Any] | None, request_id: str, session_id: str | None) -> CallHeader:
    """Read the header of a call inside the scheduler.

    Never raises, because an exception there ends the engine. A program id that is missing or malformed falls back to
    the session and then to the request, so that a request of a client without programs is a program of its own. A
    number that makes no sense counts as unknown.
    """
    args = extra_args or {}
    program_id = _text(args.get("program_id")) or session_id or request_id
    parents = args.get("parents")
    identity = CallIdentity(
        program_id=ProgramId(program_id),
        thread_id=ThreadId(_text(args.get("thread_id")) or program_id),
        call_id=CallId(_text(args.get("call_id")) or request_id),
        parents=tuple(CallId(p) for p in parents if _text(p)) if isinstance(parents, list) else (),
    )
    service_s, wait_s = _seconds(args.get("service_s")), _seconds(args.get("wait_s"))
    calls = args.get("program_calls")
    return CallHeader(
        identity,
        Attained(
            service_s=service_s,
            total_service_s=max(_seconds(args.get("total_service_s")), service_s),
            wait_s=wait_s,
            total_wait_s=max(_seconds(args.get("total_wait_s")), wait_s),
        ),
        session_id=SessionId(session_id) if session_id else None,
        program_name=_text(args.get("program_name")),
        tenant=_text(args.get("tenant")) or None,
        program_calls=calls if isinstance(calls, int) and calls > 0 else 0,
        time_left_s=_seconds(args.get("time_left_s")) or math.inf,
        ends_program=args.get("program_end") in (1, True),
    )


def check_call(extra_args: Mapping[str, Any], session_id: object = None) -> None:
    """Check the header that a client sends, where the client can still be told of a mistake.

    Raises:
        InvalidIdError: An id, name or tenant cannot travel, or `parents` is not a list of ids.
        InvalidRequestError: A time is not a number of seconds, 0 or more, `program_calls` is not a number of calls, or
            `program_end` is not 0 or 1.
    """
    for name in (*_IDS, *_TEXTS):
        if name in extra_args:
            check_id(extra_args[name], name)
    if session_id is not None:
        check_id(session_id, "session_id")
    parents = extra_args.get("parents", [])
    if not isinstance(parents, list):
        raise InvalidIdError(f"parents must be a list of call ids, not {type(parents).__name__}.")
    for parent in parents:
        check_id(parent, "each of parents")
    for name in _SECONDS:
        value = extra_args.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidRequestError(f"{name} must be a number of seconds, 0 or more, not {value!r:.80}.")
    calls = extra_args.get("program_calls", 0)
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
        raise InvalidRequestError(f"program_calls must be a number of calls, 0 or more, not {calls!r:.80}.")
    if extra_args.get("program_end", 0) not in (0, 1):
        raise InvalidRequestError(
            f"program_end must be 1 on a program's last call, not {extra_args['program_end']!r:.80}."
        )


# -- back from the scheduler, with an output

_ACCOUNT: Final = "weft"
_ABORTED: Final = "weft_aborted"
_SWAP: Final = "weft_swap"

CallAccount = dict[str, Any]  # the part of an account that only the scheduler knows


class Report(NamedTuple):
    """What an output brings from the scheduler."""

    account: CallAccount | None  # of the output's own call so far
    aborted: dict[CallId, Account]  # of calls that were aborted and had no last output; their tokens are unknown
    swap: SwapStats | None  # of the engine's swap, as of this output


_NO_REPORT: Final = Report(None, {}, None)


def encode_account(account: Account) -> CallAccount:
    """The part of an account that only the scheduler knows."""
    return {
        "service_s": account.service_s,
        "wait_s": account.wait_s,
        "preemptions": account.preemptions,
        "swapped_tokens": account.swapped_tokens,
        "recomputed_tokens": account.recomputed_tokens,
    }


def attach_account(params: dict[str, Any] | None, account: CallAccount) -> dict[str, Any]:
    """Add a call's account to the `kv_transfer_params` of its output."""
    params = {} if params is None else params
    params[_ACCOUNT] = account
    return params


def attach_engine_report(
    params: dict[str, Any] | None, aborted: Mapping[CallId, CallAccount], swap: SwapStats | None
) -> dict[str, Any]:
    """Add the accounts of aborted calls and the swap's figures to the `kv_transfer_params` of an output."""
    params = {} if params is None else params
    if aborted:
        params[_ABORTED] = dict(aborted)
    if swap is not None:
        params[_SWAP] = tuple(swap)
    return params


def read_report(params: Mapping[str, Any] | None) -> Report:
    """Read the `kv_transfer_params` of an output."""
    if not params:
        return _NO_REPORT
    swap = params.get(_SWAP)
    aborted = params.get(_ABORTED) or {}
    return Report(
        params.get(_ACCOUNT),
        {CallId(call_id): Account(**account) for call_id, account in aborted.items()},
        None if swap is None else SwapStats(*swap),
    )


# -- to the scheduler, on the control channel


class ProgramsEnded(NamedTuple):
    """A control message: these programs have ended."""

    program_ids: tuple[ProgramId, ...]


def encode_control(message: ProgramsEnded) -> dict[str, Any]:
    """A control message as msgpack carries it."""
    return {"type": "programs_ended", "program_ids": list(message.program_ids)}


def decode_control(data: object) -> ProgramsEnded | None:
    """Read a control message inside the scheduler; None if it is not one. Never raises."""
    if not isinstance(data, Mapping) or data.get("type") != "programs_ended":
        return None
    ids = data.get("program_ids")
    return ProgramsEnded(tuple(ProgramId(each) for each in _strings(ids)))


def _strings(values: object) -> Iterable[str]:
    return (value for value in values if isinstance(value, str)) if isinstance(values, list | tuple) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _seconds(value: Any) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return float(value)
    return 0.0
