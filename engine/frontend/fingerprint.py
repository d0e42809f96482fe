"""What a program's first call shows of its kind."""

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
