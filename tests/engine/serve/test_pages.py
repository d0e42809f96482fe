"""What pages in a browser may ask of a server without API keys."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from weft.core.routing.admission import Refused
from weft.engine.http.guards import RefuseForeignPages

Headers = list[tuple[bytes, bytes]]


class Asked:
    """One request to a server that listens at the name `weft.corp.com` and trusts the pages of https://ui.corp.com.

    Attributes:
        has_passed: Whether the application was reached.
        sent: What the client got.
        refused: Why, for the metrics.
    """

    def __init__(self, host: str | None, origin: str | None = None, kind: str = "http") -> None:
        self.has_passed = False
        self.sent: list[Any] = []
        self.refused: list[Refused] = []
        given = ((b"host", host), (b"origin", origin))
        headers = [(name, value.encode()) for name, value in given if value is not None]
        guard = RefuseForeignPages(
            self._app, "weft.corp.com", ["*", "https://ui.corp.com"], on_refused=self.refused.append
        )
        scope = {"type": kind, "method": "POST", "path": "/weft/events", "headers": headers}
        asyncio.run(guard(scope, self._receive, self._send))

    async def _app(self, _scope: Any, _receive: Any, _send: Any) -> None:
        self.has_passed = True

    async def _receive(self) -> Any:
        raise AssertionError("the body is read")

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1:8000",
            "[::1]:8000",
            "10.0.0.7",
            "localhost",
            "LOCALHOST:8000",
            "weft",
            "gpu-box:8000",
            "box.local.",
        ),
        *("weft.corp.com:8000", socket.gethostname(), "weft.default.svc.cluster.local", None),
    ],
)
def test_a_server_answers_to_its_addresses_and_to_names_that_no_stranger_owns(host: str | None) -> None:
    """Clients that are no browser may use the names of a network of one's own, and those send no origin."""
    asked = Asked(host)
    assert (asked.has_passed, asked.sent, asked.refused) == (True, [], [])


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example.com", "evil.com:8000", "127.0.0.1.evil.com", "corp.com", "[::1", "a b.com"]
)
def test_a_name_of_somebody_else_is_refused(host: str) -> None:
    """A page whose name was made to mean this server's address could read everything otherwise (DNS rebinding)."""
    asked = Asked(host, origin=f"http://{host}")
    assert (asked.has_passed, asked.refused) == (False, [Refused.FOREIGN_PAGE])
    assert asked.sent[0]["status"] == 403
    assert (b"connection", b"close") in asked.sent[0]["headers"]
    assert "--api-key" in json.loads(asked.sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    [
        *("http://10.0.0.7:8000", "http://localhost:3000", "http://127.0.0.1", "https://[::1]:5173"),
        *("https://ui.corp.com", "vscode-webview://panel", "app://obsidian.md"),
    ],
)
def test_pages_of_this_server_of_this_machine_and_those_that_are_listed_pass(origin: str) -> None:
    """So do applications that are no web page. The origin is that of the server's own page, for example."""
    assert Asked("10.0.0.7:8000", origin).has_passed


@pytest.mark.parametrize(
    "origin",
    ["https://evil.com", "http://10.0.0.7:8001", "http://ui.corp.com", "null", "http://localhost.evil.com", "http://"],
)
def test_a_page_of_another_site_is_refused(origin: str) -> None:
    """A browser sends the request of any page, and asks the server only about some of them before."""
    asked = Asked("10.0.0.7:8000", origin)
    assert (asked.has_passed, asked.refused) == (False, [Refused.FOREIGN_PAGE])
    assert "--allowed-origins" in json.loads(asked.sent[1]["body"])["error"]["message"]


def test_a_web_socket_of_another_site_is_refused_before_it_opens() -> None:
    """The browser does not ask before it opens one."""
    assert Asked("127.0.0.1", "https://evil.com", "websocket").sent == [{"type": "websocket.close", "code": 1008}]
