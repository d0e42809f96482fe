"""The owner: the one process that knows the programs of all doors, in an actor that Ray starts again if it dies."""

from __future__ import annotations

import asyncio
import json
import secrets
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from socket import (
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOL_SOCKET,
    TCP_KEEPCNT,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_NODELAY,
    create_server,
)
from typing import Any, Final, NamedTuple, cast

import ray
import uvloop

from weft.core.errors import ClusterError
from weft.core.testing.script import Script
from weft.engine.http.check_ids import App, Receive, Scope, Send
from weft.engine.http.http_errors import refuse
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.processes.loop_thread import in_thread
from weft.engine.serve.keys import KeyRing
from weft.engine.serve.routes import spans_sent_to
from weft.engine.serve.script_file import read_script, scripted_arguments
from weft.engine.serve.server import log_to_stderr, make_server, share_python
from weft.engine.vllm_compat.versions.version import check_vllm

FROM_DOOR: Final = b"weft-door"  # a header in JSON: the owner's secret, the client's address, and the scheme it used
# Options in which doors may differ: where they listen, and what they log.
_OF_A_DOOR: Final = frozenset(
    {"host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "model_tag"}
    | {"uvicorn_log_level", "disable_uvicorn_access_log", "shutdown_timeout"}
)
# Replicas outlive the owner, which finds them again by their names.
_REPLICAS: Final = {"lifetime": "detached", "namespace": "weft", "name": "weft-replica"}
PERIOD_S: Final = 5.0
# Either side of an exchange notices within half a minute that the other's machine is gone or cannot be reached.
KEEPALIVE: Final = (
    (SOL_SOCKET, SO_KEEPALIVE, 1),
    *((IPPROTO_TCP, TCP_KEEPIDLE, 15), (IPPROTO_TCP, TCP_KEEPINTVL, 5), (IPPROTO_TCP, TCP_KEEPCNT, 3)),
)
_MOST_QUIET: Final = 12  # periods in which nothing is heard of a door, after which it counts as gone


class Setup(NamedTuple):
    """How to make the engine and its server, as it travels to the owner."""

    engine: Mapping[str, Any]  # the arguments of `AsyncMultiLLMEngine`
    options: Namespace  # vLLM's, for its application
    keys: KeyRing
    scripted: Path | None  # the file of a script that answers in place of a model
    made_with: Mapping[str, str]  # what all doors must have been started with, by its name for users

    @classmethod
    def of(cls, engine: Mapping[str, Any], options: Namespace, keys: KeyRing, scripted: Path | None) -> Setup:
        """A setup that knows what it was made with; the options change when the engine starts."""
        model = str(engine["models"][0].name or engine["models"][0].model)
        made_with = {name: version(name) for name in ("vllm-weft", "ray")} | {"vLLM": check_vllm(), "model": model}
        left_out = {*_OF_A_DOOR, "models", *(("model",) if scripted is not None else ())}  # each has another folder
        for name, each in {**vars(options), **engine, "api_keys": sorted(map(repr, keys))}.items():
            if name not in left_out:
                made_with[f"--{name.replace('_', '-')}"] = repr(each)
        return cls(engine, options, keys, scripted, made_with)

    def make_engine(self) -> AsyncMultiLLMEngine:
        """Start the engine, on Ray or with the script."""
        if self.scripted is None:
            return AsyncMultiLLMEngine(**self.engine, backend="ray", ray_actor_options=_REPLICAS)
        Path(self.options.model).mkdir(parents=True, exist_ok=True)  # the door that made it may have taken it along
        scripted_arguments(Path(self.options.model))
        return AsyncMultiLLMEngine(**self.engine, backend=Script(read_script(self.scripted)))


class Served(NamedTuple):
    """Where the owner serves the doors."""

    url: str
    secret: str  # by which it knows them
    machine: tuple[str, int]  # its system takes connections there, however busy the owner itself is


class FromDoors:
    """The owner's application: takes requests from doors only, and sees their clients behind them."""

    def __init__(self, app: App, secret: str) -> None:
        self._app = app
        self._start = json.dumps([secret]).encode()[:-1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            told = next((value for name, value in scope["headers"] if name == FROM_DOOR), b"")
            if not secrets.compare_digest(told[: len(self._start)], self._start):
                message = "this port is for the doors of `weft serve --join`. Send the request to one of them."
                await refuse(scope, send, HTTPStatus.FORBIDDEN, message, "not_a_door")
                return
            _, client, scheme = json.loads(told)
            headers = [each for each in scope["headers"] if each[0] != FROM_DOOR]
            scope = {**scope, "headers": headers, "client": client and tuple(client), "scheme": scheme}
        await self._app(scope, receive, send)


class Owner:
    """Serves the doors. Ray makes it, and doors call its methods remotely; requests come to it over HTTP."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._quiet = {"": 0}  # for each door the periods since it was heard; "": for the first one, until it joins
        self._serving: asyncio.Future[Served] | None = None
        self._served: Served | None = None
        self._is_ending = False
        self._open = ExitStack()
        self._closing = asyncio.Lock()
        self._watching = asyncio.create_task(self._end_without_doors())  # Ray calls this on the actor's event loop

    async def ping(self) -> Served | None:
        """Answer where it serves, if it does yet."""
        return self._served

    async def join(self, door: str, made_with: Mapping[str, str]) -> Served:
        """Note that a door lives. Returns where it can send requests once the engine is ready. Raises ClusterError if
        the door was started with something else than the first one, or EngineError if the engine did not start."""
        own = self._setup.made_with
        for name in {**own, **made_with}:
            if (theirs := own.get(name, "unknown")) != (ours := made_with.get(name, "unknown")):
                raise ClusterError(
                    f"the engine of this cluster was started with {name} {theirs:.80}, and this server with {ours:.80}."
                    " Give all doors the same command, save for where they listen, or stop the others first."
                )
        if self._is_ending:  # its last door is about to end this actor, and another one takes its place
            await asyncio.Event().wait()
        self._quiet.pop("", None)
        self._quiet[door] = 0
        if self._serving is None or (self._serving.done() and self._serving.exception() is not None):
            self._serving = in_thread(self._serve)
        return await asyncio.shield(self._serving)

    async def leave(self, door: str) -> int:
        """Note that a door has ended. Returns how many are left; without any the engine has ended, too."""
        self._quiet.pop(door, None)
        if not self._quiet:
            await self._stop()
        return len(self._quiet)

    def _serve(self) -> Served:
        share_python()
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # as in vLLM's own server
        options, keys, secret = Namespace(**vars(self._setup.options)), self._setup.keys, secrets.token_hex(16)
        options.ssl_keyfile = options.ssl_certfile = None  # doors speak TLS and log requests
        options.disable_uvicorn_access_log = True
        with ExitStack() as stack:
            stack.enter_context(log_to_stderr())
            engine = stack.enter_context(self._setup.make_engine())
            stack.enter_context(spans_sent_to(options.otlp_traces_endpoint, engine))
            served, server = engine.submit(make_server(engine, options, keys)).result()
            server.config.app = FromDoors(cast("App", server.config.app), secret)
            node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            bound = stack.enter_context(create_server((node, 0)))
            for option in ((IPPROTO_TCP, TCP_NODELAY, 1), *KEEPALIVE):
                bound.setsockopt(*option)
            machine = stack.enter_context(create_server((node, 0))).getsockname()[:2]
            running = engine.submit(server.serve(sockets=[bound]))

            async def stop() -> None:
                served.stop()
                server.should_exit = server.force_exit = True

            stack.callback(lambda: (engine.submit(stop()).result(), running.result()))
            self._open = stack.pop_all()
        self._served = Served(f"http://{node}:{bound.getsockname()[1]}", secret, machine)
        return self._served

    async def _end_without_doors(self) -> None:
        """End when all doors are gone: who killed them all would otherwise leave an engine that nobody can reach. Time
        in which this process was stopped does not count."""
        while self._quiet:
            await asyncio.sleep(PERIOD_S)
            if self._serving is None or self._serving.done():  # until then doors wait, and say nothing
                self._quiet = {door: quiet + 1 for door, quiet in self._quiet.items() if quiet < _MOST_QUIET}
        await self._stop()
        ray.kill(ray.get_runtime_context().current_actor)

    async def _stop(self) -> None:
        self._is_ending = True
        if self._serving is not None:
            await asyncio.wait([self._serving])
            async with self._closing:  # a second one waits for the end, too
                await in_thread(self._open.close)
