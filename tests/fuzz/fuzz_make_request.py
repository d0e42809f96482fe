"""Any body that a caller passes makes a chat request or an `InvalidRequestError` with a short message."""

from __future__ import annotations

import json
from typing import Any

from values import ByteReader, key, value

from weft.core.errors import InvalidRequestError
from weft.engine.vllm.chat import ChatEndpoint
from weft.engine.vllm_compat.names import ChatCompletionRequest

WORDS = (*sorted(ChatCompletionRequest.model_fields), "user", "role", "content", "type", "function", "json_schema")
MESSAGES = [{"role": "user", "content": "hello"}]


def one_input(data: bytes) -> None:
    """Make a request of a body that the bytes describe: as JSON if they are JSON."""
    try:
        ChatEndpoint.make_request(_body(data))
    except InvalidRequestError as error:
        message = str(error)
    else:
        return
    assert len(message) < 2100


def _body(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    reader = ByteReader(data)
    fields: dict[str, Any] = {}
    while not reader.is_at_end:
        fields[key(reader, WORDS)] = value(reader, WORDS)
    return {"messages": MESSAGES, **fields} if data[:1] < b"\xc0" else fields


def _nested(name: str) -> bytes:
    return b"".join((bytes([WORDS.index(name)]), b"\x0d", b"\x08\x00", b"\xff"))


def seeds() -> list[bytes]:
    """Requests as agents send them, and those on which vLLM's validators fail with errors of their own."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": [tool], "tool_choice": "auto", "max_tokens": 8, "stream": True, "stop": ["a"]},
        {"response_format": schema, "vllm_xargs": {"program_id": "p"}, "session_id": "s", "top_logprobs": 2},
        *({"structured_outputs": wrong} for wrong in (5, "x", [1], {"json": 7})),
        *({name: "x" * 3000} for name in ("top_logprobs", "prompt_logprobs", "thinking_token_budget")),
    ]
    texts = [json.dumps({"messages": MESSAGES, **body}).encode() for body in bodies]
    return [*texts, *map(_nested, ("top_logprobs", "prompt_logprobs", "thinking_token_budget", "messages"))]
