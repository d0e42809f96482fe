"""Weft's errors as OpenAI's: status, body and headers of a response."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    InvalidRequestError,
    KeyLimitError,
    NoReplicaError,
    OverloadedError,
    ProgramEndedError,
    ProgramEngineError,
    ReplicaLostError,
    RetryableCallError,
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
    (KeyLimitError, 429, "rate_limit_exceeded"),  # OpenAI's own code, too
    (OverloadedError, 429, "overloaded"),
    (DeadlineError, 504, "deadline_exceeded"),
    (ReplicaLostError, 503, "replica_lost"),
    (NoReplicaError, 503, "no_replica"),
    (EngineClosedError, 503, "engine_closed"),
    (EngineDiedError, 503, "engine_died"),
    (RetryableCallError, 503, "call_retryable"),
    (CallFailedError, 500, "call_failed"),
    (WeftError, 500, "weft_error"),
)
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_MOST_CHARACTERS: Final = 1000
# vLLM's messages about a prompt that does not fit. The last one is about a prompt that leaves no room for an answer.
_TOO_LONG: Final = ("context length", "maximum model length", "max_model_len", "max_tokens must be at least 1, got 0")
_MAY_SUCCEED_LATER: Final = (CallFailedError, OverloadedError, NoReplicaError)


def _status_and_code(error: WeftError) -> tuple[int, str]:
    return next((status, code) for kind, status, code in _ERRORS if isinstance(error, kind))


def kind_of_code(code: object) -> type[WeftError] | None:
    """Return the class of the errors with a code, or None if the code is not one of Weft's."""
    return next((kind for kind, _status, own in _ERRORS if own == code), None)


def is_too_long(message: str) -> bool:
    """Whether vLLM refuses a prompt with this message because prompt and answer do not fit the model's context."""
    return any(words in message for words in _TOO_LONG)


def openai_error(status: int, message: str, code: str) -> dict[str, Any]:
    """Return an error in OpenAI's JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(error: WeftError) -> dict[str, Any]:
    """Convert an error to OpenAI's JSON. Its attributes are under "weft"."""
    status, code = _status_and_code(error)
    body = openai_error(status, str(error), code)
    attributes = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float)}
    if attributes:
        body["error"]["weft"] = attributes
    return body


def error_code(error: WeftError) -> str:
    """Return the code of an error in OpenAI's JSON."""
    return _status_and_code(error)[1]


def error_status(error: WeftError) -> int:
    """Return the HTTP status that OpenAI's API would answer with."""
    return _status_and_code(error)[0]


def error_headers(error: WeftError) -> dict[str, str]:
    """Return headers that say whether a retry may succeed, and after how long."""
    may_succeed = isinstance(error, _MAY_SUCCEED_LATER)
    if isinstance(error, ReplicaLostError):
        may_succeed = error.attempts < error.MOST_ATTEMPTS
    headers = {"x-should-retry": str(may_succeed).lower()}  # otherwise OpenAI's SDK retries every 5xx
    if isinstance(error, OverloadedError):
        headers["retry-after-ms"] = f"{error.retry_after_s * 1e3:.0f}"  # read by OpenAI's SDK
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return headers


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's JSON."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_for(path: str, status: int, message: str, code: str) -> dict[str, Any]:
    """Return an error as the clients of a path read it: Anthropic's Messages have a form of their own."""
    if path.startswith("/v1/messages"):
        return anthropic_error(status, message)
    return openai_error(status, message, code)


def path_of(scope: Mapping[str, Any]) -> str:
    """A request's path, less that of a proxy in front of the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def refuse(
    scope: MutableMapping[str, Any],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    status: int,
    message: str,
    code: str,
    *more_headers: tuple[bytes, bytes],
) -> None:
    """Answer a request in place of the application. The connection closes, because a body would not be read."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})  # before it was accepted: status 403
        return
    body = json.dumps(error_for(path_of(scope), status, message, code)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *more_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def typed_error(path: str, status: int, body: bytes) -> bytes:
    """An application's error in the form that the clients of a path read. FastAPI has its own, and vLLM answers
    some of Anthropic's clients as it does OpenAI's."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")[:_MOST_CHARACTERS]
    error = found.get("error") if isinstance(found, dict) else None
    message: object
    if isinstance(error, dict) and "message" in error and "type" in error:
        if not path.startswith("/v1/messages") or found.get("type") == "error":
            return body
        message = error["message"]
    else:
        detail = found.get("detail", error) if isinstance(found, dict) else found
        message = detail if isinstance(detail, str) else json.dumps(detail)[:_MOST_CHARACTERS]
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    return json.dumps(error_for(path, status, str(message), code)).encode()
