"""langchain-tests' standard suites for chat models, on a real engine with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_tests", reason="the dev extra is not installed")

from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

import weft
from weft.integrations.langchain import ChatWeft

# The suites leave it to us what runs their coroutines; here it is anyio's plugin, as everywhere.
pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[weft.Engine]:
    """An engine on the embedded model: the suites look at what it says."""
    with weft.Engine(
        dtype="float32",  # where ties between tokens would be broken one way here and another way there
        max_num_seqs=4,
        max_model_len=4096,
        enforce_eager=True,
        use_tqdm_on_load=False,
    ) as engine:
        yield engine
        assert len(engine.table) == 0


class _OnWeft:
    """What both suites are told about `ChatWeft`."""

    @pytest.fixture(autouse=True)
    def _engine(self, smollm2: weft.Engine) -> None:
        self._smollm2 = smollm2

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        """What is tested."""
        return ChatWeft

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How it is made."""
        return {"engine": self._smollm2, "temperature": 0}

    @property
    def supports_json_mode(self) -> bool:
        """It does, by structured output."""
        return True

    @property
    def model_override_value(self) -> str:
        """The engine has this one only."""
        return self._smollm2.model


class TestChatWeftUnit(_OnWeft, ChatModelUnitTests):
    """What needs no call."""


class TestChatWeftIntegration(_OnWeft, ChatModelIntegrationTests):
    """What makes calls."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """A model of 135 million parameters repeats itself, and would do so for ever."""
        return {**super().chat_model_params, "max_tokens": 100, "model_kwargs": {"frequency_penalty": 0.5}}

    @pytest.mark.xfail(reason="held to JSON without a schema, the model puts objects into objects, not the two keys")
    def test_json_mode(self, model: BaseChatModel) -> None:
        """The suite's."""
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="asked for the weather, the model answers of its own accord and calls no tool")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        """The suite's."""
        super().test_agent_loop(model)
