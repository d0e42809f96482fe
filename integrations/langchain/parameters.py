"""The fields of a request that users of `ChatWeft` set, by vLLM's names and by LangChain's other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from weft.engine.vllm_compat.chat_fields import CHAT_FIELDS, FILLED_IN, check_fields

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
_LANGCHAINS_OWN: Final = frozenset({"stream"})  # LangChain's switch for streaming, which LangChain has obeyed already


def constructor_fields(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The arguments of the model's constructor, with LangChain's other names replaced and the rest in `model_kwargs`.

    Args:
        given: The arguments as users give them.
        own: The names of the model's own fields.

    Raises:
        InvalidRequestError: An argument is neither a field of the model nor of vLLM's chat request.
    """
    more = dict(given.get("model_kwargs") or {})
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    check_fields([*(name for name in given if name not in own), *more], {*_SETTABLE, *own})
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = _ALIASES.get(name, name)
        (fields if field in own else more)[field] = value
    return {**fields, "model_kwargs": more} if more else fields


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one request as the engine takes them.

    Args:
        given: The fields by any of their names.

    Raises:
        InvalidRequestError: A name is not one of a field of vLLM's chat request that can be set.
    """
    given = {name: value for name, value in given.items() if name not in _LANGCHAINS_OWN}
    check_fields(given, _SETTABLE)
    fields = {_ALIASES.get(name, name): value for name, value in given.items()}
    if "timeout" in fields:
        fields["timeout_s"] = fields.pop("timeout")
    return fields
