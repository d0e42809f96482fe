"""The fields of a request that users of `ChatWeft` set, by vLLM's names and by LangChain's other names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from weft.core.errors import InvalidRequestError
from weft.engine.vllm_compat.options.chat_fields import CHAT_FIELDS, FILLED_IN, check_fields

# The names under which LangChain's other chat models take the same fields.
_ALIASES: Final = {
    "max_completion_tokens": "max_tokens",
    "model_name": "model",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
_SETTABLE: Final = (CHAT_FIELDS - FILLED_IN) | {"timeout", "timeout_s"} | _ALIASES.keys()
# Every chat model of LangChain takes these. An engine in the same process needs no key, and `with_retry` repeats calls.
_WITHOUT_EFFECT: Final = frozenset({"api_key", "max_retries"})
_METHODS: Final = ("json_schema", "function_calling", "json_mode")  # of `with_structured_output`
_LANGCHAINS_OWN: Final = frozenset({"stream"})  # LangChain's switch for streaming, which LangChain has obeyed already


def constructor_fields(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The arguments of the model's constructor, with LangChain's other names replaced and the rest in `model_kwargs`.

    Args:
        given: The arguments as users give them.
        own: The names of the model's own fields.

    Raises:
        InvalidRequestError: An argument is neither a field of the model nor of vLLM's chat request, or a field is given
            under two names.
    """
    more = dict(given.get("model_kwargs") or {})
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    check_fields([*(name for name in given if name not in own), *more], {*_SETTABLE, *own})
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = _ALIASES.get(name, name)
        if field in fields or (field != name and field in given):
            raise InvalidRequestError(f"{field} is given twice, under two of its names; leave out one of them.")
        (fields if field in own else more)[field] = value
    return {**fields, "model_kwargs": more} if more else fields


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one request as the engine takes them.

    Args:
        given: The fields by any of their names.

    Raises:
        InvalidRequestError: A name is not one of a field of vLLM's chat request that can be set.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SETTABLE:
            fields[_ALIASES.get(name, name)] = value
        elif name not in _LANGCHAINS_OWN:
            check_fields([each for each in given if each not in _LANGCHAINS_OWN], _SETTABLE)
    if "timeout" in fields:
        fields["timeout_s"] = fields.pop("timeout")
    return fields


def check_one_answer(count: object) -> None:
    """Check the `n` of a stream.

    Raises:
        InvalidRequestError: It asks for several answers, whose pieces LangChain would join into one text.
    """
    if isinstance(count, int) and count > 1:
        raise InvalidRequestError(
            f"n is {count}, and LangChain joins all pieces of a stream into one message. Leave out n and stream each "
            "answer by a call of its own, or get the answers whole with `generate` or `agenerate` and streaming=False."
        )


def check_method(method: str) -> None:
    """Check the `method` of `with_structured_output`.

    Raises:
        InvalidRequestError: There is no such method.
    """
    if method not in _METHODS:
        near = difflib.get_close_matches(str(method), _METHODS, n=1)
        raise InvalidRequestError(
            f"with_structured_output: method is {method!r:.80}{f' (did you mean {near[0]!r}?)' if near else ''}. "
            f"Give one of {', '.join(map(repr, _METHODS))}."
        )
