"""The front end: what every engine does with calls, programs and sessions, however many vLLM engines run them."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Hashable, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from weft.core.accounts import Account
from weft.core.errors import (
    EngineClosedError,
    EngineError,
    EngineForkedError,
    InvalidIdError,
    ProgramEndedError,
)
from weft.core.ids import CallId, EngineId, ProgramId, SessionId
from weft.core.kv_cache.policies import KvPolicyConfig, check_kv_policy
from weft.core.kv_cache.stats import KvStats, SwapStats
from weft.core.log import get_logger
from weft.core.policies import PolicyConfig, registration
from weft.core.prediction import ExecutionGraphs
from weft.core.prediction.tool_times import MOST_LETTERS
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.routing.admission import Deadline, check_max_calls, check_timeout, deadline
from weft.core.trace.recorder import VARIABLE, Recorder
from weft.engine.frontend.calls import InFlight, ModelEndpoint, TokenRecorder
from weft.engine.frontend.fingerprint import fingerprint
from weft.engine.frontend.forecasts import Forecasts
from weft.engine.frontend.history_file import HistoryFile
from weft.engine.frontend.idle import IdleChecks
from weft.engine.frontend.in_flight import InFlightCalls
from weft.engine.frontend.learned import LearnedReports
from weft.engine.frontend.scheduler_messages import AbortedCall, SchedulerMessages
from weft.engine.frontend.sessions import Sessions
from weft.engine.frontend.weak import weakly_async
from weft.engine.processes.fork import not_in_forks, survive_forks
from weft.engine.processes.host import check_main_guard, keep_exit_code_of_ctrl_c
from weft.engine.processes.loop_thread import LoopThread, in_thread, settled
from weft.engine.wire.answers import read_kv_stats
from weft.engine.wire.calls import CallHeader, encode_call
from weft.engine.wire.control import EventKind, ProgramEvent, TakeKvStats, encode_control

_counter = itertools.count()
_ANSWER_S: Final = 5.0


class FrontEnd(ABC):
    """Calls in flight, open sessions and the process table of an engine. `weft.Engine` and `weft.AsyncMultiLLMEngine`
    are its two kinds.

    Args:
        policy: The scheduling policy, by name or with parameters.
        max_calls: How many calls may be in flight on one vLLM engine, its queue included.
        call_timeout_s: Seconds that a call may take, its time in queues included, unless its request says otherwise.
        program_timeout_s: Seconds that a program may take from its first call on, unless its metadata say otherwise.
        hang_timeout_s: Seconds after which an engine that hangs is killed; None: never.
        clock: Monotonic seconds.
        record: The trace file that programs are recorded into; None: the file named by WEFT_RECORD in the environment,
            if any.
        history: The file in which the engine keeps what programs did; None: it forgets at the end.

    Raises:
        PolicyError: The policy makes no sense, or runs in simulation only.
        HistoryError: `history` cannot be read or written.
        ReplicaError: `max_calls` is not above 0.
        InvalidRequestError: A timeout is not above 0.
        EngineStartError: This is a child process that is re-running the user's script.
        TraceError: `record` cannot be written, or holds something other than a trace.
    """

    _start_abandoned: threading.Event
    _closed: bool  # True also until the engine has started
    _process: int  # the number of the process that started the engine
    model: str  # the name that the engine serves, the first of several
    _finalizer: Callable[[], object]  # ends the engine, once

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> Self:
        """Set what `create` and `shutdown` read, because a start can be cancelled before `__init__` runs."""
        engine = super().__new__(cls)
        engine._start_abandoned = threading.Event()
        engine._closed = True
        engine._process = os.getpid()
        return engine

    def __init__(
        self,
        policy: str | PolicyConfig,
        *,
        max_calls: int,
        call_timeout_s: float | None,
        program_timeout_s: float | None,
        hang_timeout_s: float | None,
        clock: Callable[[], float],
        record: str | os.PathLike[str] | None,
        history: str | os.PathLike[str] | None = None,
        kv_policy: str | KvPolicyConfig | None = None,
    ) -> None:
        check_main_guard()
        self._kv_policy = check_kv_policy(kv_policy)
        path = record if record is not None else os.environ.get(VARIABLE) or None
        self._recorder = Recorder(path) if path is not None else None
        self.policy = (policy if isinstance(policy, PolicyConfig) else PolicyConfig(policy)).check_live()
        self.engine_id = EngineId(f"engine-{next(_counter)}")
        self.table = ProcessTable()
        self._max_calls = check_max_calls(max_calls)
        self.call_timeout_s = check_timeout(call_timeout_s, "call_timeout_s")
        self._program_timeout_s = check_timeout(program_timeout_s, "program_timeout_s")
        self._hang_timeout_s = check_timeout(hang_timeout_s, "hang_timeout_s")
        self._clock = clock
        self._sessions = Sessions()
        self._kv_stats: KvStats | None = None
        self._in_flight = InFlightCalls(self.table, clock)
        self._log = get_logger().bind(engine_id=self.engine_id)
        self._learns = registration(self.policy.name).kind.learns
        self._history = HistoryFile(history) if history is not None else None

    def _start_loop(self, loop: LoopThread | None = None) -> None:
        """Start the engine's event loop, once all arguments have been checked; or use this one."""
        survive_forks(self)
        keep_exit_code_of_ctrl_c()
        self._loop = loop or LoopThread(self.engine_id)
        self._idle = IdleChecks(self._loop, self.table, self._clock)
        send = weakly_async(self._send_to_schedulers)
        self._messages = SchedulerMessages(self._loop, send, self.table)
        messages = self._messages
        graphs = self._history.graphs if self._history is not None else ExecutionGraphs()
        self._forecasts = Forecasts(graphs, self._loop, self._history)
        self.table.forecasts = graphs.rows
        self._learned = (
            LearnedReports(self._loop, send, self.table, self._history, lambda: messages.is_idle)
            if self._learns
            else None
        )

    def _has_started(self) -> None:
        """Take calls from now on."""
        self._closed = False
        if self._learned is not None:
            self._learned.begin()
        if self._history is not None:  # for an engine that is not shut down
            weakref.finalize(self, not_in_forks(self._history.save))

    # -- what the two kinds of engines implement

    @abstractmethod
    def _endpoint(self, model: str | None) -> ModelEndpoint:
        """The endpoint of a model; None: the request names none.

        Raises:
            UnknownModelError: The engine does not serve this model.
        """

    @abstractmethod
    async def _send_to_schedulers(self, message: Mapping[str, Any]) -> list[Any]:
        """Send a control message to every scheduler of the engine, on the engine's event loop.

        Returns:
            Their answers; None from a replica that does not run.
        """

    def _program_ended(self, info: ProgramInfo, state: ProgramState, *, session_ended: bool) -> None:
        """A program has ended, and with it perhaps its session."""
        del session_ended
        self._messages.program_ended(info.program_id, is_abandoned=state is ProgramState.ABANDONED)
        if self._learned is not None:
            self._learned.touch()

    # -- what users ask

    @property
    def models(self) -> list[str]:
        """The names of the models that the engine serves; a request that names none gets the first."""
        return [self.model]

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes calls."""
        return not self._closed and not self._is_forked

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a forked child of the one that started the engine."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        """Raise an error in a forked child. Every use of the engine calls this first, because it could hang there.

        Raises:
            EngineForkedError: This is a forked child.
        """
        if self._is_forked:
            raise EngineForkedError(self._process)

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
            identity: The call's ids, from `program.start_call`.

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
            while (item := await items.get()) is not _END:
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
            while (item := items.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    # -- a call's way through the front end

    def now_s(self) -> float:
        """Monotonic seconds, by the engine's clock."""
        return self._clock()

    def _open_call(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity, *, stream: bool
    ) -> tuple[InFlight, Any]:
        """Check a request, admit it and note it in the table. Each step is undone if a later one fails."""
        self._check_new(identity.call_id)
        try:
            if self._closed:
                raise EngineClosedError
            fields = {**body, "stream": stream, "request_id": identity.call_id, "session_id": program.session_id}
            timeout_s = check_timeout(fields.pop("timeout_s", self.call_timeout_s), "timeout_s")
            endpoint = self._endpoint(fields.get("model"))
            request = endpoint.chat.make_request(fields)
        except BaseException as error:
            self._note_refusal(program, identity.call_id, error)
            raise
        call, header = self.enter_call(endpoint, program, identity, timeout_s, lambda: fingerprint(body))
        request.vllm_xargs = {**(request.vllm_xargs or {}), **encode_call(header)}
        if self._recorder is not None:
            call.recorder = TokenRecorder(self._recorder, identity, request)
        return call, request

    def enter_call(
        self,
        endpoint: ModelEndpoint,
        program: Program,
        identity: CallIdentity,
        timeout_s: float | None,
        make_fingerprint: Callable[[], str],
        *,
        is_admitted: bool = False,
    ) -> tuple[InFlight, CallHeader]:
        """Admit a call and note it in the table. Each step is undone if a later one fails.

        Args:
            endpoint: The model's.
            program: The call's program.
            identity: The call's ids, from `program.start_call`.
            timeout_s: Seconds that the call may take, above 0; None: no limit.
            make_fingerprint: Of the system prompt and the tools.
            is_admitted: Whether the endpoint has admitted the call already.

        Returns:
            The call, and what the scheduler is told of it.

        Raises:
            CallError, ProgramError, EngineError: See `weft.core.errors`.
        """
        call_id = identity.call_id
        with ExitStack() as undo:
            if is_admitted:
                undo.callback(endpoint.admission.leave, self._clock())
            self._check_new(call_id)

            def refused(_kind: object, error: BaseException | None, _trace: object) -> None:
                if error is not None:
                    self._note_refusal(program, call_id, error)

            undo.push(refused)
            if self._closed:
                raise EngineClosedError
            program.bind(self)
            now_s = self._clock()  # a program that begins with this call began before it
            self._idle.watch(program)
            ends = self._deadline(program, timeout_s, now_s)
            if not is_admitted:
                endpoint.admission.enter(now_s)
                undo.callback(endpoint.admission.leave, now_s)
            row, attained = self.table.arrive(identity, endpoint.engine_id, now_s)
            undo.callback(self.table.leave, row, now_s)
            program.call_arrived(call_id, now_s)
            self._forecasts.call_arrived(identity, program.graph, now_s)
            undo.callback(self._forecasts.call_left, identity, None, now_s)
            row_of_program = self.table.get(program.program_id)
            if self._learned is not None and row_of_program is not None and not row_of_program.fingerprint:
                row_of_program.fingerprint = make_fingerprint()
            header = CallHeader(
                identity,
                attained,
                program_name=program.name,
                fingerprint=row_of_program.fingerprint if row_of_program is not None else "",
                tenant=program.tenant,
                program_calls=row_of_program.calls if row_of_program is not None else 0,
                time_left_s=ends.at_s - now_s,
                program_time_left_s=row_of_program.due_s - now_s if row_of_program is not None else math.inf,
            )
            call = InFlight(program, identity, row, endpoint, ends)
            if self._recorder is not None:
                self._recorder.call_arrived(program.graph, now_s)
            self._in_flight.add(call)
            if self._learned is not None:
                self._learned.touch()
            undo.pop_all()
        return call, header

    def _check_new(self, call_id: CallId) -> None:
        self._check_process()
        if call_id in self._in_flight:
            raise InvalidIdError(f"call {call_id} is already in flight; ids are used once.")

    def _note_refusal(self, program: Program, call_id: CallId, error: BaseException) -> None:
        """Note in a program's graph that its call left because of an error before it reached a scheduler."""
        ended = isinstance(error, ProgramEndedError | EngineClosedError)
        state = CallState.CANCELLED if ended else CallState.FAILED
        program.call_left(call_id, self._clock(), Account(), state)

    def _deadline(self, program: Program, timeout_s: float | None, now_s: float) -> Deadline:
        row = self.table.get(program.program_id)
        if row is None:  # the program has ended on another thread
            return deadline(now_s, timeout_s, now_s, None)
        return deadline(now_s, timeout_s, row.start_s, row.info.timeout_s)

    def submit_call(self, call: InFlight, coroutine: Any) -> Future[Any]:
        """Run a call's coroutine on the engine's event loop. Cancelling the future aborts the call.

        Raises:
            EngineClosedError: The engine was shut down.
        """
        try:
            call.future = self._loop.submit(coroutine)
        except EngineClosedError:  # the engine was shut down on another thread
            self._in_flight.leave(call)
            raise
        # A call that is cancelled before its coroutine began leaves here.
        call.future.add_done_callback(lambda _future: self.leave(call))
        if self.table.get(call.identity.program_id) is None:  # its program has ended on another thread
            call.abort()
        return call.future

    def leave(self, call: InFlight) -> None:
        """A call has left the engine, finished or not. Leaving twice changes nothing."""
        if self._in_flight.leave(call):
            account = call.row.account if call.outcome is CallState.FINISHED else None
            self._forecasts.call_left(call.identity, account, self._clock())
            if call.awaits_account:
                self._messages.call_aborted(AbortedCall(call.program, call.row))

    async def _complete(self, call: InFlight, request: Any) -> dict[str, Any]:
        try:
            async with call.in_time(self._clock, is_stream=False):
                response = await call.endpoint.chat.complete(request)
            if call.recorder is not None:
                call.recorder.take(response)
            call.note_stop(response)
            call.outcome = CallState.FINISHED
        except Exception:
            call.outcome = CallState.FAILED
            raise
        finally:
            self.leave(call)  # before the caller sees the result, so that its next call reads the new service
        return {**response, "weft": call.report()}

    def _submit_stream(self, call: InFlight, request: Any, deliver: Callable[[Any], object]) -> Future[Any]:
        """Carry a stream over to the caller's thread. The last item is _END or an exception."""

        async def pump() -> None:
            try:
                async with (
                    call.in_time(self._clock, is_stream=True),
                    aclosing(call.endpoint.chat.stream(request)) as chunks,
                ):
                    async for chunk in chunks:
                        if call.recorder is not None and not call.recorder.take(chunk):
                            continue
                        call.note_stop(chunk)
                        if any(choice.get("finish_reason") for choice in chunk["choices"]):
                            chunk["weft"] = call.report()
                        deliver(chunk)
                call.outcome = CallState.FINISHED
            except Exception:
                call.outcome = CallState.FAILED
                raise
            finally:
                self.leave(call)

        def end(future: Future[Any]) -> None:  # also of a stream that was aborted before it began
            error = call.ended_error(self._closed) if future.cancelled() else future.exception()
            with suppress(RuntimeError):  # the caller's event loop is closed
                deliver(error or _END)

        future = self.submit_call(call, pump())
        future.add_done_callback(end)
        return future

    def _raise_if_ended(self, call: InFlight) -> None:
        error = call.ended_error(self._closed)
        if error is not None:
            raise error

    # -- sessions: the backend's operations, which Program calls

    def start_session(self, info: ProgramInfo) -> None:
        """Register a program under its session. A session begins with its first program (Autellix §5).

        Raises:
            InvalidRequestError: the program's metadata have a time-out that is no time.
        """
        self._check_process()
        if self._closed:
            raise EngineClosedError
        timeout_s = info.timeout_s
        if timeout_s is None:
            given = info.metadata.get("timeout_s", self._program_timeout_s)
            timeout_s = check_timeout(given, "metadata['timeout_s']")
        info = replace(info, timeout_s=timeout_s)
        self.table.open(info, self._clock())
        self._forecasts.program_started(info)
        if self._recorder is not None:
            self._recorder.begin(info)
        self._sessions.begin(info)

    def end_session(self, program_id: ProgramId, state: ProgramState) -> ProgramRow | None:
        """Abort a program's calls in flight and take its row out. A session ends with its last program.

        Nothing happens in a forked child: the program goes on in the parent.
        """
        if self._is_forked:
            return None
        self._in_flight.abort(program_id)
        self._idle.discard(program_id)
        row = self.table.close(program_id, state, self._clock())
        if row is not None:
            self._forecasts.program_ended(program_id, state)
            self._program_ended(row.info, state, session_ended=self._sessions.end(row.info))
            if self._recorder is not None:
                self._recorder.end(program_id)
        return row

    # What happens between two calls. The schedulers are told if their KV policy predicts anything. What is lost costs a
    # guess. A forked child changes nothing.

    def tool_started(self, program_id: ProgramId, run: Hashable, tool: str) -> None:
        """A program waits for a tool from now on."""
        if self._is_forked:
            return
        started = self.table.tool_started(program_id, run, tool, self._clock())
        if started is not None and self._predicts:
            name = tool[:MOST_LETTERS]
            self._messages.happened(ProgramEvent(EventKind.TOOL_STARTED, program_id, name, started.number))

    def tools_ended(self, program_id: ProgramId, runs: Collection[Hashable]) -> None:
        """Tools have returned."""
        if self._is_forked:
            return
        now_s = self._clock()
        for tool in self.table.tools_ended(program_id, runs):
            if self._predicts:
                kind, name, took_s = EventKind.TOOL_ENDED, tool.name[:MOST_LETTERS], now_s - tool.start_s
                self._messages.happened(ProgramEvent(kind, program_id, name, tool.number, took_s))

    def call_announced(self, program_id: ProgramId) -> None:
        """A program's next call comes soon."""
        if self._predicts and not self._is_forked:
            self._messages.happened(ProgramEvent(EventKind.PREFETCH, program_id))

    @property
    def _predicts(self) -> bool:
        return self._kv_policy is not None and not self._kv_policy.follows_use

    def row(self, program_id: ProgramId) -> ProgramRow | None:
        """A running program's row."""
        return self.table.get(program_id)

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


_END: Final = object()
