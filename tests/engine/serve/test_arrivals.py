"""Requests that are still arriving: they count against every limit before their bytes are held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.errors import ArrivingError
from weft.core.identity.lineage import Lineage
from weft.core.routing.admission import Admission, Refused
from weft.engine.http.bodies import Arrivals
from weft.engine.serve.exchange import ServeRequests
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.requests import ServedRequests, SharedLineage

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


class Server:
    """A server without an engine. Its application reads each body, and answers when `ends` is set."""

    def __init__(self, **bounds: Any) -> None:
        self.arrivals = Arrivals(1000, **bounds)
        programs: Any = SimpleNamespace(check_room=lambda *_: None, end_after_calls=lambda _: None)
        self.requests = ServedRequests(programs, Admission(lambda: 8), lambda: 0.0)
        self.refused: list[Refused] = []
        self.ends = asyncio.Event()
        engine: Any = SimpleNamespace(
            requests=self.requests,
            admit=self.requests.admit,
            refused=lambda reason, _key: self.refused.append(reason),
            call_timeout_s=None,
            lineage=SharedLineage(Lineage()),
        )
        self._app = ServeRequests(self._answer, engine)
        self._app._max_body_bytes, self._app._arrivals = 1000, self.arrivals

    async def _answer(self, _scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            return
        await self.ends.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def client(self, key: ApiKey, pieces: Iterable[bytes], *, path: str = CHAT) -> Client:
        """A client that sends pieces of a body, and never the rest by itself."""
        client = Client(pieces)
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "weft.key": key}
        client.task = asyncio.create_task(self._app(scope, client.receive, client.send))
        return client


class Client:
    """One connection.

    Attributes:
        status: Of its answer; 0 before.
        error: Of its answer.
        headers: Of its answer.
        has_stalled: Is set when all its pieces were read.
    """

    task: asyncio.Task[None]

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)
        self._later: asyncio.Queue[Any] = asyncio.Queue()
        self.has_stalled = asyncio.Event()
        self.status, self.error, self.headers = 0, "", {}

    async def receive(self) -> Any:
        if self._pieces:
            return {"type": "http.request", "body": self._pieces.pop(0), "more_body": True}
        self.has_stalled.set()
        return await self._later.get()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        elif self.status >= 400:
            self.error = json.loads(message["body"])["error"]["message"]

    def finish(self, rest: bytes = b"") -> None:
        self._later.put_nowait({"type": "http.request", "body": rest, "more_body": False})

    def leave(self) -> None:
        self._later.put_nowait({"type": "http.disconnect"})


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]  # a coroutine function


def test_a_body_that_is_arriving_takes_a_place_of_its_key() -> None:
    """A key with two places holds two unfinished bodies and no third. The third one's bytes are not waited for."""

    async def test() -> None:
        server, key = Server(), ApiKey("a", max_calls=2)
        first, second = (server.client(key, [BODY[:5]]) for _ in range(2))
        await first.has_stalled.wait()
        await second.has_stalled.wait()
        third, other = server.client(key, [BODY[:5]]), server.client(ApiKey("b", max_calls=1), [BODY[:5]])
        await third.task
        assert (third.status, third.headers[b"connection"]) == (429, b"close")
        assert "2 calls in flight, which is its limit" in third.error
        await other.has_stalled.wait()
        server.ends.set()
        for client in (first, second, other):
            client.finish(BODY[5:])
            await client.task
            assert client.status == 200
        assert server.refused == [Refused.MAX_CALLS]
        assert not len(server.arrivals)

    run(test)


def test_a_call_keeps_the_place_that_its_body_took() -> None:
    """It is counted once, from its first bytes to its answer."""

    async def test() -> None:
        server, key = Server(), ApiKey("a", max_calls=1)
        for _ in range(3):
            server.ends.clear()
            running = server.client(key, [BODY[:5]])
            running.finish(BODY[5:])
            await running.has_stalled.wait()
            late = server.client(key, [BODY[:5]])
            await late.task
            assert late.status == 429
            server.ends.set()
            await running.task
            assert running.status == 200

    run(test)


def test_a_client_that_leaves_gives_everything_back() -> None:
    """Also one whose body makes no sense, is too large, or whose task is cancelled with the server."""

    async def test() -> None:
        server, key = Server(), ApiKey("a", max_calls=1)
        server.ends.set()
        for end in ("leaves", "broken", "too large", "cancelled"):
            client = server.client(key, [BODY[:5]])
            await client.has_stalled.wait()
            assert (len(server.arrivals), server.arrivals.held_bytes) == (1, 5)
            if end == "leaves":
                client.leave()
            elif end == "cancelled":
                client.task.cancel()
            else:
                client.finish(b"}" * (2000 if end == "too large" else 1))
            await asyncio.wait([client.task])
            assert (len(server.arrivals), server.arrivals.held_bytes) == (0, 0), end
        last = server.client(key, [BODY])
        last.finish()
        await last.task
        assert last.status == 200

    run(test)


@pytest.mark.parametrize("path", [CHAT, "/weft/events", "/tokenize"])
def test_a_body_that_is_not_complete_in_time_is_answered_and_closed(path: str) -> None:
    """Status 408. Its place is free, and the reason is counted."""

    async def test() -> None:
        server, key = Server(body_s=0), ApiKey("a", max_calls=1)  # it is over when the client lets the server wait
        for _ in range(2):
            client = server.client(key, [BODY[:5]], path=path)
            await client.task
            assert (client.status, client.headers[b"connection"]) == (408, b"close")
            assert "was not complete within 0 s" in client.error
        assert server.refused == [Refused.SLOW] * 2
        assert (len(server.arrivals), server.arrivals.held_bytes) == (0, 0)

    run(test)


def test_a_key_without_a_limit_holds_half_of_what_may_arrive() -> None:
    """So the others' requests still arrive, on every route."""

    async def test() -> None:
        server = Server(most_bytes=1600)
        first = server.client(ApiKey("a"), [b"x" * 500], path="/tokenize")
        await first.has_stalled.wait()
        second = server.client(ApiKey("a"), [b"x" * 200, b"x" * 101], path="/tokenize")
        await second.task
        assert second.status == 429
        assert int(second.headers[b"retry-after"]) >= 1
        assert "700 bytes that are not complete are arriving, and this client may have no more" in second.error
        assert server.arrivals.held_bytes == 500
        other = server.client(ApiKey("b"), [b"x" * 800], path="/tokenize")
        await other.has_stalled.wait()
        last = server.client(ApiKey("c"), [b"x" * 301], path="/tokenize")
        await last.task
        assert "1300 bytes that are not complete are arriving, and this server may have no more" in last.error
        assert server.refused == [Refused.OVERLOADED] * 2
        for client in (first, other):
            client.leave()
            await client.task
        assert server.arrivals.held_bytes == 0

    run(test)


def test_the_number_of_bodies_is_bounded_even_if_they_are_empty() -> None:
    """A connection whose body does not begin costs little, and not nothing."""
    arrivals = Arrivals(1000, most_bodies=4)
    with arrivals.body("a"), arrivals.body("a"):
        with pytest.raises(ArrivingError, match="this client may have no more"), arrivals.body("a"):
            pass
        with (
            arrivals.body("b"),
            arrivals.body("b"),
            pytest.raises(ArrivingError, match="4 requests that are not complete are arriving, and this server"),
            arrivals.body("c"),
        ):
            pass
        assert len(arrivals) == 2
    assert len(arrivals) == 0
