"""Converts Weft's errors to OpenAI's error responses."""

from __future__ import annotations

import math
from typing import Any, Final

import httpx2

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ProgramEndedError,
    ProgramEngineError,
    ReplicaLostError,
    UnknownModelError,
    WeftError,
)

# The status and the code of each error class. The first row that matches an error is used.
_ERRORS: Final[tuple[tuple[type[WeftError], int, str], ...]] = (
    (ContextLengthError, 400, "context_length_exceeded"),  # OpenAI's own code, which frameworks check
    (UnknownModelError, 404, "model_not_found"),  # OpenAI's own code, too
    (InvalidRequestError, 400, "invalid_request"),
    (ProgramEndedError, 409, "program_ended"),
    (ProgramEngineError, 409, "program_engine"),
    (OverloadedError, 429, "overloaded"),
    (DeadlineError, 504, "deadline_exceeded"),
    (ReplicaLostError, 503, "replica_lost"),
    (NoReplicaError, 503, "no_replica"),
    (EngineClosedError, 503, "engine_closed"),
    (EngineDiedError, 503, "engine_died"),
    (CallFailedError, 500, "call_failed"),
    (WeftError, 500, "weft_error"),
)
_MAY_SUCCEED_LATER: Final = (CallFailedError, OverloadedError, ReplicaLostError, NoReplicaError)


def _status_and_code(error: WeftError) -> tuple[int, str]:
    return next((status, code) for kind, status, code in _ERRORS if isinstance(error, kind))


def _body(status: int, message: str, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(error: WeftError) -> dict[str, Any]:
    """Convert an error to OpenAI's JSON."""
    status, code = _status_and_code(error)
    return _body(status, str(error), code)


def error_response(error: WeftError) -> httpx2.Response:
    """Convert an error to a response. Its headers say whether a retry may succeed, and after how long."""
    status, code = _status_and_code(error)
    response = refusal(status, str(error), code, retry=isinstance(error, _MAY_SUCCEED_LATER))
    if isinstance(error, OverloadedError):
        response.headers["retry-after-ms"] = f"{error.retry_after_s * 1e3:.0f}"  # read by OpenAI's SDK
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return response


def refusal(status: int, message: str, code: str, *, retry: bool = False) -> httpx2.Response:
    """Make an error response.

    Args:
        status: The HTTP status.
        message: The message for the user.
        code: The code for programs.
        retry: Whether a client that allows retries should send the request again.
    """
    headers = {"x-should-retry": str(retry).lower()}  # Without it, the SDK retries 409 and every 5xx.
    return httpx2.Response(status, headers=headers, json=_body(status, message, code))
