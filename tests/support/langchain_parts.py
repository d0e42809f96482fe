"""Shared by the tests of the LangChain integration: what a call reports about itself, and answers from a script."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from polling import until

from weft.testing import FakeClock, Reply, ScriptedEngine


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


def answer_like_a_tiny_model(body: Mapping[str, Any]) -> Reply:
    """A scripted answer that has what the tests use of the tiny model's: twelve words without a meaning, the same for
    the same messages, or a call of the first tool where the request demands one."""
    if body.get("tool_choice") == "required":
        function = body["tools"][0]["function"]
        arguments = {name: each["enum"][0] for name, each in function["parameters"]["properties"].items()}
        return Reply(tool_calls=[(function["name"], arguments)])
    words = random.Random(json.dumps(body["messages"], default=str))
    return Reply(" ".join(f"{words.getrandbits(24):06x}" for _ in range(12)))


async def run_in_steps(engine: ScriptedEngine, clock: FakeClock, run: Coroutine[Any, Any, Any], *steps: int) -> None:
    """Run something on a loop of its own, and let each step's calls overlap: none is answered before all have begun.

    Args:
        engine: The engine, which waits for the clock.
        clock: The clock.
        run: What makes the calls.
        steps: The number of calls in each step.
    """
    task = asyncio.create_task(asyncio.to_thread(asyncio.run, run))
    begun = 0
    for calls in steps:
        begun += calls
        await until(lambda begun=begun: len(engine.calls) >= begun)
        await engine.until_waiting(calls)
        clock.advance(1.0)
    await task
