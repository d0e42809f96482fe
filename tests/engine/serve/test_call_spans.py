"""What the span of a call says that came over HTTP."""

from __future__ import annotations

import pytest
from doors import BODY, Doors
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weft import ProgramSpans
from weft.engine.serve.served_calls import _answer_id


def test_the_span_of_a_call_has_its_request_and_its_answer() -> None:
    """What the client asked for, by its own request; and which answer it got, and why that ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with Doors() as doors:
        ProgramSpans(doors.engine, provider)
        body = {**BODY, "temperature": 0.5, "max_tokens": 7, "seed": 3, "stop": ["secret"]}
        answer = doors.chat({"weft-program-id": "p", "weft-program-end": "true"}, body)
        assert answer.status_code == 200, answer.text
    (call,) = [dict(span.attributes or {}) for span in exporter.get_finished_spans() if span.name == "chat scripted"]
    found = {name: value for name, value in call.items() if name.startswith(("gen_ai.request", "gen_ai.response"))}
    assert found == {
        "gen_ai.request.model": "scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
    }


@pytest.mark.parametrize(
    ("request_id", "answer_id"),
    [
        ("chatcmpl-ab-1_0", "chatcmpl-ab-1_0"),
        ("cmpl-ab-1-0", "cmpl-ab-1"),
        ("resp_ab_0", "resp_ab"),
        ("generate-tokens-1", "generate-tokens-1"),
    ],
)
def test_an_answers_id_is_what_its_client_reads(request_id: str, answer_id: str) -> None:
    """vLLM numbers the calls of some requests, and answers with the id of the request."""
    assert _answer_id(request_id) == answer_id
