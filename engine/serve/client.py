"""The engine client of vLLM's application: vLLM's interface to an engine, over an `AsyncMultiLLMEngine`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, NoReturn

from weft.core.errors import EngineClosedError, InvalidRequestError, WeftError
from weft.core.identity import Identity, Source
from weft.core.identity.lineage import Lineage
from weft.core.ids import IdSource
from weft.core.program.graph import CallState
from weft.engine.frontend.calls import InFlight
from weft.engine.live import LiveReader
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.programs import OpenPrograms
from weft.engine.server.http_errors import error_status
from weft.engine.vllm_compat.names import EngineDeadError, RequestOutput, SamplingParams
from weft.engine.vllm_compat.server_names import EngineClient, GracefulHTTPError
from weft.engine.wire.calls import FIELDS, decode_call, encode_call
from weft.engine.wire.reports import attach_account, encode_account

REQUEST: Final = "weft_request"  # in `vllm_xargs`: the key of the HTTP request that a call belongs to
_OURS: Final = (*FIELDS, "session_id", REQUEST)


@dataclass(slots=True)
class ServedRequest:
    """An HTTP request that makes calls.

    Attributes:
        identity: Which program it belongs to.
        timeout_s: Seconds that a call of it may take; None: no limit.
        fingerprint: Of its system prompt and tools.
        is_reserved: It was admitted as one call, and no call has taken the place yet.
        failure: The error with which a call of it ended.
    """

    identity: Identity
    timeout_s: float | None
    fingerprint: Callable[[], str]
    is_reserved: bool = True
    failure: WeftError | None = None


class ServedEngine(EngineClient):
    """Runs the calls of vLLM's application as calls of programs. Use it on the engine's event loop.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: AsyncMultiLLMEngine) -> None:
        self.programs = OpenPrograms(engine.now_s)
        self.lineage = Lineage()
        self.live = LiveReader(engine)
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
            OverloadedError: There are too many calls.
            EngineClosedError: The server stops.
        """
        if self._is_stopping:
            raise EngineClosedError
        self._endpoint.admission.enter(self._engine.now_s())
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
            self._endpoint.admission.leave(self._engine.now_s())
        if request.identity.ends:
            self.programs.end_after_calls(request.identity.program_id)

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
        given = decode_call(arguments, request_id, kwargs.get("session_id"), is_trusted=False)
        is_unknown = request is None
        if request is None:  # of a route that is not admitted as one call, such as vLLM's /invocations
            identity = Identity(Source.NEW, IdSource().program(), ends=True)
            request = ServedRequest(identity, self.call_timeout_s, str, is_reserved=False)
        program = self.programs.enter(request.identity)
        run = object()
        try:
            call_ids = program.start_call(run)
            if request.identity.thread_id is not None:
                call_ids = replace(call_ids, thread_id=request.identity.thread_id)
            is_admitted, request.is_reserved = request.is_reserved, False
            call, header = self._engine.enter_call(
                self._endpoint, program, call_ids, request.timeout_s, request.fingerprint, is_admitted=is_admitted
            )
            header = replace(
                header, tool_ended=given.tool_ended, tool_started=given.tool_started, prefetch=given.prefetch
            )
            params = copy.copy(sampling_params)
            others = {name: value for name, value in arguments.items() if name not in _OURS}
            params.extra_args = {**others, **encode_call(header)}
            kwargs["session_id"] = program.session_id
            async with aclosing(self._outputs(call, prompt, params, request_id, kwargs)) as outputs:
                async for output in outputs:
                    if output.finished:
                        program.end_call(run, call_ids)
                    yield output
        finally:
            self.programs.leave(program)
            if is_unknown:
                self.programs.end_after_calls(program.program_id)

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
