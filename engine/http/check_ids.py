"""ASGI middleware for vLLM's own server that checks the ids of requests and keeps those of different API keys apart.

    vllm serve MODEL --scheduler-cls weft.engine.scheduler.WeftScheduler \\
        --middleware weft.engine.http.CheckIds

It answers requests with malformed ids with status 400. Without it the server accepts them, and the scheduler ignores
them. The scheduler cannot refuse a request, because an exception in its process would end every call.

vLLM runs a user's middleware before its own, authentication included. So this middleware reads no body by itself. It
waits until the application asks for the body, which is after authentication.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from weft.core.errors import EngineStartError, InvalidIdError, InvalidRequestError, OverloadedError
from weft.core.log import get_logger
from weft.engine.http.bodies import LARGE_BYTES, Arrivals, read_json, release
from weft.engine.http.http_errors import error_headers, error_status
from weft.engine.http.identity import (
    CHANGED,
    SESSION_HEADER,
    fields_of_form,
    figures_of_request,
    scope_headers,
    scope_of,
    scope_request,
    server_takes_figures,
)
from weft.engine.wire.call_header import refuse_priority

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LIMIT_VARIABLE: Final = "WEFT_MAX_BODY_BYTES"
_DEFAULT_LIMIT_BYTES: Final = 64 << 20  # several photographs in base64
_PRIORITY: Final = b"x-vllm-priority"
_CLOSED: Final = "the handler is closed"  # ends what uvloop says of a write to a connection that is closed
_FORMS: Final = (b"multipart/form-data", b"application/x-www-form-urlencoded")


def read_limit(environment: Mapping[str, str]) -> int:
    """The largest body of a request in bytes: `WEFT_MAX_BODY_BYTES`, or 64 MiB. Anything but a positive whole number
    raises EngineStartError."""
    text = environment.get(LIMIT_VARIABLE, str(_DEFAULT_LIMIT_BYTES))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) > 0):
        raise EngineStartError(
            f"{LIMIT_VARIABLE} must be a number of bytes, at least 1, not {text!r:.80}. Write {_DEFAULT_LIMIT_BYTES} "
            "for 64 MiB, or leave it out."
        )
    return int(text)


# Read when vLLM imports the module, so that a wrong value stops the server. An error while the application starts would
# not: uvicorn takes it for an application without start-up.
MAX_BODY_BYTES: Final = read_limit(os.environ)


class CheckIds:
    """Checks the ids of every request with a body, on every route, and puts them into the scope of its API key.

    Args:
        app: The application.
        max_body_bytes: The largest body that is read.
        arrivals: Bounds the bodies that are arriving. By default it has the usual bounds.
    """

    def __init__(self, app: App, max_body_bytes: int = MAX_BODY_BYTES, arrivals: Arrivals | None = None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._arrivals = arrivals or Arrivals(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # vLLM reads no ids from websockets
            await self._app(scope, receive, send)
            return
        exchange = self.make_exchange(scope, receive, send)
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception as error:
            # A route that reads the body itself fails if the request ends early. The client has its answer or is gone.
            if not exchange.has_refused and not exchange.note_gone(error) and not await exchange.end_stream():
                raise
        finally:
            exchange.end()

    def make_exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        """What stands between the server and the application for one request."""
        return Exchange(scope, receive, send, self._max_body_bytes, self._arrivals)


class Refusal(NamedTuple):
    """An answer in place of the application's."""

    status: HTTPStatus
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Exchange:
    """One request and its response, between the server and the application."""

    # What an operator does so that a client's figures count, and so that larger bodies are taken.
    trust_advice = 'trust all clients by "trust_clients": true in the scheduler\'s settings'
    limit_advice = f"raise {LIMIT_VARIABLE}"

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        max_body_bytes: int,
        arrivals: Arrivals,
        *,
        id_scope: str | None = None,
        takes_figures: bool | None = None,
    ) -> None:
        self._receive, self._send = receive, send
        self._max_body_bytes = max_body_bytes
        self._arrivals = arrivals
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._id_scope = scope_of(self._headers) if id_scope is None else id_scope
        self._takes_figures = server_takes_figures(scope.get("app")) if takes_figures is None else takes_figures
        self._has_read = False  # the body, or has begun to
        self._is_whole = False  # the body, which has arrived to its end
        self._has_begun = False  # the application's response
        self._has_ended = False
        self._is_gone = False  # the client, before it had all of the response
        self.has_refused = False
        self._refusal: Refusal | None = None
        try:
            self.scope = {**scope, "headers": scope_headers(self._headers, self._id_scope)}
        except InvalidIdError as error:  # the client is told when it is authenticated
            self.scope = {**scope, "headers": [each for each in self._headers if each[0] != SESSION_HEADER]}
            self._refusal = Refusal(HTTPStatus.BAD_REQUEST, str(error))

    async def identify(self, request: dict[str, Any], body_bytes: int) -> bool:
        """Write the request's ids into its body, from wherever it carries them. Returns whether the body has changed.

        Args:
            request: The body, of which only the members `CHANGED` are sent on as they are here.
            body_bytes: Its length. A large one takes so long to read that it should happen on another thread.

        Raises:
            InvalidIdError, InvalidRequestError: They are malformed.
        """
        return False

    def arriving(self) -> None:
        """Note that the body is not complete, and that the server is about to hold its bytes. Raises OverloadedError
        if the client has as many requests as it may."""

    def take(self, request: dict[str, Any]) -> Refusal | None:
        """The client is authenticated, and the ids are in their scope. Returns why the request is refused, if it is."""
        return None

    def end(self) -> None:
        """Note that the application has ended."""

    async def receive(self) -> Message:
        """The request's body in one piece, then what the server says of the connection."""
        if self.has_refused:
            return {"type": "http.disconnect"}
        if self._has_read:
            message = await self._receive()
            self._is_gone |= message["type"] == "http.disconnect" and not self._has_ended
            return message
        self._has_read = True
        read = self._refusal or await self._read()
        found = await self._check(read) if isinstance(read, bytearray) else read
        if isinstance(found, Refusal):
            await self._refuse(found)
        elif found is not None:
            return {"type": "http.request", "body": bytes(found), "more_body": False}
        # The application must not act on a request that was refused. An empty body would be an order to some routes.
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Pass the application's response on, unless the request was refused. A closed connection raises OSError."""
        if self.has_refused:
            return
        self._has_begun = True
        try:
            await self._send(message)
        except RuntimeError as error:
            if not str(error).endswith(_CLOSED):
                raise
            self._is_gone = True
            raise OSError(str(error)) from error  # as ASGI has it, so that the application stops
        self._has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    def note_gone(self, error: Exception) -> bool:
        """Whether the application failed when the client had gone. An error that says something else is logged."""
        from starlette.requests import ClientDisconnect

        if self._is_gone and not isinstance(error, OSError | ClientDisconnect):
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
            get_logger().warning("request failed when its client had gone", path=self.scope["path"], reason=reason)
        return self._is_gone

    async def end_stream(self) -> bool:
        """End a response that has begun by the error of its call. Returns whether there is such an error."""
        return False

    async def _read(self) -> bytearray | Refusal | None:
        """Return the body, or None if the client has gone."""
        limit = self._max_body_bytes
        too_large = Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request's body has more than {limit} bytes. Send less, or ask the server's operator to "
            f"{self.limit_advice}.",
        )
        announced = self._header(b"content-length").lstrip(b"0")
        if announced.isdigit() and (len(announced) > len(str(limit)) or int(announced) > limit):
            return too_large
        seconds = self._arrivals.body_s
        try:
            with self._arrivals.body(self._id_scope) as body:
                async with asyncio.timeout(seconds):
                    return await self._collect(body, too_large)
        except OverloadedError as error:
            return self.overloaded(error)
        except TimeoutError:
            return Refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request's body was not complete within {seconds:g} s. Send it without pauses, or send less.",
            )

    async def _collect(self, body: bytearray, too_large: Refusal) -> bytearray | Refusal | None:
        """Wait for the rest of a body. Raises OverloadedError if the server holds too much of bodies that are
        arriving, or too many of the client."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                return None
            piece, is_last = message.get("body", b""), not message.get("more_body", False)
            if len(body) + len(piece) > self._max_body_bytes:
                return too_large
            if is_last:
                self._is_whole = True
            elif not body and piece:
                self.arriving()
            self._arrivals.hold(self._id_scope, len(piece))
            body += piece
            if is_last:
                return body

    def overloaded(self, error: OverloadedError) -> Refusal:
        """The answer to a request that is too many."""
        headers = tuple((name.encode(), value.encode()) for name, value in error_headers(error).items())
        return Refusal(HTTPStatus(error_status(error)), str(error), headers)

    async def _check(self, body: bytearray) -> bytes | bytearray | Refusal:
        """The body with ids in their scope, and otherwise unchanged."""
        held: list[Any] = []
        try:
            if self._header(b"content-type").partition(b";")[0].strip().lower() in _FORMS:
                await self._check_form(body)
            is_large = len(body) > LARGE_BYTES
            request = await asyncio.to_thread(read_json, body, CHANGED) if is_large else read_json(body, CHANGED)
            held = [request] if is_large else []
            if isinstance(request, dict):
                for priority in (request.get("priority"), self._header(_PRIORITY).decode("latin-1")):
                    refuse_priority(priority)
                # vLLM reads what is written here, not what was sent. So both agree on keys that occur twice.
                is_spliced = not any(name in request for name in CHANGED)
                has_changed = await self.identify(request, len(body))
                if not self._takes_figures:
                    self._refuse_figures(request)
                has_changed |= scope_request(request, self._id_scope)
                refusal = self.take(request)
                if refusal is not None or not has_changed:
                    return refusal or body
                write = _with_new if is_spliced else _written
                return await asyncio.to_thread(write, body, request) if is_large else write(body, request)
        except (InvalidIdError, InvalidRequestError) as error:
            return Refusal(HTTPStatus.BAD_REQUEST, str(error))
        except RecursionError:
            return Refusal(
                HTTPStatus.BAD_REQUEST, "the request is nested too deeply. Send fewer levels of lists and objects."
            )
        except ValueError:
            pass  # the server refuses broken JSON itself, and other routes take other bodies
        finally:
            request = None
            if held:
                await asyncio.to_thread(release, held)
        return body

    def _refuse_figures(self, request: dict[str, Any]) -> None:
        """Raise InvalidRequestError, so that the client hears of figures that the scheduler would ignore."""
        figures = figures_of_request(request)
        if figures:
            raise InvalidRequestError(
                f"this server takes no figures from this client: leave out {', '.join(figures)}. The server's operator "
                f"can {self.trust_advice}."
            )

    async def _check_form(self, body: bytearray) -> None:
        """Refuse ids in a form, as routes for audio take it, with InvalidRequestError: they could not be put into their
        scope."""
        from starlette.requests import Request  # with the parser of vLLM's own routes

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            async with Request(self.scope, receive).form() as form:
                values = form.getlist("vllm_xargs")
        except Exception:  # a broken form, on which the server's own parser fails in the same way
            return
        names = [name for value in values if isinstance(value, str) for name in fields_of_form(value)]
        if names:
            raise InvalidRequestError(
                f"a form cannot carry {', '.join(names)}. Leave the fields out of the form's vllm_xargs; each request "
                "is then a program of its own."
            )

    async def _refuse(self, refusal: Refusal) -> None:
        """Answer in place of the application, unless it has begun to answer."""
        if self._has_begun:
            return
        self.has_refused = True
        status, message, more = refusal
        body = json.dumps(self.error_body(status, message)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
        if not self._is_whole:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        await self._send({"type": "http.response.start", "status": status.value, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def error_body(self, status: HTTPStatus, message: str) -> dict[str, Any]:
        """An error as the application would write it."""
        return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status.value}}

    def _header(self, name: bytes) -> bytes:
        return next((value for key, value in self._headers if key == name), b"")


def _written(_body: bytearray, request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode()


def _with_new(body: bytes | bytearray, request: Mapping[str, Any]) -> bytes:
    """A body with members behind its own that it did not have."""
    new = json.dumps({name: request[name] for name in CHANGED if name in request})
    separator = b"," if len(request) > sum(name in request for name in CHANGED) else b""
    end = body.rindex(b"}")
    return b"".join((memoryview(body)[:end], separator, new[1:].encode()))  # which lets other threads go on
