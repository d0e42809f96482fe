"""Checks of model output that several integrations need."""

from __future__ import annotations

import json


def is_json(text: str) -> bool:
    """Whether a text is one JSON value. JSON that was cut off hardly ever is."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
