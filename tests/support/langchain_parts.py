"""Shared by the tests of the LangChain integration: what a call reports about itself."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult


class CallRecorder(BaseCallbackHandler):
    """A user's own callback handler, which records the reports of finished calls."""

    run_inline = True

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **_kwargs: Any) -> None:
        """Record the reports of a call's messages."""
        for generations in response.generations:
            self.calls += [report(generation.message) for generation in generations]  # type: ignore[union-attr]


def report(message: BaseMessage) -> dict[str, Any]:
    """The ids and the account of the call that generated a message."""
    found: list[dict[str, Any]] = message.response_metadata["weft"]
    assert len(found) == 1
    return found[0]
