"""The server: vLLM's application on the engine's event loop, from its socket to its orderly end."""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from socket import IPPROTO_TCP, TCP_NODELAY, socket
from types import FrameType
from typing import Final

import uvicorn
from uvicorn.logging import DefaultFormatter

from weft.core.errors import EngineStartError
from weft.engine.http.check_ids import App
from weft.engine.http.guards import RefuseForeignPages, limited_http
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.client import ServedEngine
from weft.engine.serve.exchange import ServeRequests
from weft.engine.serve.keys import Authenticate, KeyRing
from weft.engine.serve.routes import add_metrics, add_routes, spans_sent_to
from weft.engine.vllm_compat.server_names import build_app, envs, get_uvicorn_log_config, init_app_state, setup_server

_POLL_S: Final = 0.2
_LAST_ANSWERS_S: Final = 5.0  # for the errors of calls that were aborted at the end of the drain
_SWITCH_S: Final = 0.001  # for which a thread that reads a large request may hold up streams; Python's default is 5 ms
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def serve(
    options: Namespace,
    make_engine: Callable[[], AsyncMultiLLMEngine],
    keys: KeyRing,
    on_ready: Callable[[AsyncMultiLLMEngine, str], None],
) -> None:
    """Start an engine, and serve it over HTTP until SIGTERM or SIGINT. Call it on the main thread.

    After the signal no connection is taken. Calls in flight have `--shutdown-timeout` seconds to end. What is left then
    is aborted, and so is everything at a second signal.

    Args:
        on_ready: Called with the engine and the server's address when the server takes requests.

    Raises:
        EngineStartError: The address is in use, an option makes no sense, or the engine did not start.
        WeftError: See `AsyncMultiLLMEngine`.
        KeyboardInterrupt: A signal came while the engine started.
    """
    share_python()
    with (
        log_to_stderr(),
        listening(options) as (address, bound),
        Signals() as signals,
        make_engine() as engine,
        spans_sent_to(options.otlp_traces_endpoint, engine),
    ):
        served, server = engine.submit(make_server(engine, options, keys)).result()
        run(
            server,
            engine.submit(server.serve(sockets=[bound])),
            signals,
            drain_s=options.shutdown_timeout,
            on_ready=lambda: on_ready(engine, address),
            abort=lambda: engine.submit(_stop(served)).result(),
        )


def run(
    server: uvicorn.Server,
    running: Future[None],
    signals: Signals,
    *,
    drain_s: float,
    on_ready: Callable[[], None],
    abort: Callable[[], object],
) -> None:
    """Wait for the signals that end a server. Its requests then have `drain_s` seconds; `abort` ends what is left."""
    running.add_done_callback(signals.wake)
    signals.count_from_now()
    while not server.started and not running.done():
        time.sleep(_POLL_S)
    if server.started and not signals.count:
        on_ready()
    signals.wait(running, 1)
    server.should_exit = True
    signals.wait(running, 2, drain_s)
    abort()
    signals.wait(running, None, _LAST_ANSWERS_S)
    server.force_exit = True
    running.result()


def share_python() -> None:
    """Let threads that read large requests hold up streams for a short time only."""
    sys.setswitchinterval(_SWITCH_S)


async def make_server(
    engine: AsyncMultiLLMEngine, options: Namespace, keys: KeyRing
) -> tuple[ServedEngine, uvicorn.Server]:
    """vLLM's application over the engine, and a server for it, which leaves signals to the main thread."""
    served = ServedEngine(engine, has_keys=len(keys) > 0)
    options.model = options.model or served.model_config.model
    # vLLM's own server has the reasoning parser from here: making the engine's configuration has filled it in.
    options.structured_outputs_config = served.vllm_config.structured_outputs_config
    tasks = await served.get_supported_tasks()
    app = build_app(options, tasks, served.model_config)
    await init_app_state(served, app.state, options, tasks)
    add_routes(app, served)
    add_metrics(app, engine, keys)
    server = uvicorn.Server(uvicorn_config(guarded(app, served, options, keys), options))
    app.state.server = server  # vLLM's handlers of errors would stop it if the engine were dead
    return served, server


