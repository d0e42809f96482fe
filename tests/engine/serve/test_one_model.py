"""`weft serve` has one model, under one name or several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.core.errors import ReplicaError
from weft.engine.serve.client import ServedEngine


def test_an_engine_of_several_models_is_refused() -> None:
    """vLLM's application knows one model, so the others would be out of reach."""
    engine: Any = SimpleNamespace(models=["a", "b"])
    with pytest.raises(ReplicaError, match="has a, b"):
        ServedEngine(engine)
