"""One form for the messages of three APIs: Chat Completions, Responses and Anthropic's Messages.

A conversation is a list of items: a text with its role, a tool call, a tool's result. An item's digest follows from its
role, its parts, the tool's name and arguments, and the call's id. These do not count, because clients add, drop or move
them from turn to turn: reasoning, marks for caches, annotations, white space around texts, and in arguments and answers
of JSON white space, the order of keys, and how a number is written.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any, Final

Item = tuple[str, ...]
Digest = bytes

SILENCE: Final[Item] = ("message", "assistant", "")  # an answer with nothing in it that counts
MOST_ITEMS: Final = 10_000  # of a conversation, and of a message's parts and calls
_DIGEST_BYTES: Final = 16
_MOST_CACHED: Final = 64 << 10  # characters
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
_UNSAID: Final = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_ROLES: Final = {"developer": "system", "function": "tool"}
_MARKS: Final = ("cache_control", "annotations", "logprobs", "status", "detail")
# What Claude Code puts into messages and leaves out of them later.
_REMINDER: Final = re.compile("<system-reminder>.*?</system-reminder>", re.DOTALL)
_BILLING: Final = "x-anthropic-billing-header:"  # Claude Code's first system block, which changes with each request
# Python brings a run of combining marks into NFC in the square of its length. So longer runs stay as they are.
_LONG_RUN: Final = re.compile(r"([^\w\s\x00-\x7f]{31,})")


def items_before(body: Mapping[str, Any]) -> list[Item]:
    """What a request has outside its messages: the instructions of Responses, or Anthropic's system prompt."""
    return [item for name in ("instructions", "system") for item in _message("system", body.get(name))]


def items_of_answer(body: Mapping[str, Any]) -> list[list[Item]]:
    """The answers in a response of any of the three APIs: one for each choice."""
    choices = body.get("choices")
    if isinstance(choices, Sequence):
        messages = [each.get("message") for each in choices if isinstance(each, Mapping)]
        return [items_of_message({"role": "assistant", **each}) for each in messages if isinstance(each, Mapping)]
    output = body.get("output")
    if isinstance(output, Sequence):
        return [[item for each in output if isinstance(each, Mapping) for item in items_of_message(each)]]
    return [items_of_message({"role": "assistant", "content": body["content"]})] if "content" in body else []


def chain(start: Digest, digests: Iterable[Digest]) -> list[Digest]:
    """A digest for each beginning of a conversation with items of these digests, the shortest one first. What stands
    behind 16 bytes of the start, for a system prompt, stands behind each of them."""
    first, behind = start[:_DIGEST_BYTES], start[_DIGEST_BYTES:]
    linked = accumulate(digests, lambda before, own: blake2b(before + own, digest_size=16).digest(), initial=first)
    return [each + behind for each in linked][1:]


def item_keys(items: Iterable[Item]) -> list[Digest]:
    """A digest of each item."""
    return [digest_of(b"", *in_order(item)) for item in items]


def in_order(item: Item) -> Item:
    """An item, or if it is an answer of a JSON object, the same with its keys in order: clients write it anew."""
    is_json = item[:2] == ("message", "assistant") and len(item) == 5 and item[4].startswith("{")
    return (*item[:4], _ordered(item[4])) if is_json else item


