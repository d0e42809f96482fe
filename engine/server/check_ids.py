"""ASGI middleware for vLLM's own server that answers requests with malformed ids with status 400.

    vllm serve MODEL --scheduler-cls weft.engine.scheduler.WeftScheduler \\
        --middleware weft.engine.http.CheckIds

Without it the server accepts malformed ids, and the scheduler ignores them. The scheduler cannot refuse a request,
because an exception in its process would end every call.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from weft.core.errors import InvalidIdError, InvalidRequestError
from weft.engine.wire import check_call

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class CheckIds:
    """Checks `vllm_xargs` and `session_id` of every JSON request under /v1/ before the server gets the request."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        problem = _problem(b"".join(message.get("body", b"") for message in messages))
        if problem is not None:
            await _refuse(problem, send)
            return
        replay = iter(messages)

        async def receive_again() -> Message:
            message = next(replay, None)
            # After the body, the only message left is that the client has disconnected.
            return message if message is not None else await receive()

        await self._app(scope, receive_again, send)


def _problem(body: bytes) -> str | None:
    try:
        request = json.loads(body)
    except ValueError:
        return None  # the server refuses broken JSON itself, and audio requests are forms
    if not isinstance(request, dict):
        return None
    xargs = request.get("vllm_xargs") or {}
    try:
        check_call(xargs if isinstance(xargs, dict) else {}, request.get("session_id"))
    except (InvalidIdError, InvalidRequestError) as error:
        return str(error)
    return None


async def _refuse(problem: str, send: Send) -> None:
    status = HTTPStatus.BAD_REQUEST
    error = {"message": problem, "type": "BadRequestError", "param": None, "code": status.value}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
