"""LangChain models on the session's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tiny_engine import ENDLESS_TOKENS

if TYPE_CHECKING:
    import weft
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
