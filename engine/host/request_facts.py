"""What a request says of itself: what it asks of sampling, and what kind of program it begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

_SYSTEM: Final = ("system", "developer")
_BYTES: Final = 8


def fingerprint(body: Mapping[str, Any]) -> str:
    """A short hash of a chat request's system prompt and tools.

    Programs without a name of their own, such as all that LangGraph starts, are told apart by it.

    Args:
        body: The request in OpenAI's chat format.
    """
    messages = body.get("messages")
    rows = messages if isinstance(messages, list) else []
    prompt = [row.get("content") for row in rows if isinstance(row, Mapping) and row.get("role") in _SYSTEM]
    shown = json.dumps([prompt, body.get("tools")], sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.blake2b(shown.encode(errors="replace"), digest_size=_BYTES).hexdigest()


# By the name that they have in OpenTelemetry's conventions: the fields of OpenAI's and Anthropic's requests, of which
# the first one that a request has counts.
_FIELDS: Final = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_completion_tokens", "max_output_tokens", "max_tokens"),
    "frequency_penalty": ("frequency_penalty",),
    "presence_penalty": ("presence_penalty",),
    "seed": ("seed",),
    "choice.count": ("n",),
}
_BOUND: Final = 1 << 63  # of a whole number in a span


def settings_of(request: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a request asks for; what it leaves to the model is missing.

    Stop strings are not among them, because they are texts.

    Args:
        request: In the format of OpenAI's or Anthropic's API, or vLLM's sampling parameters.
    """
    found: dict[str, float] = {}
    for setting, names in _FIELDS.items():
        for name in names:
            value = request.get(name)
            if value is not None:
                if isinstance(value, int | float) and not isinstance(value, bool) and -_BOUND <= value < _BOUND:
                    found[setting] = value
                break
    return found
