"""`weft.ServedModel`: one of several models of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.errors import ReplicaError
from weft.engine.vllm.start import resolve_model


@dataclass(frozen=True)
class ServedModel:
    """One of several models that an `AsyncMultiLLMEngine` serves.

    Args:
        model: As for `weft.Engine`.
        replicas: How many engines, 1 or more.
        name: The name that requests give; None: `model` as it is given.
        tool_call_parser: As for `weft.Engine`.
        engine_args: vLLM's arguments for this model, in addition to those for all models.
    """

    model: str | os.PathLike[str] | None = None
    replicas: int = 1
    name: str | None = None
    tool_call_parser: str | None = "hermes"
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def resolved(models: Sequence[ServedModel]) -> list[ServedModel]:
    """The models with the paths and names that they are served by. Raises ReplicaError if two have the same name, or
    one has no replica. Raises ModelNotFoundError if there is no such model."""
    found = [
        replace(each, model=path, name=each.name or path) for each in models for path in [resolve_model(each.model)]
    ]
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ReplicaError(f"two models have the same name; give each a name of its own: {names}.")
    for each in found:
        if each.replicas < 1:
            raise ReplicaError(f"{each.name!r} has {each.replicas} replicas; give it 1 or more.")
    return found
