"""Runs the calls of vLLM's application as calls of programs."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Final

from weft.core.accounts import Attained
from weft.core.errors import EngineClosedError, InvalidRequestError, WeftError
from weft.core.identity import Identity, Source
from weft.core.ids import CallId, IdSource, ProgramId, ThreadId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.core.program.structure.named_threads import NamedThreads
from weft.engine.host.call_path import CallStream
from weft.engine.host.in_flight import InFlight
from weft.engine.multi import AsyncMultiLLMEngine
from weft.engine.serve.keys import ApiKey
from weft.engine.serve.programs import OpenPrograms
from weft.engine.serve.requests import ServedRequest, ServedRequests
from weft.engine.vllm_compat.names import RequestOutput, SamplingParams
from weft.engine.wire.call_header import FIELDS, SHOWN, CallHeader, decode_call, encode_call, refuse_priority
from weft.engine.wire.values import strings

REQUEST: Final = "weft_request"  # in `vllm_xargs`: the key of the HTTP request that a call belongs to
_OURS: Final = (*FIELDS, *SHOWN, "session_id", "parent_program_id", REQUEST)


class ServedCalls:
    """Runs calls of HTTP requests as calls of programs. Use it on the engine's event loop. With `has_keys`, only
    clients with an API key are served. Calls are refused while `is_stopping`, because the server stops."""

    def __init__(
        self, engine: AsyncMultiLLMEngine, programs: OpenPrograms, requests: ServedRequests, *, has_keys: bool
    ) -> None:
        self.is_stopping = False
        self._engine = engine
        self._endpoint, self._llm = engine.served()
        self._programs = programs
        self._requests = requests
        self._has_keys = has_keys

    async def run(
        self,
        request: ServedRequest | None,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a call, with the arguments of `AsyncLLM.generate`. `request` makes it; None: it belongs to no request
        that was admitted."""
        if not isinstance(prompt, Mapping):
            raise InvalidRequestError(
                "this server takes a prompt in one piece; send the whole prompt with the request."
            )
        if self.is_stopping:
            raise EngineClosedError
        refuse_priority(kwargs.get("priority"))
        arguments = sampling_params.extra_args or {}
        if request is None:
            if self._has_keys:
                raise InvalidRequestError(
                    "this server has API keys, and cannot tell whose call this is: beam search and routes of their own "
                    "kind carry no identity. Send the request without beam search, to one of vLLM's usual routes."
                )
            identity = Identity(Source.NEW, ProgramId(f"-/{IdSource().program()}"), ends=True)
            timeout_s = self._engine.call_timeout_s
            request = ServedRequest(ApiKey("-"), identity, timeout_s, str, is_reserved=False, is_call=True)
        given = decode_call(arguments, request_id, kwargs.get("session_id"), is_trusted=request.key.is_trusted)
        with (
            self._entered(request) as (program, is_admitted),
            _named(program, request.identity, given.identity, arguments) as (call_ids, ended),
        ):
            call, header = self._engine.call_path.enter_call(
                self._endpoint,
                program,
                call_ids,
                request.timeout_s,
                request.fingerprint,
                settings=request.settings,
                is_admitted=is_admitted,
            )
            call.row.answer.answer_id = _answer_id(request_id)
            call.row.answer.model = self._endpoint.model
            request.call = call
            self._programs.asked(call_ids, request.identity.opening, ended)
            if given.tool_ended or given.tool_started or given.prefetch:
                header = replace(
                    header, tool_ended=given.tool_ended, tool_started=given.tool_started, prefetch=given.prefetch
                )
            if request.key.is_trusted:
                header = _with_figures(header, given)
            params = copy.copy(sampling_params)
            others = {name: value for name, value in arguments.items() if name not in _OURS}
            params.extra_args = {**others, **encode_call(header)}
            kwargs |= {"session_id": program.session_id, "for_chat": False}
            opened = CallStream(call, self._llm.generate(prompt, params, request_id, **kwargs), _taker(call))
            async with aclosing(self._engine.call_path.stream(lambda: opened, lambda: self.is_stopping)) as outputs:
                async for output in outputs:
                    if output.finished:
                        program.reports.end_call(call_ids.call_id, call_ids)
                    yield output

    @contextmanager
    def _entered(self, request: ServedRequest) -> Iterator[tuple[Program, bool]]:
        """Count a call of a request, or raise KeyLimitError. Gives its program, and whether the model's endpoint has
        admitted the call before."""
        is_admitted, request.is_reserved = request.is_reserved, False
        if not is_admitted:
            self._requests.admit_call(request)
        try:
            try:
                program = self._programs.enter(
                    request.identity, request.key.max_programs, request.deadline_s, traceparent=request.traceparent
                )
            except WeftError:
                if is_admitted:
                    self._endpoint.admission.leave(self._engine.now_s())
                raise
            try:
                yield program, is_admitted
            finally:
                self._programs.leave(program)
                if request.is_call:
                    self._programs.end_after_calls(program.program_id)
        finally:
            self._requests.uncount_call(request.key)


def _taker(call: InFlight) -> Callable[[RequestOutput], bool]:
    """What notes vLLM's outputs in their call. The server's client may leave as soon as it has the last one."""

    def take(output: RequestOutput) -> bool:
        for each in output.outputs:
            if each.finish_reason is not None:
                call.row.answer.finish_reasons[each.index] = each.finish_reason
            if each.index == 0:  # as elsewhere, one answer a call is recorded
                call.note_tokens(output.prompt_token_ids or (), each.token_ids)
        if output.finished:
            call.outcome = CallState.FINISHED
            call.stopped = any(isinstance(each.stop_reason, str) for each in output.outputs)
        return True

    return take


@contextmanager
def _named(
    program: Program, identity: Identity, given: CallIdentity, arguments: Mapping[str, Any]
) -> Iterator[tuple[CallIdentity, list[ThreadId]]]:
    """The ids of a call, while it is there, as a client of Weft's or we have inferred them, and what threads end."""
    if identity.source is Source.WEFT and "call_id" in arguments:
        scope = program.program_id.partition("/")[0]
        call_id, *parents = (CallId(f"{scope}/{each}") for each in (given.call_id, *given.parents))
        call_ids = CallIdentity(program.program_id, identity.thread_id or given.thread_id, call_id, tuple(parents))
        tools = tuple(strings(arguments.get("tools")))  # which `check_shown` has seen
        if program.reports.adopt_call(call_ids, label=identity.label or "", tools=tools):
            yield call_ids, []
            return
    threads: NamedThreads = program.reports.framework_state("threads", NamedThreads)
    call_ids, ended = threads.start_call(
        program.reports, identity.thread_id, identity.parent_thread_id, label=identity.label, agent=identity.agent
    )
    try:
        yield call_ids, ended
    finally:
        threads.leave(call_ids)


def _answer_id(request_id: str) -> str:
    """The id that the client reads. vLLM numbers the calls of a completion, whose prompts may be several, and those of
    a response."""
    separator = {"cmpl-": "-", "resp_": "_"}.get(request_id[:5])
    return request_id.rpartition(separator)[0] if separator is not None else request_id


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
