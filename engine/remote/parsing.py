"""What answers of a server must look like. Something else may listen there, and code that reads them trusts them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from weft.core.accounts import Account

# A shape is a type, a list with the shape of its items, or a dict of shapes by name. "?" marks a member that may be
# null or absent, and "+" a list that may not be empty.
_FUNCTION: Final = {"name?": str, "arguments?": str}
_MESSAGE: Final = {
    "content?": str,
    "reasoning?": str,
    "tool_calls?": [{"id": str, "function": {"name": str, "arguments": str}}],
}
_DELTA: Final = {
    "content?": str,
    "reasoning?": str,
    "tool_calls?": [{"index": int, "id?": str, "function?": _FUNCTION}],
}
_CHOICE: Final = {"index": int, "finish_reason?": str, "logprobs?": {"content?": [dict]}, "token_ids?": [int]}
_USAGE: Final = {
    "prompt_tokens": int,
    "completion_tokens?": int,
    "total_tokens": int,
    "prompt_tokens_details?": {"cached_tokens?": int},
}
_HEAD: Final = {"id": str, "model": str, "prompt_token_ids?": [int]}
COMPLETION: Final = {**_HEAD, "choices+": [{**_CHOICE, "message": _MESSAGE}], "usage": _USAGE}
CHUNK: Final = {**_HEAD, "choices": [{**_CHOICE, "delta": _DELTA}], "usage?": _USAGE}
TOKENS: Final = {"tokens": [int]}
COUNT: Final = {"count": int}
MODELS: Final = {"data": [{"id": str, "max_model_len?": int}]}

_WORDS: Final[dict[type, str]] = {str: "a text", int: "a whole number", dict: "an object", list: "a list"}
_SECONDS: Final = frozenset(field.name for field in fields(Account) if isinstance(field.default, float))
_COUNTS: Final = frozenset(field.name for field in fields(Account) if isinstance(field.default, int))


def parsed(data: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fault_of(value: Any, shape: Any, name: str = "it") -> str | None:
    """Return what is wrong with a value, as a part of a sentence, or None if nothing is."""
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if not isinstance(value, kind) or isinstance(value, bool):
        return f"{name} is {value!r:.80}, not {_WORDS[kind]}"
    if isinstance(shape, list):
        faults = (fault_of(each, shape[0], f"{name}[{number}]") for number, each in enumerate(value))
        return next(filter(None, faults), None)
    if isinstance(shape, dict):
        return next(filter(None, (_fault_of_member(value, key, shape[key], name) for key in shape)), None)
    return None


def _fault_of_member(value: Mapping[str, Any], key: str, shape: Any, name: str) -> str | None:
    member = key.rstrip("?+")
    path = member if name == "it" else f"{name}.{member}"
    if value.get(member) is None:
        return None if key.endswith("?") else f"{path} is missing"
    if value[member] == [] and key.endswith("+"):
        return f"{path} is empty"
    return fault_of(value[member], shape, path)


def account_of(report: Any) -> Account | None:
    """The account in a server's report of a call; figures that are none are left out."""
    if not isinstance(report, Mapping):
        return None
    known: dict[str, Any] = {name: report[name] for name in _COUNTS if _is_figure(report.get(name), int)}
    known |= {name: report[name] for name in _SECONDS if _is_figure(report.get(name), int | float)}
    return Account(**known)


def _is_figure(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
