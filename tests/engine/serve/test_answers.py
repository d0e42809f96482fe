"""What the server reads of its own answers: the same from a stream as from a whole response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.core.identity.items import items_of_answer
from weft.engine.serve.answers import AnswerReader

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "Nile"}'}}
ITEMS: Any = [("message", "assistant", "", "text", "I look."), ("call", "c1", "search", '{"q":"Nile"}')]


def delta(index: int = 0, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": index, "delta": fields, "finish_reason": finish_reason}]}


CHAT = [
    delta(role="assistant", content=""),
    delta(content="I "),
    delta(content="look."),
    delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "search", "arguments": ""}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '{"q": '}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": '"Nile"}'}}], finish_reason="tool_calls"),
]
ANTHROPIC = [
    {"type": "message_start", "message": {"id": "m"}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "tool_use", "id": "c1", "name": "search", "input": {}},
    },
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"q":"Ni'}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": 'le"}'}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
OUTPUT: Any = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"q": "Nile"}'},
]
RESPONSES = [
    {"type": "response.created", "response": {"id": "r", "output": []}},
    {"type": "response.output_text.delta", "delta": "I look."},
    {"type": "response.completed", "response": {"id": "r", "output": OUTPUT}},
]


@pytest.mark.parametrize("events", [CHAT, ANTHROPIC, RESPONSES], ids=["chat", "anthropic", "responses"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_read_as_its_whole(events: list[dict[str, Any]], size: int) -> None:
    """Wherever the bytes are cut, the answer is there with the event that ends it, and once."""
    data = b"".join(b"event: e\ndata: " + json.dumps(event).encode() + b"\n\n" for event in events)
    data += b"data: [DONE]\n\n"
    reader = AnswerReader(is_stream=True)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    found = [answer for piece in pieces for answer in reader.take(piece, is_last=False)]
    assert [items_of_answer(answer) for answer, _is_part in found] == [[ITEMS]]


@pytest.mark.parametrize(
    "events",
    [
        [*ANTHROPIC[:-2], {"type": "content_block_stop", "index": 1}],
        [*RESPONSES[:-1], {"type": "response.output_item.done", "item": OUTPUT[1]}],
    ],
    ids=["anthropic", "responses"],
)
def test_a_tool_call_is_there_before_the_rest_of_its_answer(events: list[dict[str, Any]]) -> None:
    """Claude Code makes it at once, and the model goes on with the next one. It is a part of the answer."""
    reader = AnswerReader(is_stream=True)
    *before, last = (b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    assert [answer for piece in before for answer in reader.take(piece, is_last=False)] == []
    ((part, is_part),) = reader.take(last, is_last=False)
    assert is_part
    assert items_of_answer(part) == [ITEMS[1:]]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["as vLLM writes", "with spaces"])
def test_an_answer_is_there_before_its_last_event_goes_on(separators: tuple[str, str]) -> None:
    """A client that goes on at once finds its program. Events are read together, also those of a long answer."""
    reader = AnswerReader(is_stream=True)
    words = [f"word{number} " for number in range(2000)]
    for word in words:
        event = json.dumps(delta(0, content=word), separators=separators)
        assert reader.take(f"data: {event}\n\n".encode(), is_last=False) == []
    end = json.dumps(delta(0, "stop", content="."), separators=separators)
    ((answer, _is_part),) = reader.take(f"data: {end}\n\n".encode(), is_last=False)
    assert answer["choices"][0]["message"]["content"] == "".join(words) + "."


@pytest.mark.parametrize(
    "events",
    [
        [delta(0, content="I "), delta(0, content="look")],
        [
            {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "I look"}},
        ],
        [{"type": "response.output_text.delta", "delta": "I look"}],
    ],
    ids=["chat", "anthropic", "responses"],
)
def test_a_stream_that_was_left_is_read_as_far_as_it_came(events: list[dict[str, Any]]) -> None:
    """Its client may go on with what it has got of the answer."""
    reader = AnswerReader(is_stream=True)
    for event in events:
        assert reader.take(b"data: " + json.dumps(event).encode() + b"\n\n", is_last=False) == []
    (answer,) = [answer for body, _is_part in reader.left() for answer in items_of_answer(body) if answer]
    assert answer == [("message", "assistant", "", "text", "I look")]


def test_a_whole_response_is_read_with_its_last_piece() -> None:
    """A response without a stream may come in pieces, too."""
    body = json.dumps({"choices": [{"message": {"content": "I look.", "tool_calls": [CALL]}}]}).encode()
    reader = AnswerReader(is_stream=False)
    assert reader.take(body[:5], is_last=False) == []
    ((answer, is_part),) = reader.take(body[5:], is_last=True)
    assert not is_part
    assert items_of_answer(answer) == [ITEMS]


def test_each_choice_of_a_stream_ends_by_itself() -> None:
    """With n=2 the parts of both answers alternate."""
    events = [delta(0, content="a"), delta(1, content="b"), delta(1, "stop"), delta(0, "stop", content="c")]
    reader = AnswerReader(is_stream=True)
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    texts = [items_of_answer(answer)[0][0][-1] for answer, _is_part in reader.take(data, is_last=True)]
    assert texts == ["b", "ac"]


@pytest.mark.parametrize("data", [b"", b"data: {\n\n", b"data: [1]\n\n", b'data: {"choices": []}\n\n', b"\xff\n\n"])
def test_other_events_are_passed_over(data: bytes) -> None:
    """Errors, comments and usage hold no answer."""
    assert AnswerReader(is_stream=True).take(data, is_last=True) == []
