"""A call's way through the front end: admitted, noted in the table, run on the engine's event loop, and gone."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Final

from weft.core.accounts import Account
from weft.core.errors import EngineClosedError, InvalidIdError, ProgramEndedError
from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.routing.admission import Deadline, check_timeout, deadline
from weft.engine.host.backend import ProgramBackend
from weft.engine.host.in_flight import InFlight, ModelEndpoint, TokenRecorder
from weft.engine.host.request_facts import fingerprint, settings_of
from weft.engine.host.scheduler_messages import AbortedCall
from weft.engine.wire.call_header import CallHeader, encode_call, refuse_priority

END_OF_STREAM: Final = object()


class CallPath(ProgramBackend):
    """What an engine does with a call."""

    @property
    def call_timeout_s(self) -> float | None:
        """Seconds that a call may take unless its request says otherwise; None: no limit."""
        return self._options.call_timeout_s

    @abstractmethod
    def _endpoint(self, model: str | None) -> ModelEndpoint:
        """The endpoint of a model; None: the request names none.

        Raises:
            UnknownModelError: The engine does not serve this model.
        """

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
            refuse_priority(fields.get("priority"))
            request = endpoint.chat.make_request(fields)
        except BaseException as error:
            self._note_refusal(program, identity, error)
            raise
        call, header = self.enter_call(
            endpoint, program, identity, timeout_s, lambda: fingerprint(body), settings=settings_of(body)
        )
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
        settings: Mapping[str, float],
        is_admitted: bool = False,
    ) -> tuple[InFlight, CallHeader]:
        """Admit a call and note it in the table. Each step is undone if a later one fails.

        Args:
            endpoint: The model's.
            program: The call's program.
            identity: The call's ids, from `program.reports.start_call`.
            timeout_s: Seconds that the call may take, above 0; None: no limit.
            make_fingerprint: Of the system prompt and the tools.
            settings: What the request asks of sampling, see `settings_of`.
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
                    self._note_refusal(program, identity, error)

            undo.push(refused)
            if self._closed:
                raise EngineClosedError
            program.reports.bind(self)
            now_s = self._clock()  # a program that begins with this call began before it
            self._idle.watch(program)
            ends = self._deadline(program, timeout_s, now_s)
            if not is_admitted:
                endpoint.admission.enter(now_s)
                undo.callback(endpoint.admission.leave, now_s)
            row, attained = self.table.arrive(identity, endpoint.engine_id, now_s)
            row.model, row.settings = endpoint.model, settings
            undo.callback(self.table.leave, row, now_s)
            program.reports.call_arrived(call_id, now_s)
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
            self._observers.call_arrived(identity, program.graph, now_s)
            if self._learned is not None:
                self._learned.touch()
            undo.pop_all()
        return call, header

    def _check_new(self, call_id: CallId) -> None:
        self._check_process()
        if call_id in self._in_flight:
            raise InvalidIdError(f"call {call_id} is already in flight; ids are used once.")

    def _note_refusal(self, program: Program, identity: CallIdentity, error: BaseException) -> None:
        """Note in a program's graph that its call left because of an error before it reached a scheduler."""
        ended = isinstance(error, ProgramEndedError | EngineClosedError)
        state = CallState.CANCELLED if ended else CallState.FAILED
        now_s = self._clock()
        program.reports.call_left(identity.call_id, now_s, Account(), state)
        self._observers.call_refused(identity, error, now_s)

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
            now_s = self._clock()
            self._forecasts.call_left(call.identity, account, now_s)
            self._observers.call_left(call.row, call.outcome, now_s)
            if call.awaits_account:
                self._messages.call_aborted(AbortedCall(call.program, call.row))

    async def _complete(self, call: InFlight, request: Any) -> dict[str, Any]:
        try:
            async with call.in_time(self._clock, is_stream=False):
                response = await call.endpoint.chat.complete(request)
            if call.recorder is not None:
                call.recorder.take(response)
            call.note_answer(response)
            call.outcome = CallState.FINISHED
        except Exception:
            call.outcome = CallState.FAILED
            raise
        finally:
            self.leave(call)  # before the caller sees the result, so that its next call reads the new service
        return {**response, "weft": call.report()}

    def _submit_stream(self, call: InFlight, request: Any, deliver: Callable[[Any], object]) -> Future[Any]:
        """Carry a stream over to the caller's thread. The last item is END_OF_STREAM or an exception."""

        async def pump() -> None:
            try:
                async with (
                    call.in_time(self._clock, is_stream=True),
                    aclosing(call.endpoint.chat.stream(request)) as chunks,
                ):
                    async for chunk in chunks:
                        if call.recorder is not None and not call.recorder.take(chunk):
                            continue
                        call.note_answer(chunk)
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
                deliver(error or END_OF_STREAM)

        future = self.submit_call(call, pump())
        future.add_done_callback(end)
        return future

    def _raise_if_ended(self, call: InFlight) -> None:
        error = call.ended_error(self._closed)
        if error is not None:
            raise error
