"""Runs on the scripted engine: answers like those of the tiny model, and calls that overlap by the script."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import pytest
from polling import until

from weft.testing import FakeClock, Reply, ScriptedEngine

InSteps = Callable[..., Awaitable[Any]]  # the fixture `in_steps`

# For tests whose engine is the fixture `scripted_or_vllm`.
_ON_VLLM = pytest.param("vllm", marks=pytest.mark.engine)
on_vllm_too = pytest.mark.parametrize("scripted_or_vllm", ["scripted", _ON_VLLM], indirect=True)
on_vllm_only = pytest.mark.parametrize("scripted_or_vllm", [_ON_VLLM], indirect=True)


def answer_like_a_tiny_model(body: Mapping[str, Any]) -> Reply:
    """A scripted answer that has what the tests use of the tiny model's: twelve words without a meaning, the same for
    the same messages, or one of the texts or a call of the first tool where the request demands that."""
    random_words = random.Random(json.dumps(body["messages"], default=str))
    if texts := (body.get("structured_outputs") or {}).get("choice"):
        text = random_words.choice(texts)
        if not body.get("tools") or body.get("tool_choice") == "none":
            return Reply(text)
        text, *tools = text.split("\n<tool_call>\n")
        calls = [json.loads(tool.removesuffix("\n</tool_call>")) for tool in tools]
        return Reply(text, [(call["name"], call["arguments"]) for call in calls])
    if body.get("tool_choice") == "required":
        function = body["tools"][0]["function"]
        arguments = {name: each["enum"][0] for name, each in function["parameters"]["properties"].items()}
        return Reply(tool_calls=[(function["name"], arguments)])
    return Reply(" ".join(f"{random_words.getrandbits(24):06x}" for _ in range(12)))


async def run_in_steps(engine: ScriptedEngine, clock: FakeClock, run: Coroutine[Any, Any, Any], *steps: int) -> Any:
    """Run something on a loop of its own, and let each step's calls overlap: none is answered before all have begun.

    Args:
        engine: The engine, which waits for the clock.
        clock: The clock.
        run: What makes the calls.
        steps: The number of calls in each step.

    Returns:
        What the coroutine returns.
    """
    task = asyncio.create_task(asyncio.to_thread(asyncio.run, run))
    begun = 0
    for calls in steps:
        begun += calls
        await until(lambda begun=begun: task.done() or len(engine.calls) >= begun)
        if task.done():
            break
        await engine.until_waiting(calls)
        clock.advance(1.0)
    return await task
