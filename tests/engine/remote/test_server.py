"""A server that answers in ways that a live `weft serve` seldom does: canned bytes, and connections that end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import weft
from weft.core.errors import (
    CallFailedError,
    DeadlineError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    RetryableCallError,
    ServerError,
    WeftError,
)
from weft.engine.http.http_errors import error_body, error_headers, error_status
from weft.engine.remote import connection as server
from weft.engine.remote.connection import Server

pytestmark = pytest.mark.anyio

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def head(status: int, length: int | None, kind: str = "application/json", **headers: str) -> bytes:
    """A response up to its body; without a length it is chunked."""
    sized = {"content-length": str(length)} if length is not None else {"transfer-encoding": "chunked"}
    lines = [f"HTTP/1.1 {status} Said"]
    lines += [
        f"{name.replace('_', '-')}: {value}" for name, value in {"content-type": kind, **sized, **headers}.items()
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncGenerator[Server]:
    """A server that answers each request with these bytes, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in headers.lower().splitlines() if line.startswith(b"content-length:")
        )
        await reader.readexactly(length)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    answered = Server(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", None)
    async with listening:
        yield answered
        await answered.close()


async def events(answered: Server) -> list[dict[str, Any]]:
    return [event async for event in answered.stream("/v1/chat/completions", {}, {}, shape={})]


async def test_nobody_listens() -> None:
    """The call has not run, and the error says what to look at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerError, match="cannot be reached") as caught:
        await asyncio.to_thread(weft.connect, url)
    assert (caught.value.url, caught.value.may_have_run) == (url, False)


async def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and no answer comes: a question that runs no call ends after a time."""
    monkeypatch.setattr(server, "_ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerError, match="did not answer") as caught:
        await asyncio.to_thread(weft.connect, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert not caught.value.may_have_run


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "", "/v1", "http://host:99999"])
def test_an_address_that_is_none(url: str) -> None:
    """The caller is told how one looks."""
    with pytest.raises(InvalidRequestError, match="http://host:8000"):
        weft.connect(url)


@pytest.mark.parametrize("parts", [(), (head(200, 100), b'{"id"')])
async def test_a_connection_that_ends_leaves_the_call_in_doubt(parts: tuple[bytes, ...]) -> None:
    """The call may have run, so nobody repeats it but the caller who knows."""
    async with answering(*parts) as answered:
        with pytest.raises(ServerError, match="did not answer") as caught:
            await answered.ask("/v1/chat/completions", {}, may_run=True)
    assert caught.value.may_have_run


@pytest.mark.parametrize("ends", [b"", b"0\r\n\r\n"])
async def test_a_stream_that_ends_too_early_is_an_error(ends: bytes) -> None:
    """With or without the end of the response: what has come is not a whole answer."""
    begin = head(200, None, "text/event-stream")
    async with answering(begin, chunk(b'data: {"choices":[]}\n\n'), ends) as answered:
        with pytest.raises(ServerError) as caught:
            await events(answered)
    assert caught.value.may_have_run


async def test_a_stream_is_split_at_empty_lines_only() -> None:
    """A text may have other characters that some take for the end of a line, and come in pieces."""
    text = "a\u2028b\u0085c\x0bd"
    data = f'data: {{"text": "{text}"}}\n\ndata: [DONE]\n\n'.replace("\x0b", "\\u000b").encode()
    begin = head(200, None, "text/event-stream")
    async with answering(begin, *(chunk(data[i : i + 7]) for i in range(0, len(data), 7)), b"0\r\n\r\n") as answered:
        assert await events(answered) == [{"text": text}]


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError(7, 6, 2.5),
        DeadlineError("call", 3.0, 17),
        ReplicaLostError("replica-1", 5, 2),
        CallFailedError("the engine failed on this call: why"),
        RetryableCallError("the engine failed on this call: it is paused"),
        InvalidRequestError("temperature must not be negative"),
    ],
)
async def test_an_error_comes_back_as_it_was(error: WeftError) -> None:
    """Its class, its message and its attributes: as the whole answer, and at the end of a stream."""
    body = json.dumps(error_body(error)).encode()
    begin = head(error_status(error), len(body), **error_headers(error))
    stream = head(200, None, "text/event-stream") + chunk(b"data: " + body + b"\n\n")
    for parts in ((begin, body), (stream,)):
        async with answering(*parts) as answered:
            with pytest.raises(type(error)) as caught:
                await events(answered)
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)
        assert vars(caught.value) == vars(error)


async def test_a_call_that_no_replica_began_has_not_run() -> None:
    """As the whole answer, and as the end of a stream, which has no status of its own."""
    error = NoReplicaError("tiny", 20.0, "it hung")
    body = json.dumps(error_body(error)).encode()
    stream = head(200, None, "text/event-stream") + chunk(b"data: " + body + b"\n\n")
    for parts in ((head(error_status(error), len(body)), body), (stream,)):
        async with answering(*parts) as answered:
            with pytest.raises(ServerError, match="no replica of 'tiny'") as caught:
                await events(answered)
        assert (caught.value.status, caught.value.may_have_run) == (503, False)


@pytest.mark.parametrize(
    ("status", "may_have_run"), [(401, False), (403, False), (502, True), (503, False), (418, False)]
)
async def test_other_statuses_are_errors_of_the_server(status: int, may_have_run: bool) -> None:
    """Such as those of a proxy, with a page instead of JSON."""
    page = b"<html>no</html>"
    async with answering(head(status, len(page), "text/html"), page) as answered:
        with pytest.raises(ServerError) as caught:
            await answered.ask("/v1/chat/completions", {}, may_run=True)
    assert (caught.value.status, caught.value.may_have_run) == (status, may_have_run)


async def test_a_proxys_retry_after_counts() -> None:
    """An overload need not come from `weft serve`."""
    async with answering(head(429, 0, retry_after="3")) as answered:
        with pytest.raises(OverloadedError) as caught:
            await answered.ask("/v1/chat/completions", {}, may_run=True)
    assert caught.value.retry_after_s == 3.0


async def test_an_answer_that_is_no_json_is_an_error() -> None:
    """Something else listens there."""
    async with answering(head(200, 2, "text/html"), b"no") as answered:
        with pytest.raises(ServerError, match="no JSON"):
            await answered.ask("/v1/chat/completions", {}, may_run=True)
