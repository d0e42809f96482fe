"""Authentication in front of an application that must not be reached, and which key a request has behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from weft.core.routing.admission import Refused
from weft.engine.serve.keys import OPEN_PATHS, ApiKey, Authenticate, key_of, make_key_ring

Headers = list[tuple[bytes, bytes]]


class Asked:
    """One request to `Authenticate`.

    Attributes:
        keys: What the application was reached with.
        sent: What the client got.
        refused: Why, for the metrics.
        has_read: Whether anybody has read the body.
    """

    def __init__(
        self, path: str, headers: Headers | None = None, method: str = "POST", root_path: str = "", kind: str = "http"
    ) -> None:
        self.keys: list[ApiKey | None] = []
        self.sent: list[Any] = []
        self.has_read = False
        scope = {"type": kind, "method": method, "path": path, "headers": headers or []}
        self.refused: list[Refused] = []
        guard = Authenticate(self._app, make_key_ring(["sk-a"]), root_path, on_refused=self.refused.append)
        asyncio.run(guard(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        self.has_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def _app(self, scope: Any, _receive: Any, _send: Any) -> None:
        self.keys.append(key_of(scope))

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sent[1]["body"])
        return found


def test_a_request_without_a_key_reaches_nothing() -> None:
    """Its body is not read either, and the connection closes, because the body is still to come."""
    asked = Asked("/v1/chat/completions", [(b"content-length", b"1000000000")])
    assert (asked.keys, asked.has_read) == ([], False)
    assert asked.sent[0]["status"] == 401
    assert (b"connection", b"close") in asked.sent[0]["headers"]
    assert asked.error["error"]["code"] == "missing_api_key"
    assert asked.refused == [Refused.NO_API_KEY]


def test_a_wrong_key_is_told_from_none() -> None:
    """With OpenAI's own code, which its clients check; the answer does not repeat the key."""
    asked = Asked("/v1/models", [(b"authorization", b"Bearer sk-wrong")], "GET")
    assert asked.error["error"]["code"] == "invalid_api_key"
    assert asked.refused == [Refused.WRONG_API_KEY]
    assert b"sk-wrong" not in asked.sent[1]["body"]


def test_anthropics_clients_get_anthropics_error() -> None:
    """Also where a proxy puts a path in front."""
    for path, root_path in (("/v1/messages", ""), ("/v1/messages/count_tokens", ""), ("/llm/v1/messages", "/llm")):
        error = Asked(path, root_path=root_path).error
        assert error["type"] == "error"
        assert error["error"]["type"] == "authentication_error"


def test_a_request_with_a_key_passes() -> None:
    """The application learns who asks."""
    (key,) = Asked("/any", [(b"x-api-key", b"sk-a")]).keys
    assert key is not None
    assert key.tenant == "key-1"


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_no_key_to_be_read(path: str) -> None:
    """They take no other method, and nothing behind them."""
    assert Asked(path, method="GET").keys == [None]
    assert Asked(path, method="POST").keys == []
    assert Asked(f"{path.rstrip('/')}/x", method="GET").keys == []


def test_a_browser_may_ask_before_it_sends_a_key() -> None:
    """Browsers send no key with this question. Another OPTIONS request needs one."""
    assert Asked("/v1/models", [(b"access-control-request-method", b"POST")], "OPTIONS").keys == [None]
    assert Asked("/v1/models", method="OPTIONS").keys == []


def test_a_websocket_without_a_key_is_closed() -> None:
    """It is closed before it is accepted, which is status 403."""
    asked = Asked("/v1/realtime", kind="websocket")
    assert asked.keys == []
    assert asked.sent == [{"type": "websocket.close", "code": 1008}]
