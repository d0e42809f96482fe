"""Weft's errors as OpenAI's."""

from __future__ import annotations

from typing import Any, Final

import httpx2

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    EngineClosedError,
    EngineDiedError,
    InvalidRequestError,
    ProgramEndedError,
    ProgramEngineError,
    WeftError,
)

# The status and the code of each; the first that fits counts.
_ERRORS: Final[tuple[tuple[type[WeftError], int, str], ...]] = (
    (ContextLengthError, 400, "context_length_exceeded"),  # OpenAI's own code, which frameworks look for
    (InvalidRequestError, 400, "invalid_request"),
    (ProgramEndedError, 409, "program_ended"),
    (ProgramEngineError, 409, "program_engine"),
    (EngineClosedError, 503, "engine_closed"),
    (EngineDiedError, 503, "engine_died"),
    (CallFailedError, 500, "call_failed"),
    (WeftError, 500, "weft_error"),
)


def _described(error: WeftError) -> tuple[int, str]:
    return next((status, code) for kind, status, code in _ERRORS if isinstance(error, kind))


def _body(status: int, message: str, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(error: WeftError) -> dict[str, Any]:
    """An error as OpenAI's JSON."""
    status, code = _described(error)
    return _body(status, str(error), code)


def error_response(error: WeftError) -> httpx2.Response:
    """An error as a response. Of Weft's errors, only a call that failed by itself may succeed when it is sent again."""
    status, code = _described(error)
    return refusal(status, str(error), code, retry=isinstance(error, CallFailedError))


def refusal(status: int, message: str, code: str, *, retry: bool = False) -> httpx2.Response:
    """An error response; `retry` is for a client whose user allows retries."""
    headers = {"x-should-retry": str(retry).lower()}  # else the SDK would retry 409 and every 5xx
    return httpx2.Response(status, headers=headers, json=_body(status, message, code))
