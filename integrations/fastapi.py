"""Weft in a service of FastAPI or Starlette: errors as OpenAI's, and requests that end when their clients leave.

::

    app = FastAPI(lifespan=lifespan)
    app.add_exception_handler(weft.WeftError, error_response)
    app.add_middleware(AbortOnDisconnect)
"""

# ruff: noqa: E402
from __future__ import annotations

from weft.integrations import require_packages

require_packages("weft.integrations.fastapi", "starlette")

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.core.errors import WeftError
from weft.engine.http.http_errors import error_body, error_headers, error_status, openai_error

__all__ = ["AbortOnDisconnect", "error_response", "event_stream"]

_STOPPING: Final = openai_error(503, "the server stops. Send the request again in a moment.", "server_stopping")


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Answer a request with one of Weft's errors as OpenAI's API would: status, body and `retry-after`.

    Pass it to `app.add_exception_handler(weft.WeftError, error_response)`.
    """
    error = cast("WeftError", error)
    return JSONResponse(error_body(error), error_status(error), error_headers(error))


async def event_stream(events: AsyncGenerator[Any]) -> StreamingResponse:
    """Answer a request with server-sent events, as OpenAI's API does.

    The response begins with the first event, so that a request that is refused gets an error status. A later error of
    Weft's is an event `{"error": …}`. The last event is `[DONE]`, unless there was an error. When the client leaves,
    the generator is closed, and with it a program that it runs.

    Args:
        events: Each value is sent as JSON.

    Raises:
        WeftError: The generator raised it before its first event.
    """
    try:
        first = [await anext(events)]
    except StopAsyncIteration:
        first = []

    async def body() -> AsyncGenerator[bytes]:
        async with aclosing(events):
            try:
                for event in first:
                    yield _event(event)
                async for event in events:
                    yield _event(event)
            except WeftError as error:
                yield _event(error_body(error))
            else:
                yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


class AbortOnDisconnect:
    """ASGI middleware that cancels a request when its client leaves, and with it the request's calls in the engine.

    Without it an endpoint that answers with JSON goes on for a client that is gone. A request that the server cancels
    because it stops is answered with 503, or with an error as the last event of a stream. An endpoint that is no
    coroutine runs on a thread, which cannot be cancelled.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        # A task of its own, so that the answer need not wait until the application has ended.
        app = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
        watch = asyncio.create_task(exchange.watch(app))
        try:
            await asyncio.wait([app])
        except asyncio.CancelledError:  # the server stops, and would log a traceback
            app.cancel()
            await exchange.give_up()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([app])
        finally:
            watch.cancel()
        if app.done() and not (app.cancelled() and exchange.is_over):
            app.result()


class _Exchange:
    """A request and its response on their way through the middleware."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._messages: asyncio.Queue[Message] = asyncio.Queue(1)  # so that a large body is read as it is consumed
        self._is_complete = False
        self._started: MutableMapping[str, Any] | None = None  # the start of the response
        self.is_over = False  # the client has left, or has got an error because the server stops

    async def watch(self, app: asyncio.Future[None]) -> None:
        """Pass on what the client sends, and cancel the application if the client leaves before it has the response."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self._is_complete:
                    self.is_over = True
                    app.cancel()
                while True:  # the application may ask again
                    await self._messages.put(message)
            await self._messages.put(message)

    async def receive(self) -> Message:
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            self._started = message
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def give_up(self) -> None:
        """End the response with an error."""
        self.is_over = True
        if self._is_complete:
            return
        if self._started is None:
            response = JSONResponse(_STOPPING, 503)
            await self._send({"type": "http.response.start", "status": 503, "headers": response.raw_headers})
            await self._send({"type": "http.response.body", "body": response.body})
            return
        headers = dict(self._started.get("headers") or ())
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        await self._send({"type": "http.response.body", "body": _event(_STOPPING) if is_stream else b""})


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
