"""Models on the session's engine, for the tests of the LangChain integration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import weft
    from weft.integrations.langchain import ChatWeft


@pytest.fixture
def model(engine: weft.Engine) -> ChatWeft:
    """Answers at once, with 12 tokens of nonsense."""
    from weft.integrations.langchain import ChatWeft

    return ChatWeft(engine=engine, temperature=0, max_tokens=12, model_kwargs={"ignore_eos": True})


@pytest.fixture
def endless(engine: weft.Engine) -> ChatWeft:
    """Answers for seconds, unless it is stopped."""
    from weft.integrations.langchain import ChatWeft

    return ChatWeft(engine=engine, temperature=0, max_tokens=1900, model_kwargs={"ignore_eos": True})


@pytest.fixture
def structured(engine: weft.Engine) -> ChatWeft:
    """For tool calls and JSON. Schemas allow white space without end, which a random model likes: ruled out here."""
    from weft.integrations.langchain import ChatWeft

    tokenizer: Any = engine._llm.renderer.tokenizer
    blank = {str(token): -100 for token in tokenizer.get_vocab().values() if not tokenizer.decode([token]).strip()}
    return ChatWeft(engine=engine, temperature=0, max_tokens=160, model_kwargs={"logit_bias": blank})
