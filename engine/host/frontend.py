"""The front end: what every engine does with calls, programs and sessions, however many vLLM engines run them."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from weft.core.errors import EngineClosedError, EngineError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.kv_cache.stats import KvStats, SwapStats
from weft.core.log import get_logger
from weft.core.prediction import ExecutionGraphs
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.routing.admission import Admission
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.core.trace.recorder import VARIABLE, Recorder
from weft.engine.host.call_path import END_OF_STREAM, CallPath
from weft.engine.host.learning import HistoryFile
from weft.engine.options import EngineOptions
from weft.engine.processes.fork import not_in_forks
from weft.engine.processes.host import check_main_guard
from weft.engine.processes.loop_thread import LoopThread, in_thread, settled
from weft.engine.watch import Listener, WatchedReplica
from weft.engine.wire.answers import read_kv_stats
from weft.engine.wire.control import TakeKvStats, encode_control

_counter = itertools.count()
_ANSWER_S: Final = 5.0

T = TypeVar("T")


class FrontEnd(CallPath):
    """Calls in flight, open sessions and the process table of an engine. `weft.Engine` and `weft.AsyncMultiLLMEngine`
    are its two kinds.

    Args:
        options: The engine's options.

    Raises:
        ListenError: The engine cannot listen there.
        MissingPackageError: `listen` needs Starlette and uvicorn, which come with vLLM.
        HistoryError: `history` cannot be read or written.
        EngineStartError: This is a child process that is re-running the user's script.
        TraceError: `record` cannot be written, or holds something other than a trace.
    """

    _start_abandoned: threading.Event
    model: str  # the name that the engine serves, the first of several
    host_kv_gib: float = 0.0  # of host memory that each worker has for KV
    _finalizer: Callable[[], object]  # ends the engine, once

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> Self:
        """Set what `create` and `shutdown` read, because a start can be cancelled before `__init__` runs."""
        engine = super().__new__(cls)
        engine._start_abandoned = threading.Event()
        engine._closed = True
        engine._process = os.getpid()
        return engine

    def __init__(self, options: EngineOptions) -> None:
        check_main_guard()
        path = options.record if options.record is not None else os.environ.get(VARIABLE) or None
        super().__init__(
            options,
            recorder=Recorder(path) if path is not None else None,
            history=HistoryFile(options.history) if options.history is not None else None,
        )
        self.engine_id = EngineId(f"engine-{next(_counter)}")
        self._kv_stats: KvStats | None = None
        self._log = get_logger().bind(engine_id=self.engine_id)
        self._listener = Listener(options.listen) if options.listen is not None else None

    def _start_loop(self, loop: LoopThread | None = None) -> None:
        """Start the engine's event loop, once all arguments have been checked; or use this one."""
        if self._listener is not None:
            self._listener.bind()
        self._run_on(loop or LoopThread(self.engine_id))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def _measured_host_kv(self) -> float:
        """The GiB of host memory that each worker has for KV, which schedulers know once they have started."""
        answers: list[Any] = []
        with suppress(Exception):  # no start fails for want of this figure
            answers = self._loop.submit(self._send_to_schedulers(encode_control(TakeKvStats()))).result(_ANSWER_S)
        found = [stats for answer in answers if (stats := read_kv_stats(answer)) is not None]
        return min((stats.host_capacity_bytes for stats in found), default=0) / 2**30

    def _has_started(self) -> None:
        """Take calls from now on."""
        self._closed = False
        if self._learned is not None:
            self._learned.begin()
        if self._listener is not None:
            self._listener.serve(self, self._loop)
            self._log.info("engine listens", url=self._listener.url)
        if self._history is not None:  # for an engine that is not shut down
            weakref.finalize(self, not_in_forks(self._history.save))

    # -- what servers and monitors ask

    @property
    def admissions(self) -> Mapping[str, Admission]:
        """By model, what admits its calls."""
        return {self.model: self._endpoint(None).admission}

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the engine's event loop. Cancelling the future cancels the coroutine.

        Raises:
            EngineClosedError: The engine was shut down.
        """
        return self._loop.submit(coroutine)

    # -- what users ask

    @property
    def models(self) -> list[str]:
        """The names of the models that the engine serves; a request that names none gets the first."""
        return [self.model]

    @property
    def url(self) -> str | None:
        """Where the engine listens, as `weft top` takes it; None: it does not."""
        return self._listener.url if self._listener is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes calls."""
        return not self._closed and not self._is_forked

    @property
    @abstractmethod
    def swap_stats(self) -> SwapStats | None:
        """The swap's figures as of the last call that ended, all vLLM engines together; None without a swap."""

    @property
    def kv_stats(self) -> KvStats | None:
        """What the KV caches do, all vLLM engines together, as of the step that ends now. None before any scheduler has
        answered; of an engine that is gone, or does not answer within 5 s, the last figures."""
        self._check_process()
        if self.is_alive:
            answers: list[Any] = []
            with suppress(EngineError, TimeoutError, FutureCancelledError):  # the last figures are left
                answers = self._loop.submit(self._send_to_schedulers(encode_control(TakeKvStats()))).result(_ANSWER_S)
            found = (read_kv_stats(answer) for answer in answers)
            self._kv_stats = KvStats.together(each for each in found if each is not None) or self._kv_stats
        return self._kv_stats

    def watched(self) -> Sequence[WatchedReplica]:
        """Its replicas, for `LiveReader`. Call it on the engine's event loop."""
        state = ReplicaState.READY if self.is_alive else ReplicaState.DOWN
        health = ReplicaHealth(self.engine_id, state, calls=len(self._in_flight), deaths=0)
        return [WatchedReplica(self.model, health, self._ask_scheduler)]

    async def _ask_scheduler(self, message: Mapping[str, Any]) -> Any:
        """The answer of the only scheduler; None: there is none."""
        return next(iter(await self._send_to_schedulers(message)), None)

    @property
    def forecasts(self) -> ExecutionGraphs:
        """What running programs are expected to do next, and what is left of them."""
        return self._forecasts.graphs

    @property
    def sessions(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        self._check_process()
        return self._sessions.snapshot()

    @property
    def max_model_len(self) -> int:
        """The context length of the (first) model, in tokens."""
        self._check_process()
        return self._endpoint(None).chat.max_model_len

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens.

        Raises:
            EngineError: The engine was started without a tokenizer.
        """
        self._check_process()
        return self._endpoint(None).chat.tokenize(text)

    def count_prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """The number of tokens of a chat request's prompt, as vLLM renders it. It need not fit the model's context.

        Raises:
            InvalidRequestError: The request is malformed, or the chat template refuses it.
            EngineClosedError: The engine was shut down.
        """
        self._check_process()
        if not self.is_alive:
            raise EngineClosedError
        chat = self._endpoint(body.get("model")).chat
        return self._loop.submit(chat.count_prompt_tokens(chat.make_request(dict(body)))).result()

    # -- calls

    async def chat(self, body: Mapping[str, Any], program: Program, identity: CallIdentity) -> dict[str, Any]:
        """One chat completion, as OpenAI's `chat.completion` object.

        Args:
            body: The request in OpenAI's chat format. Ids and model are filled in.
            program: The program that the call belongs to.
            identity: The call's ids, from `program.reports.start_call`.

        Returns:
            vLLM's response, and under "weft" the call's ids and account (`service_s`, `wait_s`, `preemptions`, tokens).

        Raises:
            CallError, ProgramError, EngineError: See `weft.core.errors`. Cancelling aborts the call in the engine.
        """
        call, request = self._open_call(body, program, identity, stream=False)
        future = self.submit_call(call, self._complete(call, request))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # the caller was not cancelled
                self._raise_if_ended(call)
            raise

    def chat_sync(self, body: Mapping[str, Any], program: Program, identity: CallIdentity) -> dict[str, Any]:
        """`chat` for code without an event loop."""
        call, request = self._open_call(body, program, identity, stream=False)
        future = self.submit_call(call, self._complete(call, request))
        try:
            return future.result()
        except FutureCancelledError:
            self._raise_if_ended(call)
            raise
        finally:
            future.cancel()  # after a KeyboardInterrupt

    async def chat_stream(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> AsyncGenerator[dict[str, Any]]:
        """A chat completion as OpenAI `chat.completion.chunk` objects, the finishing one with the account under "weft".

        Closing the iterator aborts the call in the engine; otherwise as `chat`.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()
        call, request = self._open_call(body, program, identity, stream=True)
        future = self._submit_stream(call, request, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
        try:
            while (item := await items.get()) is not END_OF_STREAM:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def chat_stream_sync(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> Generator[dict[str, Any]]:
        """`chat_stream` for code without an event loop."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call, request = self._open_call(body, program, identity, stream=True)
        future = self._submit_stream(call, request, items.put)
        try:
            while (item := items.get()) is not END_OF_STREAM:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    # -- life

    def shutdown(self) -> None:
        """Abort the calls in flight and end the engine's processes. Later calls raise `EngineClosedError`.

        May be called more than once.
        """
        self._check_process()
        if self._closed:
            return
        self._closed = True
        self._in_flight.abort()
        if self._recorder is not None:
            self._recorder.end_all()
        if self._learned is not None:
            self._learned.close()
        if self._history is not None:
            self._history.save()
        self._stop_listening()
        self._finalizer()
        self._log.info("engine shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_forked:  # a child that leaves the block on its way out leaves the engine to its parent
            self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_forked:
            await settled(in_thread(self.shutdown))
