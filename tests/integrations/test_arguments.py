"""Engines and programs that are something else are refused when they are passed, with a typed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

import weft
from weft.core.errors import ArgumentTypeError, InvalidRequestError, WeftError
from weft.integrations.autogen import WeftChatCompletionClient, bind_team
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler
from weft.integrations.openai import sync_openai_client
from weft.testing import ScriptedEngine

anything: Any = "x"
address: Any = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda engine: bind_team(anything, weft.Program()), "bind_team: team is 'x' (str). Give an AutoGen agent"),
        (lambda engine: bind_team(anything, None), "bind_team: program is None (NoneType). Give the weft.Program"),  # type: ignore[arg-type]
        (lambda engine: WeftChatCompletionClient(anything), "engine is 'x' (str). Give a weft.Engine"),
        (lambda engine: WeftChatCompletionClient(engine).bind(anything), "bind: program is 'x'"),
        (lambda engine: ChatWeft(engine=anything), "ChatWeft: engine is 'x' (str). Give a weft.Engine"),
        (
            lambda engine: ChatWeft(engine=address),
            "Give weft.connect('http://127.0.0.1:1'), which is an engine on that",
        ),
        (lambda engine: weft.openai_client(address), "Give weft.connect('http://127.0.0.1:1')"),
        (lambda engine: WeftChatCompletionClient(address), "Give weft.connect('http://127.0.0.1:1')"),
        (lambda engine: ProgramCallbackHandler(anything), "ProgramCallbackHandler: program is 'x' (str)"),
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


def test_a_wrong_field_of_the_openai_client_is_refused_with_the_nearest_name() -> None:
    """vLLM ignores fields that it does not know. The SDK's own parameters are accepted."""
    messages: Any = [{"role": "user", "content": "Hello"}]
    with ScriptedEngine(["hello"]) as engine:
        create = sync_openai_client(engine).chat.completions.create
        with pytest.raises(openai.BadRequestError, match="did you mean top_k"):
            create(model=engine.model, messages=messages, extra_body={"top_kk": 3})
        create(model=engine.model, messages=messages, store=False, extra_body={"top_k": 3, "timeout_s": 5})
        assert len(engine.calls) == 1


def test_a_field_under_two_names_is_refused() -> None:
    """Otherwise one of the two values would be ignored."""
    with ScriptedEngine(["hello"]) as engine, pytest.raises(InvalidRequestError, match="max_tokens is given twice"):
        ChatWeft(engine=engine, max_tokens=3, max_completion_tokens=4)


def test_a_wrong_method_of_structured_output_is_refused() -> None:
    """Otherwise it would be taken for "json_mode", which does not enforce the schema."""
    schema = {"title": "answer", "description": "An answer.", "type": "object", "properties": {}}
    with ScriptedEngine(["{}"]) as engine, pytest.raises(InvalidRequestError, match="did you mean 'json_schema'"):
        ChatWeft(engine=engine).with_structured_output(schema, method="json_scheme")  # type: ignore[arg-type]
