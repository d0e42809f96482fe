"""`weft serve` in a simulated life: vLLM's application behind Weft's guards. HTTP clients and `weft.connect` reach it
without a socket."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import httpx2
from history import Lost
from simulated_clients import MODEL, Answer, model_folder, random_call
from simulated_loop import TICK_S
from simulated_replica import Channel
from starlette.datastructures import State

from weft.engine.http.http_errors import is_too_long, kind_of_code
from weft.engine.serve.keys import make_key_ring
from weft.engine.serve.options import parse_options
from weft.engine.serve.server import make_server
from weft.engine.vllm_compat.server_names import build_app

if TYPE_CHECKING:
    from simulated_life import Life

_DISCONNECT: Final = {"type": "http.disconnect"}
_RESET: Final = {"type": "reset"}  # the server has ended


class Server:
    """The server of a life. It runs on the engine's event loop, as it does behind uvicorn.

    Args:
        life: The life, whose engine has started.
    """

    def __init__(self, life: Life) -> None:
        self._life, self._engine = life, life.engine
        with (
            mock.patch("weft.engine.serve.server.uvicorn_config", lambda app, _options: SimpleNamespace(app=app)),
            mock.patch("weft.engine.serve.server.build_app", _fresh_app),
        ):
            made = make_server(life.engine, copy.copy(_options()), make_key_ring())
            self.served, server = life.engine.submit(made).result()
        self.app: Any = server.config.app

    def stop(self) -> None:
        """Abort what runs, and take no more. Call it from outside of all loops."""

        async def stop() -> None:
            self.served.stop()

        self._engine.submit(stop()).result()

    def problems(self, clients: Sequence[HttpClient]) -> Iterator[str]:
        """What is wrong with how calls were put into programs. A conversation is one program, unless it was ended."""
        owners: dict[str, str] = {}
        for client in clients:
            for program_id in client.program_ids:
                if owners.setdefault(program_id, client.name) != client.name:
                    yield f"{client.name} got an answer in the program of {owners[program_id]}"
            if len(client.program_ids) > 1 and "end" not in self._life.faults.happened:
                yield f"{client.name} is {len(client.program_ids)} programs: {sorted(client.program_ids)}"


@cache
def _options() -> Any:
    return parse_options([model_folder(), "--served-model-name", MODEL])[0]


_apps: list[tuple[Any, list[Any]]] = []  # vLLM's, and its routes


def _fresh_app(*arguments: Any) -> Any:
    """vLLM's application as it is made. It takes a second to make, so all lives share it."""
    if not _apps:
        app = build_app(*arguments)
        _apps.append((app, list(app.router.routes)))
    app, routes = _apps[0]
    app.router.routes[:] = routes
    app.state, app.middleware_stack = State(), None
    return app


class Connection:
    """One request of a client. Its bytes and those of the answer arrive in pieces, each some ticks later.

    Args:
        life: The life, which has a server.
        client: The client's loop.
    """

    def __init__(self, life: Life, client: asyncio.AbstractEventLoop) -> None:
        self._life, self._app, self._client = life, life.server.app, client
        self._loop = life.engine._loop._loop  # the server's
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()  # at the server
        self._answered: asyncio.Queue[Any] = asyncio.Queue()  # at the client
        self._to_server = Channel(life.world, self._at_server)
        self._to_client = Channel(life.world, self._at_client)
        self._is_gone = self._is_complete = False

    def _at_server(self, message: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, message)
        elif message is not _DISCONNECT:
            self._to_client.send(_RESET)

    def _at_client(self, message: Any) -> None:
        if not self._client.is_closed():
            self._client.call_soon_threadsafe(self._answered.put_nowait, message)

    def _take(self, message: Any) -> None:
        if message["type"] == "http":  # the request's head
            self._loop.create_task(self._run(message))
            return
        self._is_gone |= message is _DISCONNECT
        self._arrived.put_nowait(message)

    async def _run(self, scope: Any) -> None:
        try:
            await self._app(scope, self._receive, self._send)
        except asyncio.CancelledError:  # the server ends
            self._to_client.send(_RESET)
            raise
        except Exception as error:
            self._life.world.complain("the application failed", error)
        if not (self._is_gone or self._is_complete):
            self._life.world.complain("the application ended without an answer")

    async def _receive(self) -> Any:
        if self._is_complete or (self._is_gone and self._arrived.empty()):
            return _DISCONNECT
        return await self._arrived.get()

    async def _send(self, message: Any) -> None:
        if not self._is_gone:  # as uvicorn
            self._is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            self._to_client.send(message)

    async def exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, rng: random.Random
    ) -> AsyncGenerator[Any]:
        """Send a request, and yield the messages of the answer: its start and the pieces of its body. Who closes this,
        leaves."""
        sent = {"host": "localhost", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 5),
            "server": ("localhost", 80),
        }
        try:
            self._to_server.send(scope)
            ends = sorted(rng.randrange(len(body)) for _ in range(rng.randrange(3) if body else 0))
            for begin, end in zip([0, *ends], [*ends, len(body)], strict=True):
                message = {"type": "http.request", "body": body[begin:end], "more_body": end < len(body)}
                self._to_server.send(message)
                if end < len(body):
                    await asyncio.sleep(rng.randrange(50) * TICK_S)
            is_last = False
            while not is_last:
                message = await self._answered.get()
                if message is _RESET:
                    raise ConnectionResetError
                is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
                yield message
        finally:
            self._to_server.send(_DISCONNECT)


