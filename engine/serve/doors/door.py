"""A door: an HTTP process that knows nothing, and carries each exchange to the owner and back."""

from __future__ import annotations

import asyncio
import json
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import httpx2
import ray
import uvicorn
from ray.exceptions import RayError, RayTaskError

from weft.core.errors import ClusterError, WeftError
from weft.core.log import get_logger
from weft.core.routing.liveness import ProcessUsage
from weft.engine.http.check_ids import Receive, Scope, Send
from weft.engine.http.http_errors import refuse
from weft.engine.processes.loop_thread import LoopThread, in_thread
from weft.engine.processes.tree import until_stuck
from weft.engine.replicas.ray.cluster import connection
from weft.engine.serve.doors.owner import FROM_DOOR, KEEPALIVE, PERIOD_S, Owner, Served, Setup
from weft.engine.serve.server import Signals, listening, log_to_stderr, run, uvicorn_config

_CONNECT_S: Final = 5.0
_WRITE_S: Final = 60.0  # for a piece of a request that the owner does not read
_EXPIRY_S: Final = 2.0  # of an unused connection: less than the owner's, or a request could meet its end
_AGAIN_S: Final = 0.5
_MOST_S: Final = 60.0  # that a request waits for the owner, and the last door for its end
_MOST_START_S: Final = 600.0  # that the owner reads vLLM's modules before it can answer, on a busy machine
# Headers that are about one connection, or that each server writes for itself.
_NOT_PASSED_ON: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"date", b"server", FROM_DOOR}
)


