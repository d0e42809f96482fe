"""A call's way through the front end: admitted, noted in the table, run on the engine's event loop, and gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar

from weft.core.accounts import Account
from weft.core.errors import EngineClosedError, InvalidIdError, InvalidRequestError, ProgramEndedError
from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import check_timeout, deadline
from weft.core.trace.recorder import Recorder
from weft.engine.host.backend import Programs
from weft.engine.host.in_flight import InFlight, Link, ModelEndpoint
from weft.engine.host.scheduler_messages import AbortedCall
from weft.engine.options import EngineOptions
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire.call_header import CallHeader, encode_call, refuse_priority

END_OF_STREAM: Final = object()

T = TypeVar("T")


class CallStream(NamedTuple, Generic[T]):
    """A call whose answer comes in parts."""

    call: InFlight
    items: AsyncGenerator[T]  # what the engine gives
    take: Callable[[T], bool]  # notes an item in the call; whether the caller gets it


class CallPath:
    """What an engine does with a call.

    Args:
        learns: Whether the scheduling policy learns, and tells programs apart by their fingerprints.
    """

    def __init__(
        self,
        programs: Programs,
        link: Link,
        loop: LoopThread,
        options: EngineOptions,
        *,
        recorder: Recorder | None,
        learns: bool,
    ) -> None:
        self._programs = programs
        self._life = programs.life
        self._table = programs.table
        self._in_flight = programs.in_flight
        self._link = link
        self._loop = loop
        self._timeout_s = options.call_timeout_s
        self._clock = options.clock
        self._recorder = recorder
        self._learns = learns

    # -- the way in

    def open(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity, *, stream: bool
    ) -> tuple[InFlight, Any]:
        """Check a request, admit it and note it in the table. Each step is undone if a later one fails. Returns the
        call, and the request for its endpoint.

        Args:
            body: The request in OpenAI's chat format.
            identity: The call's ids, from `program.reports.start_call`.
        """
        self._check_new(identity.call_id)
        try:
            if self._life.is_closed:
                raise EngineClosedError
            fields = {**body, "stream": stream, "request_id": identity.call_id, "session_id": program.session_id}
            timeout_s = self._timeout_s
            if "timeout_s" in fields:
                timeout_s = check_timeout(fields.pop("timeout_s"), "timeout_s")
            endpoint = self._link.endpoint(fields.get("model"))
            if "priority" in fields:
                refuse_priority(fields["priority"])
            if 0 in (fields.get("max_tokens"), fields.get("max_completion_tokens")):
                raise InvalidRequestError("max_tokens must be at least 1, not 0.")
            request = endpoint.chat.make_request(fields, program, identity)
            call, header = self._admit(
                endpoint, program, identity, timeout_s, lambda: fingerprint(body), settings=settings_of(body)
            )
        except BaseException as error:
            self._note_refusal(program, identity, error)
            raise
        request.vllm_xargs = {**(request.vllm_xargs or {}), **encode_call(header)}
        if call.recorder is not None:  # vLLM is to send the ids with the answer
            call.hides_ids, request.return_token_ids = not request.return_token_ids, True
        return call, request

    def enter_call(
        self,
        endpoint: ModelEndpoint,
        program: Program,
        identity: CallIdentity,
        timeout_s: float | None,
        make_fingerprint: Callable[[], str],
        *,
        settings: Mapping[str, float],
        is_admitted: bool = False,
    ) -> tuple[InFlight, CallHeader]:
        """Admit a call whose request a server has checked. Each step is undone if a later one fails. Returns the call,
        and what the scheduler is told of it.

        Args:
            timeout_s: Seconds that the call may take, above 0; None: no limit.
            make_fingerprint: Of the system prompt and the tools.
            settings: What the request asks of sampling, see `settings_of`.
            is_admitted: Whether the endpoint has admitted the call already.
        """
        with ExitStack() as undo:
            if is_admitted:
                undo.callback(endpoint.admission.leave, self._clock())
            self._check_new(identity.call_id)
            try:
                entered = self._admit(
                    endpoint, program, identity, timeout_s, make_fingerprint, settings=settings, is_admitted=is_admitted
                )
            except BaseException as error:
                self._note_refusal(program, identity, error)
                raise
            undo.pop_all()
        return entered

    def _admit(
        self,
        endpoint: ModelEndpoint,
        program: Program,
        identity: CallIdentity,
        timeout_s: float | None,
        make_fingerprint: Callable[[], str],
        *,
        settings: Mapping[str, float],
        is_admitted: bool = False,
    ) -> tuple[InFlight, CallHeader]:
        if self._life.is_closed:
            raise EngineClosedError
        if program.reports.bind(self._programs):
            self._programs.idle.watch(program)
        now_s = self._clock()
        of_program = self._table.get(identity.program_id)
        if of_program is None:  # it has ended on another thread
            raise ProgramEndedError(program.program_id, program.program_id)
        ends = deadline(now_s, timeout_s, of_program.start_s, of_program.info.timeout_s)
        with ExitStack() as undo:
            if not is_admitted:
                endpoint.admission.enter(now_s)
                undo.callback(endpoint.admission.leave, now_s)
            row, attained = self._table.arrive(identity, endpoint.engine_id, now_s)
            undo.callback(self._table.leave, row, now_s)
            row.model, row.settings = endpoint.model, settings
            program.reports.call_arrived(identity.call_id, now_s)
            if self._learns and not of_program.fingerprint:
                of_program.fingerprint = make_fingerprint()
            header = CallHeader(
                identity,
                attained,
                program_name=program.name,
                fingerprint=of_program.fingerprint,
                tenant=program.tenant,
                program_calls=of_program.calls,
                time_left_s=ends.at_s - now_s,
                program_time_left_s=of_program.due_s - now_s,
            )
            call = InFlight(program, identity, row, of_program, endpoint, ends, self._recorder)
            self._in_flight.add(call)
            undo.pop_all()
        self._programs.observers.tell(ProgramObserver.call_arrived, identity, program.graph, now_s)
        return call, header

    def _check_new(self, call_id: CallId) -> None:
        self._life.check_process()
        if call_id in self._in_flight:
            raise InvalidIdError(f"call {call_id} is already in flight; ids are used once.")

    def _note_refusal(self, program: Program, identity: CallIdentity, error: BaseException) -> None:
        """Note in a program's graph that its call left because of an error before it reached a scheduler."""
        ended = isinstance(error, ProgramEndedError | EngineClosedError)
        state = CallState.CANCELLED if ended else CallState.FAILED
        now_s = self._clock()
        program.reports.call_left(identity.call_id, now_s, Account(), state)
        self._programs.observers.tell(ProgramObserver.call_refused, identity, error, now_s)

    # -- while it runs

    def submit(self, call: InFlight, request: Any) -> Future[dict[str, Any]]:
        """Run a call, whose answer comes in one piece. Cancelling the future aborts the call."""
        return self._run(call, self._complete(call, request))

    async def _complete(self, call: InFlight, request: Any) -> dict[str, Any]:
        try:
            async with call.in_time(self._clock, is_stream=False):
                response = await call.endpoint.chat.complete(request)
            if call.recorder is not None:
                call.take_ids(response)
            call.note_answer(response)
            call.outcome = CallState.FINISHED
        except Exception:
            call.outcome = CallState.FAILED
            raise
        finally:
            self.leave(call)  # before the caller sees the result, so that its next call reads the new service
        return {**response, "weft": call.report()}

    def open_stream(
        self, body: Mapping[str, Any], program: Program, identity: CallIdentity
    ) -> CallStream[dict[str, Any]]:
        """`open` for an answer in chunks, the finishing one with the account under "weft"."""
        call, request = self.open(body, program, identity, stream=True)

        def take(chunk: dict[str, Any]) -> bool:
            if call.recorder is not None and not call.take_ids(chunk):
                return False
            call.note_answer(chunk)
            if any(choice.get("finish_reason") for choice in chunk["choices"]):
                chunk["weft"] = call.report()
            return True

        return CallStream(call, call.endpoint.chat.stream(request), take)

    def submit_stream(
        self,
        opened: CallStream[T],
        deliver: Callable[[T], object],
        finish: Callable[[Any], object],
        is_closed: Callable[[], bool] | None = None,
    ) -> Future[None]:
        """Run a call whose answer comes in parts. Cancelling the future aborts the call.

        It runs in a task of its own, so that its program and its deadline can end it.

        Args:
            deliver: Gets the items, on the engine's event loop.
            finish: Then gets END_OF_STREAM or an exception, on any thread.
            is_closed: Whether an abort means that the engine was closed. None: as the engine says.
        """
        call, items, take = opened

        async def pump() -> None:
            try:
                async with call.in_time(self._clock, is_stream=True), aclosing(items):
                    async for item in items:
                        if take(item):
                            deliver(item)
                call.outcome = CallState.FINISHED
            except Exception:
                call.outcome = CallState.FAILED
                raise
            finally:
                self.leave(call)

        def end(future: Future[None]) -> None:  # also of a call that was aborted before it began
            closed = self._life.is_closed if is_closed is None else is_closed()
            error = call.ended_error(closed) if future.cancelled() else future.exception()
            with suppress(RuntimeError):  # the caller's event loop is closed
                finish(error or END_OF_STREAM)

        future = self._run(call, pump())
        future.add_done_callback(end)
        return future

    async def stream(
        self, open_stream: Callable[[], CallStream[T]], is_closed: Callable[[], bool] | None = None
    ) -> AsyncGenerator[T]:
        """`submit_stream` for a caller with an event loop. The call is opened when the caller asks for the first item;
        closing the iterator aborts it."""
        loop = asyncio.get_running_loop()
        delivered: asyncio.Queue[Any] = asyncio.Queue()

        def finish(item: Any) -> None:
            loop.call_soon_threadsafe(delivered.put_nowait, item)

        def deliver(item: T) -> None:
            if asyncio.get_running_loop() is loop:  # a server's, which is the engine's, too
                delivered.put_nowait(item)
            else:
                finish(item)

        future = self.submit_stream(open_stream(), deliver, finish, is_closed)
        try:
            while (item := await delivered.get()) is not END_OF_STREAM:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def _run(self, call: InFlight, coroutine: Any) -> Future[Any]:
        """Run a call's coroutine on the engine's event loop. Raises EngineClosedError if the engine was shut down."""
        try:
            call.future = self._loop.submit(coroutine)
        except EngineClosedError:  # the engine was shut down on another thread
            self._in_flight.leave(call)
            raise
        # A call that is cancelled before its coroutine began leaves here.
        call.future.add_done_callback(lambda _future: self.leave(call))
        if not math.isnan(call.of_program.end_s):  # its program has ended on another thread
            call.abort()
        return call.future

    # -- the way out

    def leave(self, call: InFlight) -> None:
        """A call has left the engine, finished or not. Leaving twice changes nothing."""
        if (outcome := self._in_flight.leave(call)) is not None:
            self._programs.observers.tell(ProgramObserver.call_left, call.row, outcome, self._clock())
            if call.awaits_account(outcome):
                self._programs.messages.call_aborted(AbortedCall(call.program, call.row))

    def raise_if_ended(self, call: InFlight) -> None:
        """Raise why a call was aborted, EngineClosedError or ProgramEndedError, if its caller has not aborted it."""
        error = call.ended_error(self._life.is_closed)
        if error is not None:
            raise error