def guarded(app: App, served: ServedEngine, options: Namespace, keys: KeyRing) -> App:
    """An application behind the server's guards, which are outside all that vLLM adds. `options` are vLLM's."""
    note = partial(served.refused, key=None)
    inner: App = Authenticate(ServeRequests(app, served), keys, options.root_path or "", on_refused=note)
    return inner if keys else RefuseForeignPages(inner, options.host, options.allowed_origins, on_refused=note)


def uvicorn_config(app: App, options: Namespace) -> uvicorn.Config:
    """How uvicorn serves an application, by vLLM's options."""
    log_config = get_uvicorn_log_config(options)
    return uvicorn.Config(
        app,
        **({} if log_config is None else {"log_config": log_config}),
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        ssl_ciphers=options.ssl_ciphers,
        http=limited_http(options.h11_max_incomplete_event_size, options.h11_max_header_count),
    )


async def _stop(served: ServedEngine) -> None:
    served.stop()


@contextmanager
def log_to_stderr() -> Iterator[None]:
    """Weft's records, such as the death of a replica, are lines of the server's log, in uvicorn's form."""
    logger = logging.getLogger("weft")
    if logger.handlers:  # the user has configured logging
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(DefaultFormatter("%(levelprefix)s %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


@contextmanager
def listening(options: Namespace) -> Iterator[tuple[str, socket]]:
    """The server's address and socket, bound before the engine starts, which takes long."""
    try:
        address, bound = setup_server(options, reuse_port=False)
    except (OSError, OverflowError, KeyError) as error:
        if isinstance(error, OSError) and error.errno == EADDRINUSE:
            raise EngineStartError(
                f"the server cannot start: another process listens at port {options.port}. Stop it, or give "
                "another --port."
            ) from error
        raise EngineStartError(
            f"the server cannot start: {str(error).rstrip('.')}. Compare --host, --port, --uds and the parsers' names."
        ) from error
    if not options.uds:
        # asyncio does this for sockets that know their protocol, as vLLM's does not. Without it, the body of an answer
        # waits 40 ms until the client's kernel has acknowledged the headers.
        bound.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    if not options.uds and not options.port:  # the system has chosen one
        address = f"{address.removesuffix(':0')}:{bound.getsockname()[1]}"
    try:
        yield address, bound
    finally:
        bound.close()
        if options.uds:
            Path(options.uds).unlink(missing_ok=True)


class Signals:
    """Counts the signals that end the server. The first one interrupts a start instead.

    Attributes:
        are_counted: Whether the server has started.
        count: How many came since.
    """

    def __init__(self) -> None:
        self.are_counted = False
        self.count = 0
        self._news: SimpleQueue[None] = SimpleQueue()  # a handler may put into it at any moment

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def count_from_now(self) -> None:
        """The server has started. Ray, if it did, has put its own handlers in place of these."""
        for number in _SIGNALS:
            signal.signal(number, self._note)
        self.are_counted = True

    def wake(self, _running: Future[None]) -> None:
        """Note that the server has ended."""
        self._news.put(None)

    def wait(self, running: Future[None], count: int | None, timeout_s: float = math.inf) -> None:
        """Wait for the server's end, for `count` signals in all, or for `timeout_s` seconds.

        A thread that looked again and again would take Python's lock from the thread that serves.

        Args:
            count: How many signals end the wait; with None they do not.
            timeout_s: The most seconds to wait.
        """
        end_s = time.monotonic() + timeout_s
        while not running.done() and (count is None or self.count < count):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            with suppress(Empty):
                self._news.get(timeout=None if left_s == math.inf else left_s)

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self.are_counted:
            raise KeyboardInterrupt
        self.count += 1
        self._news.put(None)
