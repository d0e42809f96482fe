"""Calls by the four methods of the OpenAI SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.engine.host.frontend import FrontEnd
from weft.integrations.openai import openai_client, sync_openai_client

QUESTION: list[Any] = [{"role": "user", "content": "Where is the lighthouse?"}]
every_method = pytest.mark.parametrize("how", ["create", "create sync", "stream", "stream sync"])


class Answer:
    """A whole answer, from a completion or from the chunks of a stream."""

    def __init__(self, parts: list[Any]) -> None:
        choices = [part.choices[0] for part in parts if part.choices]
        messages = [getattr(choice, "message", None) or choice.delta for choice in choices]
        self.text = "".join(message.content or "" for message in messages)
        self.finish_reason = next(choice.finish_reason for choice in choices if choice.finish_reason)
        self.weft: dict[str, Any] = next(part.weft for part in parts if hasattr(part, "weft"))
        self.usage: Any = next(part.usage for part in parts if part.usage)


async def ask(engine: FrontEnd, program: weft.Program | None, how: str, /, **request: Any) -> Answer:
    """Make a call by one of the four methods, by default for 12 random tokens."""
    arguments = {"model": engine.model, "messages": QUESTION, **short(**request)}
    if how == "create":
        return Answer([await openai_client(engine, program).chat.completions.create(**arguments)])
    if how == "create sync":
        client = sync_openai_client(engine, program)
        return Answer([await asyncio.to_thread(client.chat.completions.create, **arguments)])
    arguments |= {"stream": True, "stream_options": {"include_usage": True}}
    if how == "stream":
        stream = await openai_client(engine, program).chat.completions.create(**arguments)
        return Answer([chunk async for chunk in stream])
    client = sync_openai_client(engine, program)
    return Answer(await asyncio.to_thread(lambda: list(client.chat.completions.create(**arguments))))


def short(**request: Any) -> dict[str, Any]:
    """Arguments for an answer of 12 random tokens."""
    extra = {"ignore_eos": True, **request.pop("extra_body", {})}
    return {"temperature": 0, "max_tokens": 12, "extra_body": extra, **request}


def endless(**request: Any) -> dict[str, Any]:
    """Arguments for an answer that lasts for seconds."""
    return short(max_tokens=ENDLESS_TOKENS, **request)
