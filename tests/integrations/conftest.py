"""LangChain models on the test's engine, and runs whose calls overlap in steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tiny_engine import ENDLESS_TOKENS

if TYPE_CHECKING:
    from scripted_runs import InSteps

    import weft
    from weft.engine.host.frontend import FrontEnd
    from weft.integrations.langchain import ChatWeft


@pytest.fixture
def model(engine: weft.Engine) -> ChatWeft:
    """A model that answers at once, with 12 random tokens."""
    from weft.integrations.langchain import ChatWeft

    return ChatWeft(engine=engine, temperature=0, max_tokens=12, model_kwargs={"ignore_eos": True})


@pytest.fixture
def endless(engine: weft.Engine) -> ChatWeft:
    """A model whose calls last for seconds, unless they are aborted."""
    from weft.integrations.langchain import ChatWeft

    return ChatWeft(engine=engine, temperature=0, max_tokens=ENDLESS_TOKENS, model_kwargs={"ignore_eos": True})


@pytest.fixture
def structured(engine: weft.Engine) -> ChatWeft:
    """A model for tool calls and JSON.

    White space is excluded, because schemas allow any amount of it and a random model would generate it without end.
    """
    from weft.integrations.langchain import ChatWeft

    tokenizer: Any = engine._llm.renderer.tokenizer
    blank = {str(token): -100 for token in tokenizer.get_vocab().values() if not tokenizer.decode([token]).strip()}
    return ChatWeft(engine=engine, temperature=0, max_tokens=160, model_kwargs={"logit_bias": blank})


@pytest.fixture
def scripted_or_vllm(request: pytest.FixtureRequest) -> FrontEnd:
    """The session's engine in a case that `scripted_runs` names vllm, else a scripted one.

    The scripted one waits for the clock in a test that has `in_steps`.
    """
    if getattr(request, "param", None) == "vllm":
        return request.getfixturevalue("vllm_engine")
    from scripted_runs import answer_like_a_tiny_model

    clock = request.getfixturevalue("fake_clock") if "in_steps" in request.fixturenames else None
    return request.getfixturevalue("scripted_engine")(answer_like_a_tiny_model, latency_s=0.5, clock=clock)


@pytest.fixture
def in_steps(request: pytest.FixtureRequest, engine: FrontEnd) -> InSteps:
    """Runs a coroutine. After it comes the number of the calls that overlap in each step.

    On a scripted engine, the clock lets them overlap. On vLLM, parallel calls overlap by themselves.
    """
    from scripted_runs import run_in_steps

    from weft.testing import ScriptedEngine

    if isinstance(engine, ScriptedEngine):
        return partial(run_in_steps, engine, request.getfixturevalue("fake_clock"))
    return lambda coroutine, *_steps: coroutine
