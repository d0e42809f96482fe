"""Spans of a server's programs, sent where vLLM's option `--otlp-traces-endpoint` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.engine.telemetry.spans import ProgramSpans, TracedEngine


@contextmanager
def spans_sent_to(endpoint: str | None, engine: TracedEngine) -> Iterator[None]:
    """Send the spans of an engine's programs, and at the end those that have not been sent yet.

    The variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL names the protocol, as for vLLM's own server. OpenTelemetry's global
    tracer provider is left as it is.

    Args:
        endpoint: Of OTLP; None: there are no spans.
        engine: The engine.
    """
    if endpoint is None:
        yield
        return
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from weft.engine.vllm_compat.server_names import get_span_exporter

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(get_span_exporter(endpoint)))
    ProgramSpans(engine, provider)
    try:
        yield
    finally:
        provider.shutdown()
