"""The front end: what every engine does with calls, programs and sessions, however many vLLM engines run them."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from weft.core.errors import EngineClosedError, EngineError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.kv_cache.stats import KvStats, SwapStats
from weft.core.log import get_logger
from weft.core.policies import PolicyConfig
from weft.core.prediction import ExecutionGraphs
from weft.core.process_rows import CallIdentity, ProgramRow
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import Admission, Refused
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.core.trace.recorder import VARIABLE, Recorder
from weft.engine.host.backend import Programs
from weft.engine.host.call_path import END_OF_STREAM, CallPath
from weft.engine.host.idle_checks import IdleChecks
from weft.engine.host.in_flight import InFlightCalls, Life, Link
from weft.engine.host.learning import Forecasts, HistoryFile, LearnedReports
from weft.engine.host.scheduler_messages import SchedulerMessages
from weft.engine.options import EngineOptions
from weft.engine.processes.fork import not_in_forks, survive_forks
from weft.engine.processes.host import check_main_guard, keep_exit_code_of_ctrl_c
from weft.engine.processes.loop_thread import LoopThread, in_thread, settled
from weft.engine.watch import Listener, WatchedReplica
from weft.engine.wire.control import TakeKvStats, encode_control
from weft.engine.wire.reports import read_answer

_counter = itertools.count()
_ANSWER_S: Final = 5.0

T = TypeVar("T")


class FrontEnd:
    """What every engine has in the host process: a process table, programs, and the way of a call.

    `weft.Engine`, `weft.AsyncMultiLLMEngine` and the engine of `weft.connect` differ in their `Link`, the way to where
    calls run.

    Attributes:
        engine_id: The engine's name in this process.
        model: The name that the engine serves, the first of several.
        table: The engine's process table.
        programs: The engine's programs, once it has started.
        call_path: What the engine does with calls, once it has started.
        policy: How calls are scheduled; None: a server knows.
        host_kv_gib: GiB of host memory that each worker has for KV.

    Raises:
        ListenError: The engine cannot listen there.
        MissingPackageError: `listen` needs Starlette and uvicorn, which come with vLLM.
        HistoryError: `history` cannot be read or written.
        EngineStartError: This is a child process that is re-running the user's script.
        TraceError: `record` cannot be written, or holds something other than a trace.
    """

    model: str
    programs: Programs
    call_path: CallPath
    policy: PolicyConfig | None = None
    host_kv_gib: float = 0.0
    _start_abandoned: threading.Event
    _life: Life
    _finalizer: Callable[[], object]  # ends the engine, once

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> Self:
        """Set what `create` and `shutdown` read, because a start can be cancelled before `__init__` runs."""
        engine = super().__new__(cls)
        engine._start_abandoned = threading.Event()
        engine._life = Life()
        return engine

    def __init__(self, options: EngineOptions) -> None:
        check_main_guard()
        path = options.record if options.record is not None else os.environ.get(VARIABLE) or None
        self.table = ProcessTable()
        self._options = options
        self._in_flight = InFlightCalls(self.table, options.clock)
        self._recorder = Recorder(path) if path is not None else None
        self._history = HistoryFile(options.history) if options.history is not None else None
        self.engine_id = EngineId(f"engine-{next(_counter)}")
        self._kv_stats: KvStats | None = None
        self._log = get_logger().bind(engine_id=self.engine_id)
        self._listener = Listener(options.listen) if options.listen is not None else None

    def _start_loop(self, loop: LoopThread | None = None) -> None:
        """Start the engine's event loop, once all arguments have been checked; or use this one."""
        if self._listener is not None:
            self._listener.bind()
        survive_forks(self)
        keep_exit_code_of_ctrl_c()
        self._loop = loop or LoopThread(self.engine_id)

    def _connect(self, link: Link, *, learns: bool = False) -> None:
        """Make the parts that need the event loop and the way to where calls run. They do not keep the engine alive.

        Args:
            learns: Whether the schedulers' policy learns, so that they are asked what.
        """
        loop, table, options = self._loop, self.table, self._options
        self._link = link
        messages = SchedulerMessages(loop, link.send, table)
        idle = IdleChecks(loop, table, options.clock)
        self.programs = programs = Programs(
            options, self._life, self._in_flight, idle, messages, hears_events=link.hears_events
        )
        if self._history is not None:
            self._history.save_on(loop)
            self._save = weakref.finalize(self, not_in_forks(self._history.save))  # also if it is not shut down
        self.forecasts = self._history.graphs if self._history is not None else ExecutionGraphs()
        table.forecasts = self.forecasts.rows
        self.observe(Forecasts(self.forecasts, self._history, table))
        self._learned: LearnedReports | None = None
        if learns:
            self._learned = LearnedReports(loop, link.send, table, self._history, lambda: messages.is_idle)
            self.observe(self._learned)
        if self._recorder is not None:
            self.observe(self._recorder)
        self.call_path = CallPath(programs, link, loop, options, recorder=self._recorder, learns=learns)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def _measured_host_kv(self) -> float:
        """The GiB of host memory that each worker has for KV, which schedulers know once they have started."""
        answers: list[Any] = []
        with suppress(Exception):  # no start fails for want of this figure
            answers = self._loop.submit(self._link.send(encode_control(TakeKvStats()))).result(_ANSWER_S)
        found = [stats for answer in answers if (stats := read_answer(KvStats, answer)) is not None]
        return min((stats.host_capacity_bytes for stats in found), default=0) / 2**30

    def _has_started(self) -> None:
        """Take calls from now on."""
        self._life.is_closed = False
        if self._learned is not None:
            self._learned.begin()
        if self._listener is not None:
            self._listener.serve(self, self._loop)
            self._log.info("engine listens", url=self._listener.url)

    # -- what servers and monitors ask

    def now_s(self) -> float:
        """Monotonic seconds, by the engine's clock."""
        return self._options.clock()

    @property
    def call_timeout_s(self) -> float | None:
        """Seconds that a call may take unless its request says otherwise; None: no limit."""
        return self._options.call_timeout_s

    def request_refused(self, reason: Refused, tenant: str | None) -> None:
        """A server over the engine has refused a request before it made a call; see `ProgramObserver`."""
        self.programs.observers.tell(ProgramObserver.request_refused, reason, tenant, self.now_s())

    def observe(self, observer: ProgramObserver) -> None:
        """Tell an observer what happens to programs from now on."""
        self.programs.observers.add(observer)

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """A running program's row."""
        return self.table.get(program_id)

    def end_program(self, program_id: ProgramId) -> bool:
        """End a program from outside: its calls in flight and those to come raise `ProgramEndedError`.

        Returns:
            Whether it was open.
        """
        return self.programs.end_program(program_id)

    @property
    def admissions(self) -> Mapping[str, Admission]:
        """By model, what admits its calls."""
        return {self.model: self._link.endpoint(None).admission}

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
        """The address where the engine listens, as `weft top` takes it; None if it does not listen."""
        return self._listener.url if self._listener is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes calls."""
        return not self._life.is_closed and not self._life.is_forked

    @property
    def swap_stats(self) -> SwapStats | None:
        """The swap's figures as of the last call that ended, all vLLM engines together; None without a swap."""
        self._life.check_process()
        return self._link.swap_stats()

    @property
    def kv_stats(self) -> KvStats | None:
        """What the KV caches do, all vLLM engines together, as of the step that ends now. None before any scheduler has
        answered; of an engine that is gone, or does not answer within 5 s, the last figures."""
        self._life.check_process()
        if self.is_alive:
            answers: list[Any] = []
            with suppress(EngineError, TimeoutError, FutureCancelledError):  # the last figures are left
                answers = self._loop.submit(self._link.send(encode_control(TakeKvStats()))).result(_ANSWER_S)
            found = (read_answer(KvStats, answer) for answer in answers)
            self._kv_stats = KvStats.together(each for each in found if each is not None) or self._kv_stats
        return self._kv_stats

    def watched(self) -> Sequence[WatchedReplica]:
        """Its replicas, for `LiveReader`. Call it on the engine's event loop."""
        state = ReplicaState.READY if self.is_alive else ReplicaState.DOWN
        health = ReplicaHealth(self.engine_id, state, calls=len(self._in_flight), deaths=0)
        return [WatchedReplica(self.model, health, self._ask_scheduler)]

    async def _ask_scheduler(self, message: Mapping[str, Any]) -> Any:
        """The answer of the only scheduler; None if the engine has no scheduler."""
        return next(iter(await self._link.send(message)), None)

    @property
    def sessions(self) -> dict[SessionId, frozenset[ProgramId]]:
        """The open sessions and their running programs."""
        self._life.check_process()
        return self.programs.sessions.snapshot()

    @property
    def max_model_len(self) -> int:
        """The context length of the (first) model, in tokens."""
        self._life.check_process()
        return self._link.endpoint(None).chat.max_model_len

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens.

        Raises:
            EngineError: The engine was started without a tokenizer.
        """
        self._life.check_process()
        return self._link.endpoint(None).chat.tokenize(text)

    def count_prompt_tokens(self, body: Mapping[str, Any]) -> int:
        """The number of tokens of a chat request's prompt, as vLLM renders it. It need not fit the model's context.

        Raises:
            InvalidRequestError: The request is malformed, or the chat template refuses it.
            EngineClosedError: The engine was shut down.
        """
        self._life.check_process()
        if not self.is_alive:
            raise EngineClosedError
        chat = self._link.endpoint(body.get("model")).chat
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
        call, request = self.call_path.open(body, program, identity, stream=False)
        future = self.call_path.submit(call, request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # the caller was not cancelled
                self.call_path.raise_if_ended(call)
            raise

    def chat_sync(self, body: Mapping[str, Any], program: Program, identity: CallIdentity) -> dict[str, Any]:
        """`chat` for code without an event loop."""
        call, request = self.call_path.open(body, program, identity, stream=False)
        future = self.call_path.submit(call, request)
        try:
            return future.result()
        except FutureCancelledError:
            self.call_path.raise_if_ended(call)
            raise
        finally:
            future.cancel()  # after a KeyboardInterrupt

    def chat_stream(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> AsyncGenerator[dict[str, Any]]:
        """A chat completion as OpenAI `chat.completion.chunk` objects, the finishing one with the account under "weft".

        Closing the iterator aborts the call in the engine; otherwise as `chat`.
        """
        return self.call_path.stream(lambda: self.call_path.open_stream(body, program, identity))

    def chat_stream_sync(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> Generator[dict[str, Any]]:
        """`chat_stream` for code without an event loop."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future = self.call_path.submit_stream(self.call_path.open_stream(body, program, identity), items.put, items.put)
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
        self._life.check_process()
        if self._life.is_closed:
            return
        self._life.is_closed = True
        self._in_flight.abort()
        if self._recorder is not None:
            self._recorder.end_all()
        if self._learned is not None:
            self._learned.close()
        if self._history is not None:
            self._save()
        self._stop_listening()
        self._finalizer()
        self._log.info("engine shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._life.is_forked:  # a child that leaves the block on its way out leaves the engine to its parent
            self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        if not self._life.is_forked:
            await settled(in_thread(self.shutdown))
