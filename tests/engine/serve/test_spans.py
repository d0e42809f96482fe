"""The spans of a real server, sent by OTLP over HTTP."""

from __future__ import annotations

import secrets

import pytest
from otlp import attributes
from served import Served

pytestmark = pytest.mark.engine

PARENT = "00f067aa0ba902b7"


def test_a_program_continues_its_clients_trace(served: Served) -> None:
    """The `traceparent` of its first request is the parent of the program, below which its calls are."""
    trace = secrets.token_hex(16)
    headers = {"weft-program-id": "traced", "weft-program-name": "tourist", "weft-session-id": "tour"}
    call = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}
    first = {**headers, "traceparent": f"00-{trace}-{PARENT}-01"}
    answer = served.client.post("/v1/chat/completions", json=call, headers=first)
    assert answer.status_code == 200, answer.text
    last = {**headers, "weft-program-end": "true"}
    assert served.client.post("/v1/chat/completions", json=call, headers=last).status_code == 200
    program = served.spans.until(lambda span: span.trace_id.hex() == trace and span.name == "invoke_workflow tourist")
    assert program.parent_span_id.hex() == PARENT
    calls = [span for span in served.spans.spans if span.parent_span_id == program.span_id]
    assert [span.name for span in calls] == ["chat tiny"] * 2
    assert attributes(calls[0])["gen_ai.usage.output_tokens"] == 5
    assert attributes(calls[0])["gen_ai.request.model"] == attributes(calls[0])["gen_ai.response.model"] == "tiny"
    assert attributes(calls[0])["gen_ai.request.max_tokens"] == 5
    assert attributes(calls[0])["gen_ai.response.id"] == answer.json()["id"]
    assert attributes(program)["gen_ai.conversation.id"] == "tour"
    assert float(attributes(program)["weft.service_s"]) > 0
