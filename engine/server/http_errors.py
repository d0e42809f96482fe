"""Weft's errors as OpenAI's: status, body and headers of a response."""

from __future__ import annotations

import math
from typing import Any, Final

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


def openai_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return an error in OpenAI's JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(error: WeftError) -> dict[str, Any]:
    """Convert an error to OpenAI's JSON."""
    status, code = _status_and_code(error)
    return openai_error(status, str(error), code)


def error_status(error: WeftError) -> int:
    """Return the HTTP status that OpenAI's API would answer with."""
    return _status_and_code(error)[0]


def error_headers(error: WeftError) -> dict[str, str]:
    """Return headers that say whether a retry may succeed, and after how long."""
    headers = {"x-should-retry": str(isinstance(error, _MAY_SUCCEED_LATER)).lower()}  # else the SDK retries every 5xx
    if isinstance(error, OverloadedError):
        headers["retry-after-ms"] = f"{error.retry_after_s * 1e3:.0f}"  # read by OpenAI's SDK
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return headers
