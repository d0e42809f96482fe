"""The engine client of vLLM's application: vLLM's interface to an engine, over an `AsyncMultiLLMEngine`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

from weft.core.errors import EngineClosedError, InvalidRequestError, KeyLimitError, ReplicaError, WeftError
from weft.core.identity.families import Families
from weft.core.identity.lineage import Lineage
from weft.core.log import get_logger
from weft.core.routing.admission import Refused, refused_by
from weft.core.show.keeper import Timelines
from weft.engine.http.http_errors import error_code, error_status
from weft.engine.http.identity import without_scope
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.programs import OpenPrograms, note_events
from weft.engine.serve.requests import ServedRequest, ServedRequests, SharedLineage
from weft.engine.serve.served_calls import REQUEST, ServedCalls
from weft.engine.vllm.chat import call_failed, said
from weft.engine.vllm_compat.names import (
    EngineDeadError,
    EngineGenerateError,
    GenerationError,
    RequestOutput,
    SamplingParams,
)
from weft.engine.vllm_compat.server_names import EngineClient, GracefulHTTPError
from weft.engine.watch import LiveReader


class ServedEngine(EngineClient):
    """Runs the calls of vLLM's application as calls of programs. Use it on the engine's event loop. With `has_keys`,
    only clients with an API key are served. An engine with several models raises ReplicaError."""

    def __init__(self, engine: AsyncMultiLLMEngine, *, has_keys: bool = False) -> None:
        if len(engine.models) > 1:
            raise ReplicaError(
                f"vLLM's application serves one model, and this engine has {', '.join(engine.models)}. Start a server "
                "for each model."
            )
        self.has_keys = has_keys
        self.programs = OpenPrograms(engine.now_s)
        self.lineage = SharedLineage(Lineage(is_open=self.programs.__contains__))
        self.families = Families()
        self.live = LiveReader(engine)
        self.timelines = Timelines(engine.row, engine.now_s)
        engine.observe(self.timelines)
        self.call_timeout_s = engine.call_timeout_s
        self._engine = engine
        self._log = get_logger()
        endpoint, llm = engine.served()
        self.requests = ServedRequests(self.programs, endpoint.admission, engine.now_s)
        self._calls = ServedCalls(engine, self.programs, self.requests, has_keys=has_keys)
        self.vllm_config = llm.vllm_config
        self.model_config = llm.model_config
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor

    # -- requests

    def admit(self, key: str, request: ServedRequest) -> None:
        """Admit an HTTP request as `requests.admit` does, unless the server stops (EngineClosedError)."""
        if self._calls.is_stopping:
            raise EngineClosedError
        self.requests.admit(key, request)

    def refused(self, reason: Refused, key: ApiKey | None) -> None:
        """Note that a request was refused. `key` is None if the request has no API key of this server."""
        self._engine.request_refused(reason, key.tenant if key is not None else None)

    def note(self, scope: str, message: Mapping[str, Any]) -> None:
        """Take what a client says of its programs between two calls; see `note_events`."""
        note_events(self._engine, self.programs, scope, message)

    def stop(self) -> None:
        """Abort the calls in flight, and take no more."""
        self._calls.is_stopping = True
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
        request = self.requests.get(str(arguments.get(REQUEST, "")))
        try:
            async with aclosing(self._calls.run(request, prompt, sampling_params, request_id, kwargs)) as outputs:
                async for output in outputs:
                    yield output
        except (WeftError, EngineGenerateError, GenerationError) as found:
            error = _typed(found)
            if request is not None:
                request.failure = error
                if isinstance(error, KeyLimitError):  # other calls of the request were within the limit
                    self.refused(refused_by(error), request.key)
            message = str(error) if request is None else without_scope(str(error), request.key.scope)
            self._log.info("call failed", code=error_code(error), reason=str(error))
            raise GracefulHTTPError(message, HTTPStatus(error_status(error))) from error

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
        """Raise EngineDeadError unless each model has a replica that is ready, and the server does not stop."""
        if self._calls.is_stopping or not self._engine.is_ready:
            raise EngineDeadError

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_paused(self) -> bool:
        return False

    is_tracing_enabled = is_sleeping = is_paused

    async def do_log_stats(self, *_arguments: Any, **_keywords: Any) -> None:
        """Does nothing: the replicas log their own figures, and no KV waits for a request."""

    notify_kv_transfer_request_rejected = do_log_stats

    def shutdown(self, timeout: float | None = None) -> None:
        """Does nothing: who started the engine ends it."""

    # -- vLLM's operations on one engine, which routes for development and training use

    def _refuse(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        raise GracefulHTTPError(
            "weft serve does not do this for its replicas; use vLLM's own server.", HTTPStatus.NOT_IMPLEMENTED
        )

    async def _refused(self, *_arguments: Any, **_keywords: Any) -> NoReturn:
        self._refuse()

    encode = _refuse
    start_profile = stop_profile = reset_mm_cache = reset_encoder_cache = reset_prefix_cache = _refused
    sleep = wake_up = release_kv_cache_memory = pause_generation = resume_generation = add_lora = _refused


def _typed(error: Exception) -> WeftError:
    """vLLM's error of one call. It hides its cause, which is often a value of the client's that cannot be sent on."""
    if isinstance(error, WeftError):
        return error
    cause = error.__cause__
    if isinstance(cause, TypeError | ValueError | OverflowError):
        return InvalidRequestError(f"the engine refused the request: {said(cause)}")
    return call_failed(cause if isinstance(cause, Exception) else error)