# What a request says of itself: what it asks of sampling, and what kind of program it begins.

_SYSTEM: Final = ("system", "developer")
_BYTES: Final = 8


def fingerprint(body: Mapping[str, Any]) -> str:
    """A short hash of a chat request's system prompt and tools.

    Programs without a name of their own, such as all that LangGraph starts, are told apart by it.
    """
    messages = body.get("messages")
    rows = messages if isinstance(messages, list) else []
    prompt = [row.get("content") for row in rows if isinstance(row, Mapping) and row.get("role") in _SYSTEM]
    shown = json.dumps([prompt, body.get("tools")], sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.blake2b(shown.encode(errors="replace"), digest_size=_BYTES).hexdigest()


# By the name that they have in OpenTelemetry's conventions: the fields of OpenAI's and Anthropic's requests, of which
# the first one that a request has counts.
_FIELDS: Final = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "frequency_penalty": ("frequency_penalty",),
    "presence_penalty": ("presence_penalty",),
    "seed": ("seed",),
    "choice.count": ("n",),
}
_BOUND: Final = 1 << 63  # of a whole number in a span


def settings_of(request: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a request asks for; what it leaves to the model is missing.

    Stop strings are not among them, because they are texts.

    Args:
        request: In the format of OpenAI's or Anthropic's API, or vLLM's sampling parameters.
    """
    found: dict[str, float] = {}
    for setting, names in _FIELDS.items():
        for name in names:
            value = request.get(name)
            if value is not None:
                if isinstance(value, int | float) and not isinstance(value, bool) and -_BOUND <= value < _BOUND:
                    found[setting] = value
                break
    return found
