"""Who sends a request. One place guards every route: vLLM's, Weft's, and those that are added later.

`Authenticate` is outside everything else, so a request without a key reaches no other code and its body is not read.
A route that needs to know the key declares a parameter of type `RequestKey`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import Depends
from starlette.requests import HTTPConnection

from weft.core.routing.refusals import Refused
from weft.engine.page.assets import PATHS
from weft.engine.serve.keys import ApiKey, KeyRing
from weft.engine.server.check_ids import App, Receive, Scope, Send
from weft.engine.server.http_errors import error_for

# Served without a key. Probes and Prometheus send none, as under vLLM's server, and a browser cannot send one with a
# page's address. Nothing here may show what a client sent, or take a body: `shown_to_strangers` is all of the metrics.
OPEN_PATHS: Final = frozenset({"/health", "/ping", "/metrics", "/metrics/"}) | PATHS
_KEY: Final = "weft.key"
_MISSING: Final = "this server needs an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
_WRONG: Final = "this is no API key of this server. Compare the key with its operator's."


class Authenticate:
    """Lets requests with a key pass, and those to `OPEN_PATHS`.

    Args:
        app: The application.
        keys: The server's.
        root_path: What a proxy in front of the server puts before each path, as FastAPI takes it.
        on_refused: Is told of requests without a right key.
    """

    def __init__(self, app: App, keys: KeyRing, root_path: str = "", *, on_refused: Callable[[Refused], None]) -> None:
        self._app = app
        self._keys = keys
        self._root_path = root_path
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope = {**scope, "root_path": self._root_path}
        key = self._keys.find(scope["headers"])
        if key is None and not _is_open(scope):
            has_key = any(name in (b"authorization", b"x-api-key") for name, _value in scope["headers"])
            self._on_refused(Refused.WRONG_API_KEY if has_key else Refused.NO_API_KEY)
            await _refuse(scope, send, has_key=has_key)
            return
        await self._app({**scope, _KEY: key}, receive, send)


def key_of(scope: Scope) -> ApiKey | None:
    """The key of a request that passed `Authenticate`. None: it has none, and asks for an open path."""
    key = scope[_KEY]
    return key if isinstance(key, ApiKey) else None


def _key_of_request(connection: HTTPConnection) -> ApiKey:
    key = key_of(connection.scope)
    assert key is not None, "a route of OPEN_PATHS knows no key"  # noqa: S101  a mistake in the code
    return key


RequestKey = Annotated[ApiKey, Depends(_key_of_request)]


def path_of(scope: Scope) -> str:
    """A request's path, less that of a proxy in front of the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_open(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    if scope["method"] == "OPTIONS":  # a browser asks before it sends a key, and vLLM's application answers
        return any(name == b"access-control-request-method" for name, _value in scope["headers"])
    return scope["method"] in ("GET", "HEAD") and path_of(scope) in OPEN_PATHS


async def _refuse(scope: Scope, send: Send, *, has_key: bool) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})  # before it was accepted: status 403
        return
    message, code = (_WRONG, "invalid_api_key") if has_key else (_MISSING, "missing_api_key")
    body = json.dumps(error_for(path_of(scope), 401, message, code)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    if any(name in (b"content-length", b"transfer-encoding") for name, _value in scope["headers"]):
        headers.append((b"connection", b"close"))  # the body is not read
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
