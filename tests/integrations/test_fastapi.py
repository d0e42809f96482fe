"""The service of docs/how-to/fastapi.md with real clients: answers, streams, errors, clients that leave, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
import uvicorn
from background import ROOT
from observers import wait_until_generating, wait_until_idle
from polling import until
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import Message
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.errors import ContextLengthError, DeadlineError, OverloadedError, ReplicaLostError, UnknownModelError
from weft.integrations.fastapi import AbortOnDisconnect, event_stream
from weft.testing import FakeClock, Reply, ScriptedEngine

pytestmark = pytest.mark.anyio

((_, SERVICE),) = re.findall(
    r'```python title="(.+?)"\n(.*?)```', (ROOT / "docs/how-to/fastapi.md").read_text(), flags=re.DOTALL
)
ERRORS = {
    "context_length_exceeded": (ContextLengthError("too long"), 400),
    "model_not_found": (UnknownModelError("m", ["n"]), 404),
    "overloaded": (OverloadedError(3, 3, 1.5), 429),
    "deadline_exceeded": (DeadlineError("call", 1.0, 0), 504),
}


def reply(body: Mapping[str, Any]) -> Any:
    """Answers, but waits for the clock if it is asked to wait, and fails if it is asked for an error."""
    text = body["messages"][-1]["content"]
    if text in ERRORS:
        return ERRORS[text][0]
    return Reply("The Nile is long.", latency_s=60.0 if text == "wait" else 0.0)


class Service(NamedTuple):
    client: httpx.AsyncClient
    engine: Any


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application on a thread, as uvicorn does. Gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with anyio.from_thread.start_blocking_portal() as portal:
            portal.call(until, lambda: server.started or not thread.is_alive())
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def made(engine: Any, source: str = SERVICE) -> Any:
    """The application of the page, with this engine."""

    async def create() -> Any:
        return engine

    names: dict[str, Any] = {"__name__": "service", "create": create}
    exec(compile(source.replace("weft.Engine.create", "create"), "service.py", "exec"), names)  # noqa: S102  our own
    return names["app"]


@pytest.fixture
async def service() -> AsyncGenerator[Service]:
    """The service of the page on an engine that answers from a script."""
    engine = ScriptedEngine(reply, clock=FakeClock())
    with serving(made(engine)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield Service(client, engine)


def asked(text: str) -> dict[str, str]:
    return {"text": text, "user": "ann"}


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


async def test_an_endpoint_answers(service: Service) -> None:
    """The request is a program in its user's session."""
    answer = await service.client.post("/answer", json=asked("Where is the Nile?"))
    assert answer.json() == {"answer": "The Nile is long."}
    (row,) = service.engine.table.ended()
    assert (row.info.name, row.info.session_id, row.state) == ("answer", "ann", "finished")


async def test_an_endpoint_streams(service: Service) -> None:
    """Each value of the generator is an event, and the last event says that there are no more."""
    answer = await service.client.post("/tell", json=asked("Where is the Nile?"))
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert "".join(found[:-1]) == "The Nile is long."
    assert len(found) > 4
    assert found[-1] == "[DONE]"
    assert [row.state for row in service.engine.table.ended()] == ["finished"]


@pytest.mark.parametrize("path", ["/answer", "/tell"])
@pytest.mark.parametrize("code", ERRORS)
async def test_an_error_has_the_status_of_openais_api(service: Service, path: str, code: str) -> None:
    """Streams that are refused have it as well, because the response begins with the first event."""
    answer = await service.client.post(path, json=asked(code))
    assert (answer.status_code, answer.json()["error"]["code"]) == (ERRORS[code][1], code)
    assert answer.headers.get("retry-after") == ("2" if code == "overloaded" else None)


@pytest.mark.parametrize("path", ["/answer", "/tell"])
async def test_a_client_that_leaves_ends_its_program(service: Service, path: str) -> None:
    """The call is aborted although nobody waits for the endpoint any more, and other requests go on."""
    request = asyncio.create_task(service.client.post(path, json=asked("wait")))
    await service.engine.until_waiting(1)
    request.cancel()
    await until(service.engine.table.ended)
    assert [row.state for row in service.engine.table.ended()] == ["cancelled"]
    await until(lambda: service.engine._chat.waiting == 0)
    assert (await service.client.post("/answer", json=asked("Hello"))).status_code == 200


