"""What the integrations share about answers in JSON."""

from __future__ import annotations

import json


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, which an answer that was cut off seldom is."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
