"""Spans for OpenTelemetry, by its conventions for generative AI: programs, calls and tools.

Parents are passed explicitly, as OpenTelemetry allows: the context that it keeps for the caller's code is not read, and
not changed. No text of a prompt or an answer is recorded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TracerProvider,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from weft.core.accounts import Account
from weft.core.errors import WeftError
from weft.core.ids import CallId, ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import Answer, CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.process_table import KEEP_TOOLS
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.engine.watch.reader import WatchedEngine

_OPERATION: Final = "gen_ai.operation.name"
_PROVIDER: Final = {"gen_ai.provider.name": "vllm"}
_KEEP_CONTEXTS: Final = 1000  # of outer programs that have no span any more
_TRACE_HEADERS: Final = ("traceparent", "tracestate")


@dataclass(slots=True)
class _Open:
    """A program with a span."""

    span: Span
    info: ProgramInfo | None = None  # None: it was only named by a program inside it
    inner: int = 0  # programs inside it that have not ended
    calls: dict[CallId, Span] = field(default_factory=dict)
    tools: dict[int, Span] = field(default_factory=dict)  # by the number of the run, the oldest first
    has_ended: bool = False  # with calls in flight

    @property
    def context(self) -> Context:
        return set_span_in_context(self.span, Context())


class ProgramSpans(ProgramObserver):
    """Makes spans of an engine's programs from now on::

        weft.ProgramSpans(engine, tracer_provider)

    A program is a span `invoke_workflow NAME`. Below it are its calls, `chat MODEL`, its tools, `execute_tool NAME`,
    and the programs inside it. A program's span ends with the program, and only open spans are kept. The parent of a
    program's span is the W3C `traceparent` in the program's metadata, if there is one.

    Args:
        engine: The engine.
        tracer_provider: Gets the spans. By default it is OpenTelemetry's global one.
    """

    def __init__(self, engine: WatchedEngine, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = (tracer_provider or get_tracer_provider()).get_tracer("weft")
        self._table = engine.table
        self._server = _server_attributes(getattr(engine, "server_url", None))  # of `weft.connect`
        self._lock = fork_safe(threading.Lock())
        self._open: dict[ProgramId, _Open] = {}
        self._ended: OrderedDict[ProgramId, SpanContext] = OrderedDict()  # of outer programs that never made a call
        engine.observe(self)

    # -- programs

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        with self._lock:
            program = self._open.get(info.program_id)
            if program is None:
                span = self._start_program(info, info.program_id, self._parent(info))
                program = self._open[info.program_id] = _Open(span)
            program.info = info
            program.span.update_name(f"invoke_workflow {info.name}")
            program.span.set_attributes(_program_attributes(info))

    def _parent(self, info: ProgramInfo) -> Context:
        """The context in which a program's span begins: the outer program's, else that of its metadata."""
        outer_id = info.parent_program_id
        if outer_id is None:
            carrier = {name: str(info.metadata[name]) for name in _TRACE_HEADERS if name in info.metadata}
            return TraceContextTextMapPropagator().extract(carrier, context=Context())
        if outer_id in self._ended:
            return set_span_in_context(NonRecordingSpan(self._ended[outer_id]), Context())
        outer = self._open.get(outer_id)
        if outer is None:  # it has made no call yet
            outer = self._open[outer_id] = _Open(self._start_program(info, outer_id, Context()))
        outer.inner += 1
        return outer.context

    def _start_program(self, info: ProgramInfo, program_id: ProgramId, context: Context) -> Span:
        attributes = {_OPERATION: "invoke_workflow", "weft.program.id": info.shown(program_id)}
        return self._tracer.start_span("invoke_workflow", context, SpanKind.INTERNAL, attributes)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        with self._lock:
            program = self._open.pop(row.info.program_id, None)
            if program is None:  # it began before the spans
                return
            for span in program.tools.values():
                span.end()
            if program.calls:  # they are being aborted, and their spans end when they leave
                program.has_ended = True
                self._open[row.info.program_id] = program
            span = program.span
            span.set_attributes(
                {
                    "weft.outcome": str(state),
                    "weft.calls": row.calls,
                    "weft.threads": row.thread_count,
                    "weft.interception_s": row.interception_s,
                    **_account_attributes(row.account),
                }
            )
            if state is ProgramState.FAILED:
                _fail(span, "_OTHER")
            span.end()
            self._leave_outer(row.info.parent_program_id)

    def _leave_outer(self, outer_id: ProgramId | None) -> None:
        outer = self._open.get(outer_id) if outer_id is not None else None
        if outer is None or outer_id is None:
            return
        outer.inner -= 1
        if outer.info is None and outer.inner <= 0:  # nobody would tell its end
            outer.span.end()
            del self._open[outer_id]
            self._ended[outer_id] = outer.span.get_span_context()
            if len(self._ended) > _KEEP_CONTEXTS:
                self._ended.popitem(last=False)

    # -- calls

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        row = self._table.get(identity.program_id)
        call = row.in_flight.get(identity.call_id) if row is not None else None
        label = graph[identity.call_id].label if identity.call_id in graph else ""
        with self._lock:
            program = self._open.get(identity.program_id)
            if program is not None:
                model, settings = (call.model, call.settings) if call is not None else ("", {})
                program.calls[identity.call_id] = span = self._start_call(program, identity, model, label)
                span.set_attributes({f"gen_ai.request.{name}": value for name, value in settings.items()})

    def _start_call(self, program: _Open, identity: CallIdentity, model: str, label: str = "") -> Span:
        shown = program.info.shown if program.info is not None else str
        attributes: dict[str, AttributeValue] = {
            **_ids(program.info),
            **self._server,
            _OPERATION: "chat",
            "weft.thread.id": shown(identity.thread_id),
            "weft.call.id": shown(identity.call_id),
            "weft.call.parents": tuple(map(shown, identity.parents)),
        }
        if label:
            attributes["gen_ai.agent.name"] = label
        if model:
            attributes["gen_ai.request.model"] = model
        return self._tracer.start_span(f"chat {model}".strip(), program.context, SpanKind.CLIENT, attributes)

    def call_refused(self, identity: CallIdentity, error: BaseException, now_s: float) -> None:
        with self._lock:
            program = self._open.get(identity.program_id)
            if program is not None:
                span = self._start_call(program, identity, "")
                _fail(span, type(error).__name__ if isinstance(error, WeftError) else "_OTHER")
                span.end()

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        with self._lock:
            program = self._open.get(row.identity.program_id)
            span = program.calls.pop(row.identity.call_id, None) if program is not None else None
            if program is None or span is None:
                return
            span.set_attributes(
                {"weft.outcome": str(outcome), **_account_attributes(row.account), **_answer_attributes(row.answer)}
            )
            if row.engine_id is not None:
                span.set_attribute("weft.replica", row.engine_id)
            if row.earlier_engine_ids:
                span.set_attribute("weft.earlier_replicas", row.earlier_engine_ids)
            if outcome is CallState.FAILED:
                _fail(span, "_OTHER")
            span.end()
            if program.has_ended and not program.calls:
                del self._open[row.identity.program_id]

    # -- tools

    def tool_started(self, program_id: ProgramId, tool: RunningTool) -> None:
        with self._lock:
            program = self._open.get(program_id)
            if program is None:
                return
            attributes = {**_ids(program.info), _OPERATION: "execute_tool", "gen_ai.tool.name": tool.name}
            program.tools[tool.number] = self._tracer.start_span(
                f"execute_tool {tool.name}", program.context, SpanKind.INTERNAL, attributes
            )
            if len(program.tools) > KEEP_TOOLS:  # the table has forgotten the oldest
                program.tools.pop(next(iter(program.tools))).end()

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        with self._lock:
            program = self._open.get(program_id)
            span = program.tools.pop(tool.number, None) if program is not None else None
            if span is not None:
                span.end()


def _ids(info: ProgramInfo | None) -> dict[str, AttributeValue]:
    """What every span of a program has. A session is what OpenTelemetry calls a conversation: it spans programs."""
    if info is None:
        return dict(_PROVIDER)
    ids: dict[str, AttributeValue] = {
        **_PROVIDER,
        "gen_ai.conversation.id": info.shown(info.session_id),
        "weft.program.id": info.shown(info.program_id),
        "weft.program.name": info.name,
    }
    return ids


def _server_attributes(url: str | None) -> dict[str, AttributeValue]:
    if url is None:
        return {}
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}


def _program_attributes(info: ProgramInfo) -> Mapping[str, AttributeValue]:
    # The conventions named a workflow by an attribute of its own up to version 1.41.
    attributes = {**_ids(info), "gen_ai.agent.name": info.name, "gen_ai.workflow.name": info.name}
    if info.tenant is not None:
        attributes["weft.tenant"] = info.tenant
    if info.tags:
        attributes["weft.tags"] = info.tags
    return attributes


def _account_attributes(account: Account) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.input_tokens": account.prompt_tokens,
        "gen_ai.usage.output_tokens": account.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.cached_tokens,
        "weft.service_s": account.service_s,
        "weft.wait_s": account.wait_s,
        "weft.preemptions": account.preemptions,
        "weft.kv.fetched_tokens": account.fetched_tokens,
        "weft.kv.recomputed_tokens": account.recomputed_tokens,
        "weft.kv.swapped_tokens": account.swapped_tokens,
    }


def _answer_attributes(answer: Answer) -> dict[str, AttributeValue]:
    reasons = answer.finish_reasons
    found: dict[str, AttributeValue] = {
        "gen_ai.response.id": answer.answer_id,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.finish_reasons": tuple(reasons[number] for number in sorted(reasons)),
    }
    return {name: value for name, value in found.items() if value}


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)