class Door:
    """The application of a door. It holds a piece of a body at a time: who reads slowly is sent to slowly.

    Args:
        served: Where the owner serves. Given an address that did not answer, it asks anew.
    """

    def __init__(self, served: Callable[[Served | None], Awaitable[Served]]) -> None:
        self._served = served
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_EXPIRY_S)
        self._transport = httpx2.AsyncHTTPTransport(limits=limits, socket_options=KEEPALIVE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse(scope, send, HTTPStatus.NOT_FOUND, "", "")
        if scope["type"] != "http":
            return
        body = _Body(receive, any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"]))
        tasks = [asyncio.ensure_future(each) for each in (self._carry(scope, body, send), body.until_gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:  # a client that has gone ends its exchange with the owner, which aborts its call
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _carry(self, scope: Scope, body: _Body, send: Send) -> None:
        served, response, end_s = None, None, asyncio.get_running_loop().time() + _MOST_S
        try:
            while response is None:
                async with asyncio.timeout_at(end_s):
                    served = await self._served(served)
                with suppress(httpx2.ConnectError, httpx2.ConnectTimeout):  # nothing was sent
                    response = await self._transport.handle_async_request(_request(scope, body, served))
        except (TimeoutError, WeftError, httpx2.TransportError) as error:
            what = "was lost before it answered" if isinstance(error, httpx2.TransportError) else "does not answer"
            message = f"the engine behind this door {what}. It is being started again: send the request once more."
            again = ((b"x-should-retry", b"true"), (b"retry-after", b"1"))
            await refuse(scope, send, HTTPStatus.SERVICE_UNAVAILABLE, message, "engine_died", *again)
            return
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _NOT_PASSED_ON]
        try:
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            with suppress(httpx2.TransportError):  # without an end of the answer, the server closes the connection
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


class _Body:
    """The body of a request, if it has one, and then its client's leave."""

    def __init__(self, receive: Receive, has_body: bool) -> None:
        self._receive = receive
        self._is_whole = asyncio.Event()
        self.has_body = has_body
        if not has_body:
            self._is_whole.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise httpx2.ReadError("the client has gone")
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
        self._is_whole.set()

    async def until_gone(self) -> None:
        await self._is_whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _request(scope: Scope, body: _Body, served: Served) -> httpx2.Request:
    path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers = [each for each in scope["headers"] if each[0] not in _NOT_PASSED_ON]
    headers.append((FROM_DOOR, json.dumps([served.secret, scope.get("client"), scope["scheme"]]).encode()))
    return httpx2.Request(
        scope["method"],
        httpx2.URL(served.url).copy_with(raw_path=path),
        headers=headers,
        content=body if body.has_body else None,
        extensions={"timeout": httpx2.Timeout(None, connect=_CONNECT_S, write=_WRITE_S).as_dict()},
    )


class OwnerLink:
    """A door's way to the owner, which it makes if there is none. Use it on the door's event loop."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._door = secrets.token_hex(8)
        self._served: Served | None = None
        self._joining: asyncio.Future[None] | None = None
        self._owner: Any = None

    async def served(self, silent: Served | None = None) -> Served:
        """Where the owner serves. If that is `silent`, which was not reached, ask anew: it may be elsewhere by now.

        Raises:
            EngineError: As for `Owner.join`.
        """
        if self._served == silent:
            await self.join()
        if self._served == silent:
            await asyncio.sleep(_AGAIN_S)
        assert self._served is not None  # noqa: S101  `join` has set it
        return self._served

    async def join(self) -> None:
        """Tell the owner that this door lives, and hear where it serves, once for all who ask at the same time."""
        if self._joining is None or self._joining.done():
            self._joining = asyncio.ensure_future(self._join())
        await asyncio.shield(self._joining)

    async def _join(self) -> None:
        actor: Any = ray.remote(Owner)
        options = {"name": "weft-serve", "namespace": "weft", "lifetime": "detached", "num_cpus": 0}
        # It is started again for ever, and a join waits for that.
        options |= {"get_if_exists": True, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 10_000}
        for is_last in (False, True):
            try:
                self._owner = await in_thread(lambda: actor.options(**options).remote(self._setup))
                self._served = await self._owner.join.remote(self._door, self._setup.made_with)
                return
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                if is_last:  # the first one may have ended with the last door that it heard of
                    why = str(error).partition("\n")[0]
                    raise ClusterError(
                        f"{why} Every node needs the same Weft and vLLM; Ray's logs say more."
                    ) from error

    async def keep(self) -> None:
        """Tell the owner again and again that this door lives."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.join()
            except Exception as error:  # it is tried again
                get_logger().warning(
                    "the engine behind this door does not answer", reason=str(error).partition("\n")[0]
                )

    async def watch(self, hang_timeout_s: float) -> None:
        """Kill an owner that does not answer for some time: Ray, which starts it again, notices only its end. One that
        starts has not hung, or doors would kill each new one before it could answer. One that this door alone cannot
        reach serves others."""
        served: Served | None = None

        async def ping() -> None:
            nonlocal served
            served = await self._owner.ping.remote()

        while True:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_MOST_START_S):
                    await ping()
            await until_stuck(ping, lambda: ProcessUsage(0.0, is_stopped=False), hang_timeout_s)
            if served is not None and not await _answers(*served.machine):
                get_logger().warning("the machine of the engine behind this door cannot be reached from here")
                continue
            get_logger().warning("the engine behind this door hung, and was killed")
            await in_thread(lambda: ray.kill(self._owner, no_restart=False))

    async def leave(self) -> None:
        """Tell the owner that this door ends, which ends the owner with its last door."""
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_MOST_S):
                if self._owner is not None and not await self._owner.leave.remote(self._door):
                    await in_thread(lambda: ray.kill(self._owner))


async def _answers(host: str, port: int) -> bool:
    """Whether a machine can be reached: its system refuses a connection if the process has ended."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    writer.close()
    return True


def serve_door(options: Namespace, setup: Setup, hang_timeout_s: float | None, say: Callable[[str], None]) -> None:
    """Start a door, and the owner if there is none, and serve until SIGTERM or SIGINT. Call it on the main thread, when
    this process is connected to Ray.

    Args:
        options: vLLM's options for its application: where this door listens.
        setup: For an owner that this door makes.
        hang_timeout_s: Seconds without an answer of the owner after which it is killed and started again; None: never.
        say: Called with a line for the user when the door takes requests.

    Raises:
        EngineError: The address is in use, an option makes no sense, the engine did not start, or another one runs.
        KeyboardInterrupt: A signal came while the engine started.
    """
    with log_to_stderr(), listening(options) as (address, bound), Signals() as signals:
        loop, link = LoopThread("weft-door"), OwnerLink(setup)
        try:
            loop.submit(link.join()).result()
            loop.submit(link.keep())
            if hang_timeout_s is not None:
                loop.submit(link.watch(hang_timeout_s))
            server = uvicorn.Server(uvicorn_config(Door(link.served), options))
            run(
                server,
                loop.submit(server.serve(sockets=[bound])),
                signals,
                drain_s=options.shutdown_timeout,
                on_ready=lambda: say(
                    f"{setup.made_with['model']} at {address} (a door; the engine ends with the last one)"
                ),
                abort=lambda: None,  # the end of the event loop cancels them
            )
        finally:
            loop.submit(link.leave()).result()
            loop.stop()
            connection.close()
