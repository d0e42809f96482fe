"""The arguments that type checkers know are those of the installed vLLM."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import weft
from weft.core.errors import EngineStartError
from weft.engine.vllm_compat.known_names import VllmArgs, known_engine_args
from weft.engine.vllm_compat.names import AsyncEngineArgs

pytestmark = pytest.mark.engine  # imports vLLM, but starts no engine


def written(hint: Any) -> str:
    """A field's type as `VllmArgs` gives it: literals by their types, and vLLM's own classes as `Any`."""
    origin, arguments = get_origin(hint), [written(each) for each in get_args(hint)]
    if origin is Literal:
        return " | ".join(dict.fromkeys(type(each).__name__ for each in get_args(hint)))
    if origin in (Union, types.UnionType):
        return "Any" if "Any" in arguments else " | ".join(dict.fromkeys(arguments))
    if origin is list:
        return f"list[{arguments[0]}]"
    if dict in (origin, hint):
        return "dict[str, Any]"
    if hint is types.NoneType:
        return "None"
    return hint.__name__ if hint in (bool, int, float, str) else "Any"


def test_the_arguments_of_engines_are_vllms() -> None:
    """An argument that is missing or of another type would be refused by type checkers, though vLLM takes it."""
    expected = {
        field.name: f"{kind} | None" if field.default is None and kind != "Any" and "None" not in kind else kind
        for field in dataclasses.fields(AsyncEngineArgs)
        if field.name != "model" and not field.name.startswith("_")
        for kind in [written(field.type)]
    }
    assert known_engine_args() == set(expected)
    hints = {name: VllmArgs.__annotations__[name].__forward_arg__ for name in expected}
    # Some versions take None for an argument for which others do not.
    assert {
        name: hint for name, hint in hints.items() if hint not in (expected[name], f"{expected[name]} | None")
    } == {}


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
@pytest.mark.parametrize(
    ("name", "meant"),
    [("polcy", "policy"), ("gpu_memory_utilisation", "gpu_memory_utilization"), ("max_model_length", "max_model_len")],
)
def test_a_wrong_argument_is_refused_with_the_nearest_name(kind: Any, name: str, meant: str) -> None:
    """Weft's parameters and vLLM's are searched, before anything starts."""
    with pytest.raises(EngineStartError, match=rf"{name} \(did you mean {meant}\?\)"):
        kind("tiny", **{name: 1})


def test_a_wrong_argument_of_one_of_several_models_is_refused() -> None:
    """A model's own arguments are checked like those for all models."""
    models = [weft.ServedModel("tiny", engine_args={"dtyp": "float32"})]
    with pytest.raises(EngineStartError, match="did you mean dtype"):
        weft.AsyncMultiLLMEngine(models=models)
