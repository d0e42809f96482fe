"""Responses that end early: the call fails when a part of its answer was sent, or the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.errors import DeadlineError, WeftError
from weft.core.identity.lineage import Lineage
from weft.engine.http.check_ids import App, CheckIds
from weft.engine.serve.exchange import ServeRequests
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.requests import SharedLineage

LATE = DeadlineError("call", 2.0, 7)
BODY = json.dumps({"model": "tiny", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}).encode()
FIRST = b'event: response.created\ndata: {"type":"response.created"}\n\n'


class Client:
    """A connection. It leaves when `leaves` is set; what is sent to it later fails as on uvloop."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.leaves = asyncio.Event()
        self._has_sent = False
        self.knows = True  # the server tells of it

    async def receive(self) -> Any:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": BODY, "more_body": False}
        await self.leaves.wait()
        if not self.knows:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.leaves.is_set():
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
        self.sent.append(message)

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


def scope(path: str) -> Any:
    return {"type": "http", "method": "POST", "path": path, "headers": [], "weft.key": ApiKey("a")}


def served(app: App) -> tuple[ServeRequests, Callable[[WeftError], None]]:
    """The application behind the server, and what fails the call of its request."""
    admitted: dict[str, Any] = {}
    engine: Any = SimpleNamespace(
        requests=SimpleNamespace(get=admitted.get, end=lambda _key: None),
        admit=admitted.__setitem__,
        call_timeout_s=None,
        lineage=SharedLineage(Lineage()),
    )

    def fail(error: WeftError) -> None:
        (request,) = admitted.values()
        request.failure = error

    return ServeRequests(app, engine), fail


def stream(*pieces: bytes, then: Exception | None = None, before: Callable[[], None] = lambda: None) -> App:
    """An application that reads the body, sends pieces of a stream, and ends, or fails."""

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        before()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if then is not None:
            raise then
        await send({"type": "http.response.body", "body": b""})

    return app


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]  # a coroutine function


def test_a_stream_of_responses_ends_with_the_error_of_its_call() -> None:
    """vLLM's route lets the error through, so that the server would cut the connection and log a traceback."""

    async def test() -> None:
        then = RuntimeError("Caught handled exception, but response already started.")
        app, fail = served(stream(FIRST, FIRST, then=then, before=lambda: fail(LATE)))
        client = Client()
        await app(scope("/v1/responses"), client.receive, client.send)
        assert client.text.startswith(FIRST + FIRST)
        event = client.text.removeprefix(FIRST + FIRST).decode()
        assert event.startswith("event: error\ndata: {")
        data = json.loads(event.removeprefix("event: error\ndata: "))
        assert (data["type"], data["code"], data["sequence_number"]) == ("error", "deadline_exceeded", 2)
        assert data["message"] == data["error"]["message"] == str(LATE)
        assert not client.sent[-1].get("more_body", False)

    run(test)


def test_a_stream_of_messages_ends_with_weft_s_error_in_anthropics_form() -> None:
    """vLLM's converter would send pydantic's complaint that the error event below it is no chunk."""

    async def test() -> None:
        vllms = (
            b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"1 validation error"}}\n\n'
        )
        app, fail = served(stream(FIRST, vllms, before=lambda: fail(LATE)))
        client = Client()
        await app(scope("/v1/messages"), client.receive, client.send)
        assert client.text.startswith(FIRST)
        data = json.loads(client.text.removeprefix(FIRST).decode().removeprefix("event: error\ndata: "))
        assert data == {"type": "error", "error": {"type": "api_error", "message": str(LATE)}}

    run(test)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_an_error_that_is_not_of_the_call_still_reaches_the_server(path: str) -> None:
    """It is a defect, and its traceback is wanted. Streams of chats end with an event of vLLM's."""

    async def test() -> None:
        def before() -> None:
            if path != "/v1/responses":
                fail(LATE)

        app, fail = served(stream(FIRST, then=KeyError("a"), before=before))
        client = Client()
        with pytest.raises(KeyError):
            await app(scope(path), client.receive, client.send)

    run(test)


@pytest.mark.parametrize("knows", [True, False])
def test_a_client_that_leaves_is_no_error(knows: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Neither if the server tells of it, nor if only a write fails, as uvloop has it. The application stops writing."""

    async def test() -> None:
        client, writes = Client(), 0
        client.knows = knows

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            nonlocal writes
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            client.leaves.set()
            if knows:
                assert (await receive())["type"] == "http.disconnect"
            while True:
                writes += 1
                await send({"type": "http.response.body", "body": b"x", "more_body": True})

        await CheckIds(app)(scope("/v1/chat/completions"), client.receive, client.send)
        assert writes == 1

    run(test)
    assert not caplog.records


def test_what_fails_after_the_client_has_gone_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a defect. Nobody waits for the answer."""

    async def test() -> None:
        client = Client()

        async def app(_scope: Any, receive: Any, _send: Any) -> None:
            await receive()
            client.leaves.set()
            await receive()
            raise ValueError("no answer\nfor nobody")

        await CheckIds(app)(scope("/v1/chat/completions"), client.receive, client.send)

    run(test)
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage().endswith("reason=ValueError: no answer")


def test_what_fails_after_a_whole_answer_still_reaches_the_server() -> None:
    """The server tells an application of a disconnect after each response. That is no client that left."""

    async def test() -> None:
        client = Client()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})
            client.leaves.set()
            await receive()
            raise ValueError("in a task of the background")

        with pytest.raises(ValueError, match="background"):
            await CheckIds(app)(scope("/v1/chat/completions"), client.receive, client.send)

    run(test)


def test_another_error_of_the_connection_still_reaches_the_server() -> None:
    """Such as an answer that is longer than it said."""

    async def test() -> None:
        client = Client()

        async def send(_message: Any) -> None:
            raise RuntimeError("Response content longer than Content-Length")

        with pytest.raises(RuntimeError, match="longer"):
            await CheckIds(stream(b"x"))(scope("/v1/chat/completions"), client.receive, send)

    run(test)
