"""`weft top` as a command: its table as text, and its errors in one line."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import weft
from weft.commands.cli import main
from weft.testing import ScriptedEngine


def top(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", "top", *arguments])
    return main()


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that has one answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_table_is_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As plain text without colours, with the programs that have ended, at the width of the terminal."""
    with ScriptedEngine(["Hi", "Hi"], latency_s=1.5, listen="127.0.0.1:0") as engine:
        with weft.Program("agent [bold]") as program:
            engine.chat_sync(
                {"messages": [{"role": "user", "content": "Hello"}]}, program, program.reports.start_call(object())
            )
            assert engine.url is not None
            assert top(monkeypatch, engine.url.removeprefix("http://") + "/v1", "--once") == 0, (
                "clients have such an address"
            )
        assert top(monkeypatch, engine.url) == 0, "the output is no terminal"
    first, second = capsys.readouterr().out.split("replica ")[1:]
    line = next(line for line in first.splitlines() if line.startswith("agent"))
    assert line.split() == ["agent", "[bold]", "idle", "1.50", "0.00", "1", "1", "1"]
    assert "agent [bold] finished" in second
    assert "\x1b" not in first
    assert max(map(len, first.splitlines())) <= 80


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1", "onnect"),
        ("127.0.0.1:1", "onnect"),
        ("unix:/nowhere/weft.sock", "No such file"),
        ("ftp://127.0.0.1", "protocol"),
        ("http://[", ""),
        ("http://weft.invalid", ""),
        ("http://127.0.0.1:99999", "there is no port 99999"),
        ("", ""),
    ],
)
def test_a_wrong_address_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, reason: str
) -> None:
    """It names the address and says why."""
    assert top(monkeypatch, url) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: no Weft server answers at '{url}': ")
    assert reason in error
    assert ".." not in error.replace("...", ""), "a reason may end in a full stop of its own"
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        *(
            (200, body, "no state of a Weft engine")
            for body in (b"<html>" * 10_000, b"", b"[]", b'{"at_s": 1}', b"NaN")
        ),
        (200, b"x" * (33 << 20), "too long"),
        (404, b"not here", "another server, such as vLLM's own, is there"),
        (500, b"oh", "status 500"),
        (401, b"who are you", "give --api-key"),
    ],
)
def test_another_server_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: bytes, reason: str
) -> None:
    """So is one that asks for a key. Much more than a state has is not read."""
    with answering(status, body) as url:
        assert top(monkeypatch, url, "--once") == 1
    error = capsys.readouterr().err
    assert reason in error
    assert len(error) < 400
    assert len(error.splitlines()) == 1


def test_a_server_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing waits for ever."""
    monkeypatch.setattr("weft.views.top_client._ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert top(monkeypatch, f"127.0.0.1:{silent.getsockname()[1]}") == 1
    assert "no answer in" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["secret\nx: y", "secret 日本"])
def test_a_key_that_no_header_can_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """It is not sent, and not shown."""
    with ScriptedEngine([], listen="127.0.0.1:0") as engine:
        assert engine.url is not None
        assert top(monkeypatch, engine.url, "--api-key", key) == 1
    error = capsys.readouterr().err
    assert "API key" in error
    assert "secret" not in error
    assert len(error.splitlines()) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says what to install."""
    modules = [name for name in sys.modules if name.startswith(("weft.views.top", "textual"))]
    for name in modules:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with ScriptedEngine([], listen="127.0.0.1:0") as engine:
        assert engine.url is not None
        assert top(monkeypatch, engine.url) == 1
    assert "needs textual: not installed. Run `pip install 'textual>=" in capsys.readouterr().err