def digest_of(start: Digest, *parts: str) -> Digest:
    """A digest of 16 bytes. Each part counts with its length, so that no two lists of parts look alike."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return blake2b(start + text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def items_of_message(message: Mapping[str, Any]) -> list[Item]:
    """The items of a message, or of an item of Responses."""
    kind = message.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        return [_call(message.get("call_id"), message.get("name"), message.get("arguments", message.get("input")))]
    if kind in ("function_call_output", "custom_tool_call_output"):
        return [_result(message.get("call_id"), message.get("output"))]
    if kind in _UNSAID:
        return []
    if kind != "message":
        return [("other", _json({name: value for name, value in message.items() if name not in _MARKS}))]
    role = str(message.get("role", ""))
    role = _ROLES.get(role, role)
    if role == "tool":
        return [_result(message.get("tool_call_id", message.get("name")), message.get("content"))]
    items = _message(role, message.get("content"), str(message.get("name") or "") if role == "user" else "")
    refusal = message.get("refusal")
    if role == "assistant" and isinstance(refusal, str):
        items += _message(role, refusal)
    calls = message.get("tool_calls")
    for call in islice(calls, MOST_ITEMS) if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        function = call.get("function", call.get("custom")) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments", function.get("input"))
            items.append(_call(call.get("id"), function.get("name"), arguments))
    if not items and role == "assistant":
        items.append(SILENCE)
    return items


def _message(role: str, content: object, name: str = "") -> list[Item]:
    """The items of a message's content: calls and results between its texts are items of their own, as in Responses."""
    items: list[Item] = []
    parts: list[str] = []

    def close() -> None:
        if parts:
            items.append(("message", role, name, *parts))
            parts.clear()

    for part in _parts(content):
        kind = part.get("type")
        if kind == "tool_use":
            close()
            items.append(_call(part.get("id"), part.get("name"), part.get("input")))
        elif kind == "tool_result":
            close()
            items.append(_result(part.get("tool_use_id"), part.get("content")))
        else:
            parts += _part(part)
    close()
    return items


def _call(call_id: object, name: object, arguments: object) -> Item:
    arguments = {} if arguments in (None, "") else arguments
    return ("call", str(call_id), str(name), _ordered(arguments if isinstance(arguments, str) else _json(arguments)))


def _ordered(text: str) -> str:
    return (_again if len(text) <= _MOST_CACHED else _again.__wrapped__)(text)


@lru_cache(8)  # each answer is asked for several times
def _again(text: str) -> str:
    try:
        return _json(json.loads(text, parse_int=_number, parse_float=_number))
    except (ValueError, RecursionError):
        return text.strip()


def _number(text: str) -> float:
    """A number as JavaScript has it, whose clients write 1.0 as 1, and -0 as 0."""
    return float(text) + 0.0


def _result(call_id: object, content: object) -> Item:
    return ("result", str(call_id), *(text for part in _parts(content) for text in _part(part)))


def _parts(content: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, str):
        yield {"type": "text", "text": content}
    elif isinstance(content, Mapping):
        yield content
    elif isinstance(content, Sequence):
        for part in islice(content, MOST_ITEMS):
            yield from _parts(part) if isinstance(part, str) else (part,) if isinstance(part, Mapping) else ()


def _part(part: Mapping[str, Any]) -> list[str]:
    """What counts of a part: its kind and its content; nothing if it is empty or no one said it."""
    kind = part.get("type")
    if kind in _UNSAID:
        return []
    if kind in _TEXTS:
        text = text_of(str(part.get("text", part.get("refusal", ""))))
        return ["text", text] if text and not text.startswith(_BILLING) else []
    if kind in ("image_url", "input_image", "image"):
        return ["image", _image(part)]
    return ["other", _json({name: value for name, value in part.items() if name not in _MARKS})]


def text_of(text: str) -> str:
    """A text without thoughts and reminders, in one of its forms."""
    text = text.strip()
    if "</think>" in text:  # a model without a reasoning parser says it, and clients cut it out of their history
        text = text.rpartition("</think>")[2]
    if "<system-reminder>" in text:
        before, end, after = text.rpartition("</system-reminder>")
        text = _REMINDER.sub("", before + end) + after
    return _composed(text.replace("\r\n", "\n")).strip()


def utf8_bytes(text: str) -> int:
    """The length of a text in UTF-8, where a Chinese character counts as three letters."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _composed(text: str) -> str:
    """A text in NFC."""
    if text.isascii():
        return text
    pieces = _LONG_RUN.split(text)
    pieces[::2] = (unicodedata.normalize("NFC", piece) for piece in pieces[::2])
    return "".join(pieces)


def _image(part: Mapping[str, Any]) -> str:
    image = part.get("image_url", part.get("source"))
    if isinstance(image, Mapping):
        if image.get("type") == "base64":
            return f"data:{image.get('media_type')};base64,{image.get('data')}"
        image = image.get("url", _json(image))
    return str(image)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return "unreadable"
