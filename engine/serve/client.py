"""The engine client of vLLM's application: vLLM's interface to an engine, over an `AsyncMultiLLMEngine`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, NoReturn

from weft.core.accounts import Attained
from weft.core.errors import (
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    ReplicaError,
    WeftError,
)
from weft.core.identity import Identity, Source
from weft.core.identity.lineage import Lineage
from weft.core.ids import CallId, IdSource, ProgramId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.timeline.keeper import Timelines
from weft.engine.frontend.calls import InFlight
from weft.engine.live import LiveReader
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.events import note_events
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.limits import CallsOfKeys
from weft.engine.serve.programs import OpenPrograms
from weft.engine.server.http_errors import error_status
from weft.engine.vllm_compat.names import EngineDeadError, RequestOutput, SamplingParams
from weft.engine.vllm_compat.server_names import EngineClient, GracefulHTTPError
from weft.engine.wire.calls import FIELDS, CallHeader, decode_call, encode_call
from weft.engine.wire.reports import attach_account, encode_account

REQUEST: Final = "weft_request"  # in `vllm_xargs`: the key of the HTTP request that a call belongs to
_OURS: Final = (*FIELDS, "session_id", "parent_program_id", REQUEST)


@dataclass(slots=True)
class ServedRequest:
    """An HTTP request that makes calls.

    Attributes:
        key: Who sent it.
        identity: Which program it belongs to.
        timeout_s: Seconds that a call of it may take; None: no limit.
        fingerprint: Of its system prompt and tools.
        traceparent: The header of the client's own span; "" if there is none.
        is_reserved: It was admitted as one call, and no call has taken the place yet.
        is_call: It is one call that no HTTP request is known of; its program ends with it.
        deadline_s: Seconds after which its program should have ended; None: whenever.
        failure: The error with which a call of it ended.
        call: The latest call of it.
    """

    key: ApiKey
    identity: Identity
    timeout_s: float | None
    fingerprint: Callable[[], str]
    traceparent: str = ""
    is_reserved: bool = True
    is_call: bool = False
    deadline_s: float | None = None
    failure: WeftError | None = None
    call: InFlight | None = None


class ServedEngine(EngineClient):
    """Runs the calls of vLLM's application as calls of programs. Use it on the engine's event loop.

    Args:
        engine: The engine.
        has_keys: Whether only clients with an API key are served.

    Raises:
        ReplicaError: The engine has several models.
    """

    def __init__(self, engine: AsyncMultiLLMEngine, *, has_keys: bool = False) -> None:
        if len(engine.models) > 1:
            raise ReplicaError(
                f"vLLM's application serves one model, and this engine has {', '.join(engine.models)}. Start a server "
                "for each model."
            )
        self.has_keys = has_keys
        self._calls_of_keys = CallsOfKeys()
        self.programs = OpenPrograms(engine.now_s)
        self.lineage = Lineage()
        self.live = LiveReader(engine)
        self.timelines = Timelines(engine.row, engine.now_s)
        engine.observe(self.timelines)
        self.call_timeout_s = engine.call_timeout_s
        self._engine = engine
        self._endpoint, self._llm = engine.served()
        self._requests: dict[str, ServedRequest] = {}
        self._is_stopping = False
        self.vllm_config = self._llm.vllm_config
        self.model_config = self._llm.model_config
        self.renderer = self._llm.renderer
        self.input_processor = self._llm.input_processor

    # -- requests

    def admit(self, key: str, request: ServedRequest) -> None:
        """Admit an HTTP request as one call; `end_request` follows.

        Args:
            key: Nobody else can guess it.
            request: The request.

        Raises:
            OverloadedError: There are too many calls, or too many of the key.
            EngineClosedError: The server stops.
        """
        if self._is_stopping:
            raise EngineClosedError
        self.programs.check_room(request.identity, request.key.max_programs)
        now_s = self._engine.now_s()
        self._calls_of_keys.enter(request.key, now_s)
        try:
            self._endpoint.admission.enter(now_s)
        except OverloadedError:
            self._calls_of_keys.leave(request.key, now_s)
            raise
        self._requests[key] = request

    def request(self, key: str) -> ServedRequest | None:
        """An HTTP request that was admitted and has not ended."""
        return self._requests.get(key)

    def end_request(self, key: str) -> None:
        """The request has its answer."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        if request.is_reserved:
            now_s = self._engine.now_s()
            self._endpoint.admission.leave(now_s)
            self._calls_of_keys.leave(request.key, now_s)
        if request.identity.ends:
            self.programs.end_after_calls(request.identity.program_id)

    def note(self, scope: str, message: Mapping[str, Any]) -> None:
        """Take what a client says of its programs between two calls; see `note_events`."""
        note_events(self._engine, self.programs, scope, message)

    def stop(self) -> None:
        """Abort the calls in flight, and take no more."""
        self._is_stopping = True
        self.programs.end_all()

    # -- calls

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, as a call of the program that the request names.

        Raises:
            GracefulHTTPError: The call failed; Weft's message and status.
        """
        arguments = sampling_params.extra_args or {}
        request = self._requests.get(str(arguments.get(REQUEST, "")))
        try:
            async with aclosing(self._run(request, prompt, sampling_params, request_id, kwargs)) as outputs:
                async for output in outputs:
                    yield output
        except WeftError as error:
            if request is not None:
                request.failure = error
            raise GracefulHTTPError(str(error), HTTPStatus(error_status(error))) from error

    async def _run(
        self,
        request: ServedRequest | None,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError(
                "this server takes a prompt in one piece; send the whole prompt with the request."
            )
        if self._is_stopping:
            raise EngineClosedError
        arguments = sampling_params.extra_args or {}
        if request is None:
            if self.has_keys:
                raise InvalidRequestError(
                    "this server has API keys, and cannot tell whose call this is: beam search and routes of their own "
                    "kind carry no identity. Send the request without beam search, to one of vLLM's usual routes."
                )
            identity = Identity(Source.NEW, ProgramId(f"-/{IdSource().program()}"), ends=True)
            request = ServedRequest(ApiKey("-"), identity, self.call_timeout_s, str, is_reserved=False, is_call=True)
        given = decode_call(arguments, request_id, kwargs.get("session_id"), is_trusted=request.key.is_trusted)
        run = object()
        with self._entered(request) as (program, is_admitted):
            call_ids = self._named(program, request.identity, given.identity, arguments, run)
            call, header = self._engine.enter_call(
                self._endpoint, program, call_ids, request.timeout_s, request.fingerprint, is_admitted=is_admitted
            )
            request.call = call
            header = replace(
                header, tool_ended=given.tool_ended, tool_started=given.tool_started, prefetch=given.prefetch
            )
            if request.key.is_trusted:
                header = _with_figures(header, given)
            params = copy.copy(sampling_params)
            others = {name: value for name, value in arguments.items() if name not in _OURS}
            params.extra_args = {**others, **encode_call(header)}
            kwargs["session_id"] = program.session_id
            async with aclosing(self._outputs(call, prompt, params, request_id, kwargs)) as outputs:
                async for output in outputs:
                    if output.finished:
                        program.end_call(run, call_ids)
                    yield output

    @contextmanager
    def _entered(self, request: ServedRequest) -> Iterator[tuple[Program, bool]]:
        """Count a call of a request. Gives its program, and whether the model's endpoint has admitted the call before.

        Raises:
            KeyLimitError: The request makes more calls than its key may.
        """
        is_admitted, request.is_reserved = request.is_reserved, False
        now_s = self._engine.now_s
        if not is_admitted:
            self._calls_of_keys.enter(request.key, now_s())
        try:
            try:
                program = self.programs.enter(
                    request.identity, request.key.max_programs, request.deadline_s, traceparent=request.traceparent
                )
            except WeftError:
                if is_admitted:
                    self._endpoint.admission.leave(now_s())
                raise
            try:
                yield program, is_admitted
            finally:
                self.programs.leave(program)
                if request.is_call:
                    self.programs.end_after_calls(program.program_id)
        finally:
            self._calls_of_keys.leave(request.key, now_s())

    @staticmethod
    def _named(
        program: Program, identity: Identity, given: CallIdentity, arguments: Mapping[str, Any], run: Hashable
    ) -> CallIdentity:
        """The ids of a call: those that a client of Weft's has inferred, or else inferred here."""
        if identity.source is Source.WEFT and "call_id" in arguments:
            scope = program.program_id.partition("/")[0]
            call_id, *parents = (CallId(f"{scope}/{each}") for each in (given.call_id, *given.parents))
            thread_id = identity.thread_id or given.thread_id
            if program.adopt_call(CallIdentity(program.program_id, thread_id, call_id, tuple(parents))):
                return CallIdentity(program.program_id, thread_id, call_id, tuple(parents))
        call_ids = program.start_call(run)
        if identity.thread_id is not None:
            call_ids = replace(call_ids, thread_id=identity.thread_id)
        return call_ids

    async def _outputs(
        self, call: InFlight, prompt: Any, params: SamplingParams, request_id: str, kwargs: dict[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a call, which runs in a task of its own so that its program and its deadline can end it."""
        items: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                async with (
                    call.in_time(self._engine.now_s, is_stream=True),
                    aclosing(self._llm.generate(prompt, params, request_id, **kwargs)) as outputs,
                ):
                    async for output in outputs:
                        if output.finished:
                            call.outcome = CallState.FINISHED
                            call.stopped = any(isinstance(each.stop_reason, str) for each in output.outputs)
                            account = encode_account(call.row.account)
                            output.kv_transfer_params = attach_account(output.kv_transfer_params, account)
                        items.put_nowait(output)
            except Exception:
                call.outcome = CallState.FAILED
                raise
            finally:
                self._llm.failures.pop(call.identity.call_id, None)  # it is raised here
                self._engine.leave(call)

        def end(future: Future[Any]) -> None:  # also of a call that was aborted before it began
            error = call.ended_error(self._is_stopping) if future.cancelled() else future.exception()
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(items.put_nowait, error)

        loop = asyncio.get_running_loop()
        future = self._engine.submit_call(call, pump())
        future.add_done_callback(end)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def encode(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        self._refuse()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Does nothing: a call ends when its generator is closed."""

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Does nothing: calls were admitted before they were rendered."""

    # -- state

    @property
    def is_running(self) -> bool:
        return self._engine.is_alive

    @property
    def is_stopped(self) -> bool:
        return not self._engine.is_alive

    @property
    def errored(self) -> bool:
        return False  # only replicas die; they are started again, and calls wait for them or go elsewhere

    @property
    def dead_error(self) -> BaseException:
        return EngineDeadError()

    async def check_health(self) -> None:
        """Check that each model has a replica that is ready.

        Raises:
            EngineDeadError: There is none.
        """
        if self._is_stopping or not self._engine.is_ready:
            raise EngineDeadError

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Does nothing: the replicas log their own figures."""

    async def notify_kv_transfer_request_rejected(self, *_arguments: Any, **_keywords: Any) -> None:
        """Does nothing: no KV waits for a request."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Does nothing: who started the engine ends it."""

    # -- vLLM's operations on one engine, which routes for development and training use

    def _refuse(self) -> NoReturn:
        raise GracefulHTTPError(
            "weft serve does not do this for its replicas; use vLLM's own server.", HTTPStatus.NOT_IMPLEMENTED
        )

    async def _refused(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        self._refuse()

    start_profile = stop_profile = reset_mm_cache = reset_encoder_cache = reset_prefix_cache = _refused
    sleep = wake_up = release_kv_cache_memory = pause_generation = resume_generation = add_lora = _refused


def _with_figures(header: CallHeader, given: CallHeader) -> CallHeader:
    """What the scheduler is told if the client is believed: it may know of service elsewhere, and of deadlines."""
    ours, theirs = header.attained, given.attained
    return replace(
        header,
        attained=Attained(
            service_s=max(ours.service_s, theirs.service_s),
            total_service_s=max(ours.total_service_s, theirs.total_service_s),
            wait_s=max(ours.wait_s, theirs.wait_s),
            total_wait_s=max(ours.total_wait_s, theirs.total_wait_s),
        ),
        program_calls=max(header.program_calls, given.program_calls),
        time_left_s=min(header.time_left_s, given.time_left_s),
        program_time_left_s=min(header.program_time_left_s, given.program_time_left_s),
    )
