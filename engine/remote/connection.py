"""The connection to a `weft serve`: requests, answers and streams, with its errors as Weft's."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields
from typing import Any, Final, cast

import httpx2

from weft.core.accounts import Account
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

_CONNECT_S: Final = 10.0
_SEND_S: Final = 60.0  # for a piece of a request that the server does not read
_ANSWER_S: Final = 60.0  # to a question that runs no call; a call may wait long in the server's queue
_EXPIRY_S: Final = 2.0  # of an unused connection: less than the server's, or a call could meet its end
_MOST_PORT: Final = 65_535
_MOST_BYTES: Final = 64 << 20  # of an event

# A host that has vanished is noticed after 2 minutes, also by a call that waits long in the server's queue.
_KEEP_ALIVE: Final = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    )
    if hasattr(socket, name)
)


def base_url(url: str) -> str:
    """The server's address, with or without the `/v1` that clients of OpenAI's API write. Anything else raises
    InvalidRequestError."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        raise InvalidRequestError(f"{url!r:.200} is no address: {error}. Write it like http://host:8000.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequestError(f"{url!r:.200} is no address of HTTP. Write it like http://host:8000.")
    if parsed.port is not None and not 0 < parsed.port <= _MOST_PORT:
        raise InvalidRequestError(f"{url!r:.200} has no possible port. Write it like http://host:8000.")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Server:
    """A `weft serve`. Use it on one event loop. No request is repeated."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = base_url(url)
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_EXPIRY_S)
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            limits=limits,  # of the ways through proxies that the environment names
            transport=httpx2.AsyncHTTPTransport(limits=limits, socket_options=_KEEP_ALIVE),
        )

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        may_run: bool = False,
        shape: Any = None,
    ) -> Any:
        """Return the JSON of the answer to a request, or None if the answer has no body.

        Args:
            body: What is sent by POST. None: the request is a GET.
            may_run: Whether the request runs a call, which an error then must tell.
            shape: What the JSON must look like; see `fault_of`. None: anything, or no body.

        Raises:
            WeftError: As the server says.
            ServerError: There is no answer, or it does not look like that.
        """
        method = "GET" if body is None else "POST"
        async with self._request(method, path, body, headers or {}, may_run=may_run) as response:
            data = await response.aread()
        if not data and shape is None:
            return None
        return self._read(f"{method} {path}", data, shape, status=response.status_code, may_run=may_run)

    def _read(self, request: str, data: str | bytes, shape: Any, *, status: int, may_run: bool) -> Any:
        try:
            answer = parsed(data)
            fault = fault_of(answer, shape) if shape is not None else None
        except ValueError as error:
            answer, fault = None, f"it is no JSON ({data[:80]!r}: {error!s:.80})"
        if fault is None:
            return answer
        raise self._odd(request, fault, status=status, may_run=may_run)

    def _odd(self, request: str, fault: str, *, status: int, may_run: bool) -> ServerError:
        return ServerError(
            self.url,
            f"gave no answer of a `weft serve` to {request}: {fault}",
            "See what runs there, and connect to a `weft serve`.",
            status=status,
            may_have_run=may_run,
        )

    def ended_early(self) -> ServerError:
        """The error of a stream whose answer is not whole."""
        return ServerError(
            self.url, "ended a stream before its end", "Drop what came and send the call again.", may_have_run=True
        )

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], *, shape: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """The events that a call is answered with, each of a `shape` (see `fault_of`). Closing the iterator closes
        the connection, and so aborts the call. Raises WeftError as the server says. Raises ServerError if the
        server or the connection ended before the stream did, or an event looks otherwise."""
        async with self._request("POST", path, body, headers, may_run=True) as response:
            source = cast("AsyncGenerator[httpx2.ServerSentEvent]", aiter(httpx2.EventSource(response, _MOST_BYTES)))
            async with aclosing(source) as events:
                async for event in events:
                    if event.data == "[DONE]":
                        return
                    chunk = self._read(f"POST {path}", event.data, {}, status=response.status_code, may_run=True)
                    if "error" in chunk:
                        raise failed_stream(self.url, chunk["error"])
                    if fault := fault_of(chunk, shape):
                        raise self._odd(f"POST {path}", fault, status=response.status_code, may_run=True)
                    yield chunk
        raise self.ended_early()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], *, may_run: bool
    ) -> AsyncGenerator[httpx2.Response]:
        content = None if body is None else json.dumps(body).encode()
        headers = headers if content is None else {**headers, "content-type": "application/json"}
        timeout = httpx2.Timeout(None if may_run else _ANSWER_S, connect=_CONNECT_S, write=_SEND_S, pool=None)
        try:
            async with self._client.stream(method, path, content=content, headers=headers, timeout=timeout) as response:
                if 300 <= response.status_code < 400:
                    raise redirected(self.url, response.status_code, response.headers)
                if response.status_code >= 400:
                    raise refused(self.url, response.status_code, response.headers, await response.aread())
                yield response
        except httpx2.HTTPError as error:
            raise failed_request(self.url, error, may_run=may_run) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


# -- what a server answers instead of a result, as Weft's errors


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


# -- what answers of a server must look like. Something else may listen there, and code that reads them trusts them.


# A shape is a type, a list with the shape of its items, or a dict of shapes by name. "?" marks a member that may be
# null or absent, and "+" a list that may not be empty.
_FUNCTION: Final = {"name?": str, "arguments?": str}
_MESSAGE: Final = {
    "content?": str,
    "reasoning?": str,
    "tool_calls?": [{"id": str, "function": {"name": str, "arguments": str}}],
}
_DELTA: Final = {
    "content?": str,
    "reasoning?": str,
    "tool_calls?": [{"index": int, "id?": str, "function?": _FUNCTION}],
}
_CHOICE: Final = {"index": int, "finish_reason?": str, "logprobs?": {"content?": [dict]}, "token_ids?": [int]}
_USAGE: Final = {
    "prompt_tokens": int,
    "completion_tokens?": int,
    "total_tokens": int,
    "prompt_tokens_details?": {"cached_tokens?": int},
}
_HEAD: Final = {"id": str, "model": str, "prompt_token_ids?": [int]}
COMPLETION: Final = {**_HEAD, "choices+": [{**_CHOICE, "message": _MESSAGE}], "usage": _USAGE}
CHUNK: Final = {**_HEAD, "choices": [{**_CHOICE, "delta": _DELTA}], "usage?": _USAGE}
TOKENS: Final = {"tokens": [int]}
COUNT: Final = {"count": int}
MODELS: Final = {"data": [{"id": str, "max_model_len?": int}]}

_WORDS: Final[dict[type, str]] = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}
_SECONDS: Final = frozenset(field.name for field in fields(Account) if isinstance(field.default, float))
_COUNTS: Final = frozenset(field.name for field in fields(Account) if isinstance(field.default, int))


def parsed(data: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fault_of(value: Any, shape: Any, name: str = "it") -> str | None:
    """Return what is wrong with a value, as a part of a sentence, or None if nothing is."""
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"{name} is {value!r:.80}, not {_WORDS[kind]}"
    if isinstance(shape, list):
        faults = (fault_of(each, shape[0], f"{name}[{number}]") for number, each in enumerate(value))
        return next(filter(None, faults), None)
    if isinstance(shape, dict):
        return next(filter(None, (_fault_of_member(value, key, shape[key], name) for key in shape)), None)
    return None


def _fault_of_member(value: Mapping[str, Any], key: str, shape: Any, name: str) -> str | None:
    member = key.rstrip("?+")
    path = member if name == "it" else f"{name}.{member}"
    if value.get(member) is None:
        return None if key.endswith("?") else f"{path} is missing"
    if value[member] == [] and key.endswith("+"):
        return f"{path} is empty"
    return fault_of(value[member], shape, path)


def account_of(report: Any) -> Account | None:
    """The account in a server's report of a call; figures that are none are left out."""
    if not isinstance(report, Mapping):
        return None
    known: dict[str, Any] = {name: report[name] for name in _COUNTS if _is_figure(report.get(name), int)}
    known |= {name: report[name] for name in _SECONDS if _is_figure(report.get(name), int | float)}
    return Account(**known)


def _is_figure(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
