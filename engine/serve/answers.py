"""The account of a call in its answer: the member `"weft"`, in whole answers and in streams."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_ENDS: Final = b'"finish_reason":"'  # in a string the quotation marks would be escaped
_EVENT: Final = b"data: {"
_ERROR: Final = b'data: {"error"'
_NAMED_ERROR: Final = b"event: error\ndata: "  # Anthropic's


def add_report(answer: bytes, report: Mapping[str, Any]) -> bytes:
    """Add a report to a JSON object. Anything else stays as it is."""
    body = answer.rstrip()
    if not body.endswith(b"}") or body == b"{}":
        return answer
    return body[:-1] + b',"weft":' + _dumped(report) + b"}"


def choices_that_end(events: bytes) -> int:
    """How many choices of the answer end with these events."""
    return sum(map(_ends_choice, events.split(b"\n\n")))


def add_report_to_events(events: bytes, report: Mapping[str, Any]) -> bytes:
    """Add a report to the last of the events that end a choice."""
    found = events.split(b"\n\n")
    last = max(place for place, event in enumerate(found) if _ends_choice(event))
    found[last] = add_report(found[last], report)
    return b"\n\n".join(found)


def _ends_choice(event: bytes) -> bool:
    return event.startswith(_EVENT) and _ENDS in event


def replace_error(events: bytes, body: Mapping[str, Any]) -> bytes:
    """The events with another error in the place of theirs."""
    return b"\n\n".join(_with_error(event, body) for event in events.split(b"\n\n"))


def _with_error(event: bytes, body: Mapping[str, Any]) -> bytes:
    if event.startswith(_NAMED_ERROR):
        return _NAMED_ERROR + _dumped(body)
    return b"data: " + _dumped(body) if event.startswith(_ERROR) else event


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_MOST_BYTES: Final = 64 << 20  # of a response; a longer one is not read
_UNREAD_BYTES: Final = 16 << 10  # events are read together, until there are so many bytes
_END: Final = re.compile(  # of an answer, or of a tool call in it
    rb'"finish_reason": ?"|response\.(?:in)?complete|message_delta|content_block_stop|output_item\.done'
)
_LONGEST_END: Final = 32


# In the form of a whole response, and whether it is only a part: a tool call of an answer that goes on.
ReadAnswer = tuple[Mapping[str, Any], bool]


class AnswerReader:
    """Takes the bytes of one response.

    Args:
        is_stream: Whether the response is a stream of server-sent events.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._rest = bytearray()  # what has not been read yet
        self._has_end = False  # whether an answer may end in it
        self._read_bytes = 0
        self._messages: dict[int, dict[str, Any]] = {}  # of Chat Completions, by choice
        self._blocks: dict[int, dict[str, Any]] = {}  # of Anthropic's Messages

    def take(self, data: bytes, *, is_last: bool) -> list[ReadAnswer]:
        """Take a piece, and return the answers that are complete with it, and parts."""
        self._read_bytes += len(data)
        if self._read_bytes > _MOST_BYTES:
            self._rest.clear()
            return []
        unsearched = max(0, len(self._rest) - _LONGEST_END)
        self._rest += data
        if not self._is_stream:
            return [(_object(bytes(self._rest)), False)] if is_last else []
        self._has_end = self._has_end or _END.search(self._rest, unsearched) is not None
        if not (self._has_end or is_last) and len(self._rest) < _UNREAD_BYTES:
            return []
        *events, rest = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(rest)
        self._has_end = _END.search(rest) is not None
        lines = (line for event in events for line in event.split(b"\n") if line.startswith(b"data:"))
        answers = (self._event(_object(line.removeprefix(b"data:"))) for line in lines)
        return [answer for answer in answers if answer is not None]

    def left(self) -> list[ReadAnswer]:
        """The answers of a stream that its client has left, as far as they have come."""
        answers = self.take(b"\n\n", is_last=True)
        answers.append(({"choices": [{"message": message} for message in self._messages.values()]}, False))
        return [*answers, ({"content": self._content()}, False)] if self._blocks else answers

    def _event(self, event: Mapping[str, Any]) -> ReadAnswer | None:
        if isinstance(event.get("choices"), list):
            return self._chunk(event)
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete"):
            self._messages.clear()
            response = event.get("response")
            return (response, False) if isinstance(response, Mapping) else None
        if kind == "content_block_start":
            self._blocks[event.get("index", 0)] = {**event.get("content_block", {}), "json": ""}
        elif kind == "content_block_delta":
            block, delta = self._blocks.get(event.get("index", 0)), event.get("delta", {})
            if block is not None and delta.get("type") == "text_delta":
                block["text"] = block.get("text", "") + delta.get("text", "")
            elif block is not None and delta.get("type") == "input_json_delta":
                block["json"] += delta.get("partial_json", "")
        elif kind == "content_block_stop":
            block = self._blocks.get(event.get("index", 0), {})
            return ({"content": [_read(block)]}, True) if block.get("json") else None
        elif kind == "response.output_item.done" and event.get("item", {}).get("type") == "function_call":
            return {"output": [event["item"]]}, True
        elif kind == "message_delta":  # it has the reason of the end
            return {"content": self._content()}, False
        elif kind == "response.output_text.delta":
            self._messages.setdefault(0, {"content": ""})["content"] += event.get("delta", "")
        return None

    def _content(self) -> list[Mapping[str, Any]]:
        """The blocks of Anthropic's Messages with the arguments that their deltas brought."""
        return [_read(block) for _index, block in sorted(self._blocks.items())]

    def _chunk(self, chunk: Mapping[str, Any]) -> ReadAnswer | None:
        ended = []
        for choice in chunk["choices"]:
            message = self._messages.setdefault(choice.get("index", 0), {"content": "", "tool_calls": []})
            delta = choice.get("delta") or {}
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                _add_call(message["tool_calls"], part)
            if choice.get("finish_reason"):
                ended.append({"message": self._messages.pop(choice.get("index", 0))})
        return ({"id": chunk.get("id"), "choices": ended}, False) if ended else None


def _read(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**block, "input": _object(block["json"].encode())} if block["json"] else block


def _add_call(calls: list[dict[str, Any]], part: Mapping[str, Any]) -> None:
    index = part.get("index", len(calls))
    while len(calls) <= index:
        calls.append({"id": None, "function": {"name": "", "arguments": ""}})
    call, function = calls[index], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}
