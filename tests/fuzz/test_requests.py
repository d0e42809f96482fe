"""The fuzz targets of requests hold for their seeds, and for inputs that Hypothesis makes of bytes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InvalidRequestError


def target(name: str) -> Any:
    """The module of a target. Some import vLLM, which takes seconds."""
    return importlib.import_module(name)


@pytest.mark.engine
def test_make_request_answers_every_seed() -> None:
    """Requests that once failed with an untyped error are refused by a typed one."""
    fuzz = target("fuzz_make_request")
    for seed in fuzz.seeds():
        fuzz.one_input(seed)


@pytest.mark.engine
@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_make_request_answers_whatever_comes(data: bytes) -> None:
    """No body makes vLLM's validators fail in a way that reaches the caller."""
    target("fuzz_make_request").one_input(data)


class Unprintable:
    """A value that no error can show."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.engine
@pytest.mark.parametrize("field", ["top_logprobs", "prompt_logprobs", "thinking_token_budget"])
def test_a_value_without_a_text_is_an_invalid_request(field: str) -> None:
    """vLLM's errors hold the caller's value and show it when they are read. Bytes cannot describe such a value."""
    from weft.engine.vllm.chat import ChatEndpoint

    with pytest.raises(InvalidRequestError, match="malformed"):
        ChatEndpoint.make_request({"messages": [{"role": "user", "content": "hi"}], field: Unprintable()})


def test_check_ids_answers_every_seed() -> None:
    """Bodies on which the middleware once failed, or that it once kept in memory, get one response."""
    fuzz = target("fuzz_check_ids")
    for seed in fuzz.seeds():
        fuzz.one_input(seed)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_check_ids_answers_whatever_comes(data: bytes) -> None:
    """No request gets an id past the check, and none makes the middleware fail."""
    target("fuzz_check_ids").one_input(data)
