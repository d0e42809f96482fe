"""Clients of others, as their users install them, against a live `weft serve`: each agent is one program without an id.

Every client asks, lets the model call a tool, and asks again with the tool's result. Structured output forces the call,
because the model is random. Two agents of each kind run at once, with the same words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import agents
import anthropic
import openai
import pytest
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    UserMessage,
)
from autogen_core.tools import ParametersSchema, ToolSchema
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from served import KEY, Served

pytestmark = pytest.mark.engine

QUESTION = "What is the weather?"
RESULT = "It rains."
TOKENS = 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}

# From the server's address, the agent's name and what is closed after the test, to the number of the agent's calls.
Agent = Callable[[str, str, ExitStack], int]


def openai_chat(url: str, name: str, _stack: ExitStack) -> int:
    """OpenAI's SDK on Chat Completions, with a stream for the last answer."""
    tools: Any = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {name}"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        first = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=TOKENS,
        )
        message = first.choices[0].message
        assert message.tool_calls
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]
        parts = client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=8, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And tomorrow?"}]
        client.chat.completions.create(model="tiny", messages=messages, tools=tools, max_tokens=4)
    return 3


def anthropic_messages(url: str, name: str, _stack: ExitStack) -> int:
    """Anthropic's SDK on Messages, with a stream for the last answer."""
    tools: Any = [{"name": "weather", "description": "", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {name}"}]
    with anthropic.Anthropic(base_url=url, api_key=KEY) as client:
        first = client.messages.create(
            model="tiny",
            messages=messages,
            tools=tools,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=TOKENS,
        )
        calls = [block for block in first.content if block.type == "tool_use"]
        assert calls
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        with client.messages.stream(model="tiny", messages=messages, tools=tools, max_tokens=8) as stream:
            last = stream.get_final_message()
        messages += [{"role": "assistant", "content": last.content}, {"role": "user", "content": "And tomorrow?"}]
        client.messages.create(model="tiny", messages=messages, tools=tools, max_tokens=4)
    return 3


@tool
def weather(city: str) -> str:
    """Say what the weather is."""
    del city
    return RESULT


def langchain(model: Any, name: str, **one_call: Any) -> int:
    """Two turns of an agent with any of LangChain's models."""
    messages: list[BaseMessage] = [HumanMessage(f"{QUESTION} {name}")]
    schema = {"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}
    answer = model.bind_tools([schema], tool_choice="any", **one_call).invoke(messages)
    assert answer.tool_calls
    messages.append(answer)
    messages += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    model.bind_tools([schema]).invoke(messages)
    return 2


def langchain_openai(url: str, name: str, stack: ExitStack) -> int:
    """LangChain's ChatOpenAI. Models with the same address share their connections."""
    model = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model="tiny", max_tokens=TOKENS)  # type: ignore[arg-type,call-arg]
    stack.callback(model.root_client.close)
    return langchain(model, name, parallel_tool_calls=False)


def langchain_anthropic(url: str, name: str, stack: ExitStack) -> int:
    """LangChain's ChatAnthropic. Models with the same address share their connections."""
    model = ChatAnthropic(base_url=url, api_key=KEY, model="tiny", max_tokens=TOKENS)  # type: ignore[arg-type,call-arg]
    stack.callback(model._client.close)
    return langchain(model, name, parallel_tool_calls=False)


def autogen(url: str, name: str, _stack: ExitStack) -> int:
    """AutoGen's client of OpenAI's API."""
    return asyncio.run(_autogen(url, name))


async def _autogen(url: str, name: str) -> int:
    client = OpenAIChatCompletionClient(
        model="tiny",
        base_url=f"{url}/v1",
        api_key=KEY,
        max_tokens=TOKENS,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": ModelFamily.UNKNOWN,
        },
    )
    schema = ToolSchema(name="weather", description="Say what the weather is.", parameters=ParametersSchema(**SCHEMA))
    user = UserMessage(content=f"{QUESTION} {name}", source="user")
    one_call = {"parallel_tool_calls": False}
    first = await client.create([user], tools=[schema], tool_choice="required", extra_create_args=one_call)
    assert not isinstance(first.content, str)
    results = [
        FunctionExecutionResult(content=RESULT, call_id=call.id, name=call.name, is_error=False)
        for call in first.content
        if isinstance(call, FunctionCall)
    ]
    said = AssistantMessage(content=first.content, source="assistant")
    await client.create([user, said, FunctionExecutionResultMessage(content=results)], tools=[schema])
    await client.close()
    return 2


def agents_sdk(url: str, name: str, _stack: ExitStack) -> int:
    """OpenAI's Agents SDK, whose runner calls the tool and asks again."""
    return asyncio.run(_agents_sdk(url, name))


async def _agents_sdk(url: str, name: str) -> int:
    async def run_tool(_context: Any, arguments: str) -> str:
        assert json.loads(arguments) == {"city": "Rome"}
        return RESULT

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        agent = agents.Agent(
            name="weather",
            instructions="Answer.",
            tools=[agents.FunctionTool("weather", "Say what the weather is.", SCHEMA, run_tool)],
            model=agents.OpenAIChatCompletionsModel("tiny", client),
            model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS),
        )
        config = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(agent, f"{QUESTION} {name}", max_turns=3, run_config=config)
    return len(result.raw_responses)


AGENTS: dict[str, Agent] = {
    "OpenAI SDK": openai_chat,
    "Anthropic SDK": anthropic_messages,
    "ChatOpenAI": langchain_openai,
    "ChatAnthropic": langchain_anthropic,
    "AutoGen": autogen,
    "Agents SDK": agents_sdk,
}


def calls_by_program(served: Served) -> dict[str, int]:
    return {row["program_id"]: row["calls"] for row in served.client.get("/weft/programs").json()["programs"]}


@pytest.mark.parametrize("kind", AGENTS)
def test_each_of_two_agents_at_once_is_one_program(served: Served, kind: str) -> None:
    """All calls of an agent are in one program, and two agents are two programs, although nobody sends an id."""
    before = calls_by_program(served)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _number: AGENTS[kind](served.url, kind, stack), range(2)))
    new = {program: calls for program, calls in calls_by_program(served).items() if program not in before}
    assert made[0] >= 2
    assert sorted(new.values()) == sorted(made)
