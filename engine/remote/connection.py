"""The connection to a `weft serve`: requests, answers and streams, with its errors as Weft's."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, cast

import httpx2

from weft.core.errors import InvalidRequestError, ServerError
from weft.engine.remote.errors import failed_request, failed_stream, redirected, refused
from weft.engine.remote.parsing import fault_of, parsed

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

    async def get(self, path: str, *, shape: Any = None) -> Any:
        """The JSON at a path, which must look like `shape` (see `fault_of`). Raises WeftError as the server says.
        Raises ServerError if there is no answer, or it looks otherwise."""
        return await self._answer("GET", path, None, {}, may_run=False, shape=shape)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        may_run: bool = True,
        shape: Any = None,
    ) -> Any:
        """Return the JSON of the answer to a request, or None if the answer has no body.

        Args:
            may_run: Whether the request runs a call, which an error then must tell.
            shape: What the JSON must look like; see `fault_of`. None: anything, or no body.

        Raises:
            WeftError: As the server says.
            ServerError: There is no answer, or it does not look like that.
        """
        return await self._answer("POST", path, body, headers or {}, may_run=may_run, shape=shape)

    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        *,
        may_run: bool,
        shape: Any,
    ) -> Any:
        async with self._request(method, path, body, headers, may_run=may_run) as response:
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