class Transport(httpx2.AsyncBaseTransport):
    """Leads the requests of `weft.connect` to the server of a life."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._rng = random.Random(f"transport {life.seed}")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        connection = Connection(self._life, asyncio.get_running_loop())
        path, body = request.url.raw_path.decode(), await request.aread()
        messages = connection.exchange(request.method, path, request.headers, body, self._rng)
        with _as_httpx():
            start = await anext(messages)
        return httpx2.Response(start["status"], headers=start["headers"], stream=_Body(messages))


class _Body(httpx2.AsyncByteStream):
    def __init__(self, messages: AsyncGenerator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        with _as_httpx():
            return (await anext(self._messages)).get("body", b"")  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        await self._messages.aclose()


@contextmanager
def _as_httpx() -> Iterator[None]:
    try:
        yield
    except ConnectionResetError as error:
        raise httpx2.ReadError(str(error)) from None


class HttpClient:
    """A program of an HTTP client: a conversation that goes on. Some clients name their program, and others do not."""

    def __init__(self, life: Life, number: int) -> None:
        self.rng = random.Random(f"client {life.seed} {number}")
        self.life, self.name = life, f"p{number}"
        self.calls: dict[str, asyncio.Task[None]] = {}
        self.headers = {"weft-program-id": self.name} if self.rng.random() < 0.5 else {}
        self.messages: list[dict[str, str]] = []
        self.program_ids: set[str] = set()  # that the server put answers into, while nobody ended programs

    async def run(self) -> None:
        """Make the conversation's calls."""
        rng, history = self.rng, self.life.history
        await asyncio.sleep(rng.randrange(2000) * TICK_S)
        history.add("open", self.name)
        try:
            for turn in range(rng.randrange(1, 4)):
                name = f"{self.name}.{turn}"
                self.calls[name] = asyncio.ensure_future(self._call(name))
                await asyncio.wait([self.calls[name]])
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.randrange(500) * TICK_S)
        except asyncio.CancelledError:
            for task in self.calls.values():
                task.cancel()
            await asyncio.wait(self.calls.values())
            raise
        finally:
            history.add("close", self.name)

    async def _call(self, name: str) -> None:
        rng, note = self.rng, partial(self.life.history.add, program=self.name, call=name)
        body, text = random_call(rng, name)
        body |= {"messages": [*self.messages, *body["messages"]], "stream": rng.random() < 0.5, "model": MODEL}
        headers = dict(self.headers)
        if "timeout_s" in body:
            headers["weft-timeout-s"] = str(body.pop("timeout_s"))
        note("invoke", value=body["max_tokens"])
        self.life.world.note(f"{name} asks for {body['max_tokens']} tokens")
        answer = Answer(lambda token: note("token", value=token), text)
        outcome, is_whole = "CancelledError", False
        try:
            connection = Connection(self.life, self.life.users)
            sent = connection.exchange("POST", "/v1/chat/completions", headers, json.dumps(body).encode(), rng)
            async with aclosing(sent) as messages:
                outcome, is_whole = await self._read(messages, answer, body)
        except asyncio.CancelledError:
            pass
        except ConnectionResetError:
            outcome = "EngineClosedError"
        except BaseException as error:
            self.life.world.complain(f"{name} ended in an unexpected way", error)
        if is_whole and ("stop" in body or len(answer.choices[0]) < body["max_tokens"]):
            outcome = "broken off"  # by a stop string, or at the end of the context
        if outcome == "EngineClosedError" and self.life.wants_shutdown:
            outcome = "ProgramEndedError"
        note("return", value=outcome)
        self.life.world.note(f"{name} {outcome}, {answer.count} tokens")
        self.life.problems += [f"{name} {problem}" for problem in answer.problems(body, is_whole=is_whole)]
        if is_whole:
            self.messages = [*body["messages"], {"role": "assistant", "content": answer.texts[0]}]
            self.program_ids |= {answer.report["program_id"]}

    async def _read(self, messages: Any, answer: Answer, body: dict[str, Any]) -> tuple[Any, bool]:
        """How the call ended, and whether the answer is whole."""
        text, done = b"", False
        status = (await anext(messages))["status"]
        async for message in messages:
            text += message.get("body", b"")
            while body["stream"] and status == 200 and b"\n\n" in text:
                event, _, text = text.partition(b"\n\n")
                data = event.removeprefix(b"data: ")
                done |= data == b"[DONE]"
                chunk = json.loads(data) if not done else {"choices": []}
                if "error" in chunk:
                    return _outcome(chunk["error"], answer), False
                answer.take(chunk)
            if self.rng.random() < 0.005:
                return "broken off", False
        if status != 200:
            return _outcome(json.loads(text)["error"], answer), False
        if not body["stream"]:
            answer.take(json.loads(text))
        elif not done:
            self.life.problems.append(f"{self.name}: a stream ended without [DONE]")
        return "finished", True


def _outcome(error: dict[str, Any], answer: Answer) -> Any:
    """The name of an error in the history."""
    kind = kind_of_code(error["code"])
    if is_too_long(error["message"]):  # as the conversation has grown
        return "broken off"
    if kind is None:
        return f"{error['code']}: {error['message']}"
    if kind.__name__ == "ReplicaLostError":
        return Lost(error["weft"]["delivered_tokens"] - answer.count + len(answer.choices.get(0, ())))
    return kind.__name__
