"""`weft.connect`: an engine whose calls run on a `weft serve`. It needs neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from typing import Any, Final

from weft.core.errors import EngineClosedError, ServerError, WeftError
from weft.core.log import get_logger
from weft.core.process_rows import ProgramState
from weft.core.process_table import ProcessTable
from weft.core.routing.admission import Admission
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import Link, ModelEndpoint, weakly
from weft.engine.host.scheduler_messages import SchedulerMessages
from weft.engine.options import EngineOptions
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.remote.chat import RemoteChat
from weft.engine.remote.connection import MODELS, Server

_MOST_CALLS: Final = 10_000  # in flight; the server admits fewer, and says when to try again
_NOTICES: Final = frozenset({"program_events", "programs_ended", "programs_open"})  # of what the server is told
_ALIVE_S: Final = 10.0  # a server ends programs without a sign of life for 30 s or more
_LAST_NOTICES_S: Final = 5.0
_POLL_S: Final = 0.01


def connect(
    url: str, *, api_key: str | None = None, call_timeout_s: float | None = None, program_timeout_s: float | None = None
) -> RemoteEngine:
    """Connect to a `weft serve`, and wait for its first answer. The result is used like a `weft.Engine`, without vLLM.

    ::

        with weft.connect("http://localhost:8000", api_key="key-1") as engine:
            model = ChatWeft(engine=engine)

    Programs, threads and parents are inferred here and sent with each call, and so are tools, the end of a program and
    the time that is left. The answer brings the call's account, so `engine.table` is as it is in process. No call is
    repeated: an error says whether the call may have run.

    Args:
        url: The server's address, with or without `/v1`.
        api_key: One of the server's keys, if the server asks for one.
        call_timeout_s: Seconds a call may take, its time in the server's queue included. `timeout_s` in its request
            takes precedence. With None the server's limit counts.
        program_timeout_s: Seconds a program may take from its first call on. `timeout_s` in its metadata takes
            precedence.

    Returns:
        The engine. Leaving its `with` block ends its programs on the server and closes the connections.

    Raises:
        ServerError: The server cannot be reached, refuses the key, or is not a `weft serve`. Later calls raise it, too;
            `may_have_run` says whether to be careful with a repetition.
        InvalidRequestError: `url` is no address, or a timeout is not above 0.
    """
    return RemoteEngine(url, api_key=api_key, call_timeout_s=call_timeout_s, program_timeout_s=program_timeout_s)


class RemoteEngine(FrontEnd):
    """An engine in another process. `weft.connect` makes it, and says what the arguments mean.

    Attributes:
        server_url: The server's address.
    """

    def __init__(
        self, url: str, *, api_key: str | None, call_timeout_s: float | None, program_timeout_s: float | None
    ) -> None:
        super().__init__(EngineOptions(call_timeout_s=call_timeout_s, program_timeout_s=program_timeout_s))
        self._server = Server(url, api_key)
        self.server_url = self._server.url
        self._start_loop()
        try:
            models = self._loop.submit(_models(self._server)).result()
        except BaseException:
            _close(self._server, self._loop, None)
            raise
        self._models = [str(model["id"]) for model in models]
        self.model = self._models[0]
        chat = RemoteChat(
            self._server,
            self._loop,
            max_model_len=int(models[0].get("max_model_len") or 0),
            on_account=weakly(self._in_flight.account),
        )
        endpoint = ModelEndpoint(chat, Admission(lambda: _MOST_CALLS), self.engine_id)
        self._connect(_ServerLink(self._server, endpoint))
        self._finalizer = weakref.finalize(self, not_in_forks(_close), self._server, self._loop, self.programs.messages)
        self._loop.submit(_keep_open(self._server, self.table))
        self._has_started()
        self._log.info("connected", url=self.server_url, models=self._models)

    @property
    def models(self) -> list[str]:
        """The names of the models that the server serves; a request that names none gets the first."""
        return self._models

    def shutdown(self) -> None:
        """Abort the calls in flight, end the open programs on the server, and close the connections.

        May be called more than once.
        """
        self._life.check_process()
        if not self._life.is_closed:
            for row in self.table:
                self.programs.messages.program_ended(row.info.program_id, ProgramState.CANCELLED)
        super().shutdown()

    def __repr__(self) -> str:
        return f"<weft.connect({self.server_url!r}) {self.engine_id} {self.model!r}>"


class _ServerLink(Link):
    """Sends the engine's messages to a server."""

    hears_events = True  # the server knows whether anybody wants to hear of tools

    def __init__(self, server: Server, endpoint: ModelEndpoint) -> None:
        super().__init__(endpoint)
        self._server = server

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        if message.get("type") in _NOTICES:
            await _tell(self._server, message)
        return []


async def _models(server: Server) -> list[dict[str, Any]]:
    """The models of a server, which is seen to be a `weft serve`."""
    try:
        models: list[dict[str, Any]] = (await server.ask("/v1/models", shape=MODELS))["data"]
        await server.ask("/weft/programs", shape={})
    except ServerError:
        raise
    except WeftError as error:  # such as one for a route that is not there
        raise _no_weft(server, str(error)) from None
    if not models:
        raise _no_weft(server, "it serves no model")
    return models


def _no_weft(server: Server, reason: str) -> ServerError:
    return ServerError(
        server.url, f"is no `weft serve` ({reason:.200})", "Start one, or use the client of the server that runs there."
    )


async def _tell(server: Server, message: Mapping[str, Any]) -> None:
    await server.ask("/weft/events", message)


async def _keep_open(server: Server, table: ProcessTable) -> None:
    """Tell the server now and then which programs go on without a call, or it would end them as abandoned."""
    while True:
        await asyncio.sleep(_ALIVE_S)
        idle = [row.info.program_id for row in table if row.state is ProgramState.IDLE]
        if not idle:
            continue
        try:
            await _tell(server, {"type": "programs_open", "program_ids": idle})
        except Exception as error:  # the next call tells the user
            get_logger().debug("the server was not reached", url=server.url, reason=repr(error))


def _close(server: Server, loop: LoopThread, messages: SchedulerMessages | None) -> None:
    """Wait for the last notices, and close the connections."""

    async def close() -> None:
        end_s = time.monotonic() + _LAST_NOTICES_S
        while messages is not None and not messages.is_idle and time.monotonic() < end_s:  # noqa: ASYNC110  the messages have no event to wait for
            await asyncio.sleep(_POLL_S)
        await server.close()

    try:
        loop.submit(close()).result(2 * _LAST_NOTICES_S)
    except (EngineClosedError, TimeoutError):
        pass
    finally:
        loop.stop()
