"""The spans of OpenAI's Agents SDK, which are not OpenTelemetry's."""

# ruff: noqa: E402
from __future__ import annotations

from weft.integrations import require_packages

require_packages("weft.integrations.otel.agents_sdk", "openai-agents")

from typing import Any, Final

from agents.tracing import Span, Trace, TracingProcessor, get_current_span

from weft.integrations.otel.span_runs import SpanRun, attached, current_spans, find

__all__ = ["WeftTracingProcessor"]

# What the convention of OpenTelemetry calls the SDK's types of spans.
_OPERATIONS: Final = {
    "agent": "invoke_agent",
    "turn": "invoke_agent",
    "function": "execute_tool",
    "generation": "chat",
    "response": "chat",
}


class WeftTracingProcessor(TracingProcessor):
    """Makes the SDK's spans runs of the program of the `Program.attach` block around them.

    Pass it to `agents.add_trace_processor`, or to `set_trace_processors`, which then sends no spans to OpenAI.
    `openai_client` of `weft.integrations.otel` then takes the position of a call from the SDK's current span.
    """

    def on_span_start(self, span: Span[Any]) -> None:
        around = find(span.trace_id, span.parent_id) if span.parent_id is not None else attached()
        if around is not None:
            data = span.span_data
            name = getattr(data, "name", None) or getattr(data, "agent_name", "")
            operation = _OPERATIONS.get(data.type, data.type)
            SpanRun(around.program, (span.trace_id, span.span_id), around, f"{operation} {name}")

    def on_span_end(self, span: Span[Any]) -> None:
        run = find(span.trace_id, span.span_id)
        if run is not None:
            run.end()

    def on_trace_start(self, trace: Trace) -> None:
        """A trace has no run of its own."""

    def on_trace_end(self, trace: Trace) -> None:
        """Its spans have ended."""

    def shutdown(self) -> None:
        """Nothing is buffered."""

    def force_flush(self) -> None:
        """Nothing is buffered."""


def _current_span() -> tuple[str, str]:
    span = get_current_span()
    return (span.trace_id, span.span_id) if span is not None else ("", "")


current_spans.insert(0, _current_span)
