"""What travels with a call: ids and attained service to the scheduler process, the account back.

There, in `SamplingParams.extra_args` (the chat endpoint's `vllm_xargs`), which takes scalars and flat lists. Back, in
`RequestOutput.kv_transfer_params`, the one field of an output that a scheduler plugin can fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from weft.core.errors import InvalidIdError, InvalidRequestError
from weft.core.ids import CallId, ProgramId, ThreadId, check_id
from weft.core.kv_cache.stats import SwapStats
from weft.core.process_table import Account, Attained, CallIdentity

ACCOUNT_KEY: Final = "weft"
SWAP_KEY: Final = "weft_swap"  # what the engine's swap has done so far
ABORTED_KEY: Final = "weft_aborted"  # accounts of other calls, which were aborted and so had no last output

ExtraArgs = dict[str, str | int | float | list[str | int | float]]


def encode_call(identity: CallIdentity, attained: Attained) -> ExtraArgs:
    """The `extra_args` of a call."""
    return {
        "program_id": identity.program_id,
        "thread_id": identity.thread_id,
        "call_id": identity.call_id,
        "parents": list(identity.parents),
        "service_s": attained.service_s,
        "total_service_s": attained.total_service_s,
        "wait_s": attained.wait_s,
        "total_wait_s": attained.total_wait_s,
    }


def decode_call(
    extra_args: Mapping[str, Any] | None, request_id: str, session_id: str | None
) -> tuple[CallIdentity, Attained]:
    """Read a call's `extra_args` inside the scheduler.

    Never raises, since an exception there ends the engine: an id that is missing or malformed falls back to the session
    and then to the request itself, so that a request of a client that knows nothing of programs is a program of its
    own; a number that makes no sense counts as 0.
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
    total_service_s = max(_seconds(args.get("total_service_s")), service_s)
    total_wait_s = max(_seconds(args.get("total_wait_s")), wait_s)
    return identity, Attained(service_s, total_service_s, wait_s, total_wait_s)


def check_call(extra_args: Mapping[str, Any], session_id: object = None) -> None:
    """Check what a client sends, where a mistake can still be told.

    Raises:
        InvalidIdError: an id that cannot travel, or `parents` that are no list of ids.
        InvalidRequestError: a service or wait that is not a number of seconds, 0 or more.
    """
    for name in ("program_id", "thread_id", "call_id"):
        if name in extra_args:
            check_id(extra_args[name], name)
    if session_id is not None:
        check_id(session_id, "session_id")
    parents = extra_args.get("parents", [])
    if not isinstance(parents, list):
        raise InvalidIdError(f"parents must be a list of call ids, not {type(parents).__name__}.")
    for parent in parents:
        check_id(parent, "each of parents")
    for name in ("service_s", "total_service_s", "wait_s", "total_wait_s"):
        value = extra_args.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InvalidRequestError(f"{name} must be a number of seconds, 0 or more, not {value!r:.80}.")


def encode_account(
    service_s: float, wait_s: float, preemptions: int, swapped_tokens: int, recomputed_tokens: int
) -> dict[str, Any]:
    """The part of an account that only the scheduler knows."""
    return {
        "service_s": service_s,
        "wait_s": wait_s,
        "preemptions": preemptions,
        "swapped_tokens": swapped_tokens,
        "recomputed_tokens": recomputed_tokens,
    }


def decode_account(
    params: Mapping[str, Any] | None, prompt_tokens: int, output_tokens: int, cached_tokens: int
) -> Account | None:
    """Complete a scheduler's account with the token counts of the output. None if the output carries no account."""
    found = (params or {}).get(ACCOUNT_KEY)
    if found is None:
        return None
    return Account(**found, prompt_tokens=prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


def decode_aborted(params: Mapping[str, Any] | None) -> dict[CallId, Account]:
    """The accounts of aborted calls that an output brings along; what they produced is not known."""
    return {CallId(call_id): Account(**found) for call_id, found in ((params or {}).get(ABORTED_KEY) or {}).items()}


def decode_swap(params: Mapping[str, Any] | None) -> SwapStats | None:
    """What the engine's swap has done so far, if the output says."""
    found = (params or {}).get(SWAP_KEY)
    return None if found is None else SwapStats(*found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _seconds(value: Any) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and value > 0:
        return float(value)
    return 0.0
