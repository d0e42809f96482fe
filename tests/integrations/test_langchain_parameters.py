"""The fields that `ChatWeft` takes: LangChain's other names, vLLM's fields, and the refusal of all others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.runnables import ConfigurableField

import weft
from weft.core.errors import DeadlineError, InvalidRequestError, UnknownModelError
from weft.integrations.langchain import ChatWeft
from weft.integrations.langchain.chat_model import request_fields
from weft.testing import ScriptedEngine

WRONG = [
    ({"max_token": 3}, "max_tokens"),
    ({"temprature": 0}, "temperature"),
    ({"stop_sequence": ["."]}, "stop_sequences"),
    ({"top_k": 1, "min_token": 1}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "meant"), WRONG)
def test_a_wrong_name_is_refused_with_the_nearest_name(fields: dict[str, Any], meant: str) -> None:
    """vLLM ignores fields that it does not know, so a misspelt name would have no effect and no error."""
    with pytest.raises(InvalidRequestError, match=f"did you mean {meant}"):
        request_fields(fields)


@pytest.mark.parametrize("name", ["messages", "request_id", "session_id"])
def test_fields_that_weft_fills_in_cannot_be_set(name: str) -> None:
    """A value of the user's would be replaced, and so be ignored."""
    with pytest.raises(InvalidRequestError, match=name):
        request_fields({name: "x"})


def test_langchains_names_become_the_engines() -> None:
    """Code that was written for another chat model of LangChain works as it is."""
    given = {"max_completion_tokens": 3, "stop_sequences": ["."], "model_name": "m", "request_timeout": 5, "top_k": 2}
    assert request_fields({**given, "stream": True}) == {
        "max_tokens": 3,
        "stop": ["."],
        "model": "m",
        "timeout_s": 5,
        "top_k": 2,
    }


@pytest.mark.engine
@pytest.mark.parametrize(("fields", "meant"), WRONG)
def test_the_constructor_refuses_a_wrong_name(engine: weft.Engine, fields: dict[str, Any], meant: str) -> None:
    """The mistake shows where it is made, before any call."""
    with pytest.raises(InvalidRequestError, match=f"did you mean {meant}"):
        ChatWeft(engine=engine, **fields)
    with pytest.raises(InvalidRequestError, match=f"did you mean {meant}"):
        ChatWeft(engine=engine, model_kwargs=fields)


@pytest.mark.engine
def test_a_call_refuses_a_wrong_name(engine: weft.Engine) -> None:
    """A field of one call is checked like a field of the model."""
    model = ChatWeft(engine=engine, max_tokens=2)
    with pytest.raises(InvalidRequestError, match="did you mean max_tokens"):
        model.invoke("Hello", max_token=3)
    with pytest.raises(InvalidRequestError, match="did you mean max_tokens"):
        list(model.bind(max_token=3).stream("Hello"))


@pytest.mark.engine
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens_has_two_names(engine: weft.Engine, name: str) -> None:
    """Both names limit the answer, in the constructor and in a call, and a call's value takes precedence."""
    fields: dict[str, Any] = {name: 3}
    model = ChatWeft(engine=engine, temperature=0, ignore_eos=True, **fields)
    assert _output_tokens(model.invoke("Hello")) == 3
    assert _output_tokens(model.invoke("Hello", max_tokens=2)) == 2
    assert _output_tokens(model.invoke("Hello", max_completion_tokens=4)) == 4


@pytest.mark.engine
def test_fields_of_vllm_are_given_like_the_models_own(engine: weft.Engine) -> None:
    """`min_tokens` is a field of vLLM's chat request. Before, the constructor ignored it."""
    model = ChatWeft(engine=engine, max_tokens=5, min_tokens=5)
    assert model.model_kwargs == {"min_tokens": 5}
    assert _output_tokens(model.invoke("Hello")) == 5


@pytest.mark.engine
def test_a_configurable_field_still_works(engine: weft.Engine) -> None:
    """LangChain makes such a model again from its fields."""
    model = ChatWeft(engine=engine, max_tokens=5, min_tokens=2).configurable_fields(
        max_tokens=ConfigurableField("max_tokens")
    )
    assert _output_tokens(model.invoke("Hello", config={"configurable": {"max_tokens": 2}})) == 2


@pytest.mark.engine
def test_a_timeout_limits_the_call(engine: weft.Engine) -> None:
    """`timeout` is LangChain's name for the limit of a call, in seconds."""
    model = ChatWeft(engine=engine, timeout=0.001, max_tokens=200, ignore_eos=True)
    with pytest.raises(DeadlineError):
        model.invoke("Hello")
    with pytest.raises(InvalidRequestError, match="timeout"):
        model.invoke("Hello", timeout=-1)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["model", "model_name"])
def test_an_unknown_model_is_refused(engine: weft.Engine, name: str) -> None:
    """The name of the model is sent, so a name that the engine does not serve is not ignored."""
    fields: dict[str, Any] = {name: "llama"}
    with pytest.raises((UnknownModelError, InvalidRequestError), match="llama"):
        ChatWeft(engine=engine, **fields).invoke("Hello")
    assert ChatWeft(engine=engine, model=engine.model, max_tokens=1).invoke("Hello").response_metadata


def _output_tokens(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["output_tokens"]


def test_traces_show_what_a_call_asks_for() -> None:
    """Tracers get the fields of the call itself where it sets them, and else those of the model."""
    traced: list[dict[str, Any]] = []

    class Tracer(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            traced.append(kwargs["invocation_params"])

    with ScriptedEngine(lambda _request: "Yes.") as engine:
        model = ChatWeft(engine=engine, temperature=0.0, stop=["."])
        model.invoke("Hello", {"callbacks": [Tracer()]}, temperature=0.5)
        model.invoke("Hello", {"callbacks": [Tracer()]}, stop=["!"])
    assert [(each["temperature"], each["stop"]) for each in traced] == [(0.5, ["."]), (0.0, ["!"])]
