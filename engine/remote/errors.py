"""What a server answers instead of a result, as Weft's errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx2

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ProgramEndedError,
    ServerError,
    UnknownModelError,
    WeftError,
    restored,
)
from weft.engine.http.http_errors import is_too_long, kind_of_code
from weft.engine.remote.parsing import parsed

# Where the code of the error says no more. What is missing is an error of the server.
_BY_STATUS: Final[dict[int, type[WeftError]]] = {
    400: InvalidRequestError,
    404: UnknownModelError,
    409: ProgramEndedError,
    413: InvalidRequestError,
    422: InvalidRequestError,
    429: OverloadedError,
    500: CallFailedError,
    504: DeadlineError,
}
_ATTRIBUTES: Final[dict[type[WeftError], dict[str, Any]]] = {
    DeadlineError: {"delivered_tokens": 0},
    OverloadedError: {"retry_after_s": 1.0},
    ProgramEndedError: {"program_id": ""},
    UnknownModelError: {"model": ""},
}
_MOST_RETRY_S: Final = 86_400.0  # a day; more is no advice
_UNCONNECTED: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


def failed_request(url: str, error: httpx2.HTTPError, *, may_run: bool) -> ServerError:
    """The error of a request that got no answer.

    Args:
        may_run: Whether the request would have run a call.
    """
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, _UNCONNECTED):
        return ServerError(
            url, f"cannot be reached ({said})", "Compare the address, and see whether `weft serve` runs there."
        )
    advice = "Send the call again if it may run twice." if may_run else "Try again in a moment."
    return ServerError(url, f"did not answer ({said})", advice, may_have_run=may_run)


def redirected(url: str, status: int, headers: Mapping[str, str]) -> ServerError:
    """The error of a request that was sent elsewhere. It is not followed: it would take the API key along."""
    place = headers.get("location", "")
    return ServerError(
        url,
        f"answered with status {status}, which sends clients to {place[:200]!r}",
        "Connect to the address of the `weft serve` itself.",
        status=status,
    )


def refused(url: str, status: int, headers: Mapping[str, str], body: bytes) -> WeftError:
    """The error of a request that was answered with an error."""
    try:
        found = parsed(body)
    except ValueError:
        found = None
    error = found.get("error") if isinstance(found, Mapping) else None
    if not isinstance(error, Mapping):
        error = {"message": body[:200].decode(errors="replace")}
    if status in (401, 403):
        return ServerError(
            url, f"refused the API key ({error.get('message')})", "Pass one of its keys as api_key.", status=status
        )
    return _error(url, status, error, _retry_after_s(headers))


def failed_stream(url: str, error: object) -> WeftError:
    error = error if isinstance(error, Mapping) else {"message": str(error)}
    code = error.get("code")
    usual = 503 if kind_of_code(code) is NoReplicaError else 500  # no replica has begun the call
    return _error(url, code if isinstance(code, int) else usual, error, None)


def _error(url: str, status: int, error: Mapping[str, Any], retry_after_s: float | None) -> WeftError:
    message, code = str(error.get("message") or f"status {status}"), error.get("code")
    kind = kind_of_code(code) or _BY_STATUS.get(status)
    if kind is InvalidRequestError and is_too_long(message):
        kind = ContextLengthError
    if kind is None or issubclass(kind, EngineError) or kind is WeftError:
        stops = status == 503
        return ServerError(
            url,
            f"answered with status {status} ({message})",
            "Send the call again in a moment." if stops else "Its log says more.",
            status=status,
            may_have_run=status >= 500 and not stops,
        )
    attributes = {**_ATTRIBUTES.get(kind, {})}
    given = error.get("weft")
    if isinstance(given, Mapping):
        kinds = {name: (int, float) if isinstance(each, float) else type(each) for name, each in attributes.items()}
        attributes.update((name, value) for name, value in given.items() if isinstance(value, kinds.get(name, object)))
    if kind is OverloadedError and retry_after_s is not None:
        attributes["retry_after_s"] = retry_after_s
    return restored(kind, message, attributes)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            after_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):  # it may be a date as well
            continue
        if 0 <= after_s < _MOST_RETRY_S:
            return after_s
    return None