@pytest.mark.engine
@pytest.mark.parametrize("path", ["/answer", "/tell"])
async def test_vllm_aborts_the_call_of_a_client_that_leaves(engine: weft.Engine, path: str) -> None:
    """The scheduler has no request left that nobody waits for."""

    class Borrowed:
        """The session's engine, which the service must not shut down."""

        async def __aenter__(self) -> weft.Engine:
            return engine

        async def __aexit__(self, *_error: object) -> None:
            pass

    endless = SERVICE.replace("max_tokens=100", f"max_tokens={ENDLESS_TOKENS}, ignore_eos=True")
    with serving(made(Borrowed(), endless)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            request = asyncio.create_task(client.post(path, json=asked("Where is the Nile?")))
            await wait_until_generating(engine)
            request.cancel()
            await wait_until_idle(engine)
    assert engine.table.ended()[0].state == "cancelled"


# -- the end of the server

# The service of the page on a scripted engine, with a stream that does not end after its first event.
STOPPING = SERVICE.replace("weft.Engine.create()", "ScriptedEngine.create(reply, clock=FakeClock())").replace(
    "uvicorn.run(app, timeout_graceful_shutdown=5)",
    "uvicorn.run(app, port=PORT, access_log=False, timeout_graceful_shutdown=1)",
)
HEAD = """
import asyncio
from weft.testing import FakeClock, Reply, ScriptedEngine

def reply(body):
    print("waits", flush=True)
    return Reply("late", latency_s=60.0)
"""
TICKS = """
async def forever():
    yield "tick"
    await asyncio.Event().wait()

@app.get("/ticks")
async def ticks() -> StreamingResponse:
    return await event_stream(forever())


if __name__"""


async def test_sigterm_ends_open_requests(tmp_path: Path) -> None:
    """uvicorn cancels the open requests. They are answered, the engine shuts down, and no traceback is logged."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "service.py"
    script.write_text(HEAD + STOPPING.replace("PORT", str(port)).replace("\n\nif __name__", TICKS))
    process = subprocess.Popen(  # noqa: ASYNC220  it does not wait
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def is_up() -> bool:
                with anyio.move_on_after(5):
                    try:
                        return (await client.get("/docs")).status_code == 200
                    except httpx.HTTPError:
                        return False
                return False

            while not await is_up():
                assert process.poll() is None, process.communicate()[1]
                await anyio.sleep(0.05)
            paths = ("/answer", "/tell")
            waiting = [asyncio.create_task(client.post(path, json=asked("wait"))) for path in paths]
            for _ in paths:
                assert await asyncio.to_thread(process.stdout.readline) == "waits\n"
            async with client.stream("GET", "/ticks") as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == 'data: "tick"'
                process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
            answers = await asyncio.gather(*waiting)
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
        (503, "server_stopping")
    ] * 2
    assert [json.loads(line.removeprefix("data: "))["error"]["code"] for line in rest] == ["server_stopping"]
    assert "Traceback" not in log, log
    assert "returned without" not in log
    assert "Application shutdown complete" in log
    assert process.returncode in (0, -signal.SIGTERM)


# -- the parts


async def test_an_error_within_a_stream_is_its_last_event() -> None:
    """The status has been sent by then."""

    async def failing() -> AsyncGenerator[str]:
        yield "one"
        raise ReplicaLostError("engine-0", 1, 1)

    response = await event_stream(failing())
    body = "".join([chunk.decode() async for chunk in response.body_iterator])  # type: ignore[union-attr]
    first, last = events(body)
    assert first == "one"
    assert last["error"]["code"] == "replica_lost"


async def test_an_empty_stream_ends() -> None:
    """A generator without a value makes a stream without an event but the last."""

    async def nothing() -> AsyncGenerator[str]:
        return
        yield ""

    response = await event_stream(nothing())
    assert [chunk async for chunk in response.body_iterator] == [b"data: [DONE]\n\n"]


async def run_app(endpoint: Callable[[HttpRequest], Any], messages: list[Message]) -> list[Message]:
    """Run an application with the middleware on these messages of a client. Gives those of the server."""
    app = AbortOnDisconnect(Starlette(routes=[Route("/", endpoint, methods=["POST"])]))
    sent: list[Message] = []
    left = iter(messages)
    complete = asyncio.Event()

    async def receive() -> Message:
        message = next(left, None)
        if message is None:  # as servers do
            await complete.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body") is not None and not message.get("more_body"):
            complete.set()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent


async def test_a_large_body_arrives_in_pieces() -> None:
    """The middleware passes on what the client sends, and does not take its end for the client's leaving."""

    async def length(request: HttpRequest) -> StreamingResponse:
        pieces = [piece async for piece in request.stream() if piece]

        async def body() -> AsyncGenerator[str]:
            yield f"{len(pieces)} pieces"

        return StreamingResponse(body())

    body = [{"type": "http.request", "body": b"x" * 1000, "more_body": number < 9} for number in range(10)]
    sent = await run_app(length, body)
    assert [message.get("body") for message in sent] == [None, b"10 pieces", b""]


async def test_a_cancellation_of_the_applications_own_goes_on() -> None:
    """If something that the endpoint waits for is cancelled, the server sees the endpoint's error."""

    async def endpoint(request: HttpRequest) -> StreamingResponse:
        future: asyncio.Future[Any] = asyncio.Future()
        future.cancel()
        return await future

    with pytest.raises(asyncio.CancelledError):
        await run_app(endpoint, [])


async def test_work_after_the_response_goes_on() -> None:
    """A server reports that the client is gone after each response, and then a background task still runs."""
    done = []

    async def after() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        done.append(True)

    async def endpoint(request: HttpRequest) -> JSONResponse:
        return JSONResponse(await request.json(), background=BackgroundTask(after))

    await run_app(endpoint, [{"type": "http.request", "body": b"{}"}])
    assert done == [True]
