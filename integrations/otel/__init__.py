"""Programs from OpenTelemetry's spans, for frameworks that run agents in this process and report what they do as spans.

::

    provider.add_span_processor(WeftSpanProcessor())
    client = openai_client(engine)  # for any number of agents and programs
    with weft.Program("answer") as program, program.attach():
        await agent.run(question)

Spans below the block are runs of the program. The client takes program and position of a call from the current span.
"""

# ruff: noqa: E402
from weft.integrations import require_packages

require_packages("weft.integrations.otel", "openai", "httpx2", "opentelemetry-sdk")

from weft.integrations.otel.span_runs import WeftSpanProcessor, openai_client

__all__ = ["WeftSpanProcessor", "openai_client"]
