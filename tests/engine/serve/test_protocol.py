"""What comes before a request's body: its limits, on a connection without a network."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from weft.engine.http.guards import LimitedHttp, limited_http


class Wire(asyncio.Transport):
    """The server's side of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """There is nothing to read."""

    def resume_reading(self) -> None:
        """There is nothing to read."""


class Connection:
    """A connection to an application that answers at once. Its timers run when the test says so."""

    def __init__(self, app: Any = None) -> None:
        self.wire, self.timers = Wire(), []
        loop = asyncio.new_event_loop()
        self.loop: Any = loop
        loop.call_later = self._later  # type: ignore[assignment]  # no test waits
        config = uvicorn.Config(app or self._app, http=limited_http(1000, 10), log_config=None, interface="asgi3")
        self.protocol: LimitedHttp = limited_http(1000, 10)(config, ServerState(), {}, loop)
        self.protocol.connection_made(self.wire)

    def _later(self, delay_s: float, callback: Any, *_arguments: Any, **_keywords: Any) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(delay_s, callback, (), self.loop)
        self.timers.append(timer)
        return timer

    async def _app(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def send(self, data: bytes) -> None:
        if not self.wire.is_closed:
            self.protocol.data_received(data)
        self.loop.run_until_complete(asyncio.sleep(0))

    @property
    def status(self) -> int | None:
        return int(self.wire.sent.split()[1]) if self.wire.sent else None

    @property
    def error(self) -> str:
        return str(json.loads(self.wire.sent.partition(b"\r\n\r\n")[2])["error"]["message"])

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self.loop.close()


def test_a_request_of_usual_size_is_served() -> None:
    """In one piece or in many, and with a body of any size."""
    for size in (1, 7, 10_000):
        with Connection() as connection:
            data = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000
            for start in range(0, len(data), size):
                connection.send(data[start : start + size])
            assert connection.status == 200
            assert not connection.wire.is_closed


def test_a_header_without_end_is_refused_before_it_fills_memory() -> None:
    """The parser would keep all of it until its end."""
    with Connection() as connection:
        connection.send(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(11):
            connection.send(b"y" * 100)
        assert connection.status == 431
        assert "--h11-max-incomplete-event-size" in connection.error
        assert connection.wire.is_closed


def test_too_many_headers_are_refused() -> None:
    """Each one costs more memory than its bytes."""
    with Connection() as connection:
        connection.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 11 + b"\r\n")
        assert connection.status == 431
        assert connection.wire.is_closed


def test_what_is_no_http_gets_an_error_that_clients_can_read() -> None:
    """uvicorn's own answer is plain text."""
    with Connection() as connection:
        connection.send(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.status == 400
        assert "HTTP/1.1" in connection.error


def test_a_connection_that_is_slow_with_its_head_is_closed() -> None:
    """Also one that sends nothing, or the next head a byte at a time."""
    for data in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET"):
        with Connection() as connection:
            connection.send(data)
            for timer in [each for each in connection.timers if not each.cancelled()]:
                timer._run()
            assert connection.wire.is_closed


def test_a_body_that_nobody_reads_must_arrive_in_time() -> None:
    """The application has answered without it, as vLLM's does on an unknown path, and the client goes on to drip."""
    with Connection() as connection:
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n1")
        assert connection.wire.sent.startswith(b"HTTP/1.1 200")
        assert not connection.wire.is_closed
        connection.protocol.data_received(b"2")
        for timer in connection.timers:
            if not timer.cancelled():
                timer._run()
        assert connection.wire.is_closed


def test_a_request_that_is_complete_may_take_its_time() -> None:
    """Its body is bounded by the application's limit, and the answer by deadlines."""
    with Connection() as connection:
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n")
        connection.protocol.data_received(b"\r\n")
        connection.protocol.data_received(b"12345")
        assert all(timer.cancelled() for timer in connection.timers)
        connection.loop.run_until_complete(asyncio.sleep(0))


def test_every_request_of_a_connection_that_is_lost_is_told() -> None:
    """A client may send several without waiting. Otherwise the first would go on, and write to a closed connection."""
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/done":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        told.append(scope["path"])

    with Connection(app) as connection:
        for path in (b"/done", b"/first", b"/second"):
            connection.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
        answered = bytes(connection.wire.sent)
        connection.wire.close()
        connection.protocol.connection_lost(None)
        for _ in range(5):
            connection.loop.run_until_complete(asyncio.sleep(0))
        assert told == ["/first"]  # the second one had not begun
        assert connection.wire.sent == answered
