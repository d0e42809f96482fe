"""Engines and programs that are something else are refused when they are passed, with a typed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import weft
from weft.core.errors import ArgumentTypeError, WeftError
from weft.integrations.autogen import WeftChatCompletionClient, bind_team
from weft.integrations.openai import sync_openai_client
from weft.testing import ScriptedEngine

anything: Any = "x"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: bind_team(anything, weft.Program()), "bind_team: team is 'x' (str). Give an AutoGen agent"),
        (lambda engine: bind_team(anything, None), "bind_team: program is None (NoneType). Give the weft.Program"),  # type: ignore[arg-type]
        (lambda engine: WeftChatCompletionClient(anything), "engine is 'x' (str). Give a weft.Engine"),
        (lambda engine: WeftChatCompletionClient(engine).bind(anything), "bind: program is 'x'"),
        (lambda engine: weft.openai_client(anything), "openai_client: engine is 'x' (str)"),
        (lambda engine: sync_openai_client(engine, anything), "openai_client: program is 'x' (str)"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_at_once(call: Callable[[ScriptedEngine], object], said: str) -> None:
    """Otherwise the mistake would show at the first call, as an AttributeError far away."""
    with ScriptedEngine(["hello"]) as engine, pytest.raises(ArgumentTypeError) as caught:
        call(engine)
    assert said in str(caught.value)
    assert isinstance(caught.value, WeftError)
    assert isinstance(caught.value, TypeError)
