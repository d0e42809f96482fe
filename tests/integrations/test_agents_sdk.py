"""OpenAI's Agents SDK with the processor of its own spans: what each call comes after, and which tools run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("agents", reason="openai-agents is not installed")

import agents
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from span_parts import edges

import weft
from weft.integrations.otel import openai_client
from weft.integrations.otel.agents_sdk import WeftTracingProcessor
from weft.testing import Reply, ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]

MakeEngine = Callable[..., ScriptedEngine]
ASKED = ["a0 <- chief0", "a1 <- a0", "b0 <- chief0", "b1 <- b0", "chief0 <- ", "chief1 <- a1, b1"]


@pytest.fixture(autouse=True)
def processor() -> Iterator[None]:
    """The SDK tells only our processor of its spans, and nobody after the test."""
    agents.set_trace_processors([WeftTracingProcessor()])
    agents.set_tracing_disabled(False)
    yield
    agents.set_trace_processors([])
    agents.set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def answer(request: Mapping[str, Any]) -> Any:
    """The chief asks both reporters at once, and each looks the weather up."""
    system = request["messages"][0]["content"]
    if any(each["role"] == "tool" for each in request["messages"]):
        return "It is warm."
    names = ("ask_a", "ask_b") if system == "chief" else ("weather",)
    argument = "input" if system == "chief" else "city"
    return Reply("", [(name, {argument: "Rome"}) for name in names])


def chief(engine: Any) -> Agent:
    """An agent with two agents as tools, which are given nothing that would tell them apart."""
    model = OpenAIChatCompletionsModel(engine.model, openai_client(engine))
    both = [Agent(name=name, instructions="reporter", tools=[weather], model=model) for name in "ab"]
    tools = [each.as_tool(f"ask_{each.name}", "Ask.") for each in both]
    return Agent(name="chief", instructions="chief", tools=list(tools), model=model)


async def test_agents_as_tools(scripted_engine: MakeEngine) -> None:
    """Both reporters make their calls at once, and all parents are exact. One agent object serves several programs."""
    agent = chief(scripted_engine(answer))

    async def one() -> list[str]:
        with weft.Program() as program, program.attach():
            await Runner.run(agent, "Go.")
        return edges(program)

    assert await asyncio.gather(*(one() for _ in range(3))) == [ASKED] * 3


async def test_a_stream(scripted_engine: MakeEngine) -> None:
    """A streamed run is the same program."""
    with weft.Program() as program, program.attach():
        async for _event in Runner.run_streamed(chief(scripted_engine(answer)), "Go.").stream_events():
            pass
    assert edges(program) == ASKED


async def test_a_handoff(scripted_engine: MakeEngine) -> None:
    """The agent that takes over comes after the one that handed over."""
    engine = scripted_engine([Reply("", [("transfer_to_b", {})]), "Done."])
    model = OpenAIChatCompletionsModel(engine.model, openai_client(engine))
    last = Agent(name="b", instructions="b", model=model)
    first = Agent(name="a", instructions="a", model=model, handoffs=[last])
    with weft.Program() as program, program.attach():
        await Runner.run(first, "Go.")
    assert edges(program) == ["a0 <- ", "b0 <- a0"]


async def test_without_the_sdks_spans(scripted_engine: MakeEngine) -> None:
    """With tracing disabled the calls belong to the program of the block all the same."""
    agents.set_tracing_disabled(True)
    with weft.Program() as program, program.attach():
        await Runner.run(chief(scripted_engine(answer)), "Go.")
    assert program.row is not None
    assert program.row.calls == 6


@pytest.mark.engine
async def test_on_a_real_engine(engine: weft.Engine) -> None:
    """A run on vLLM."""
    model = OpenAIChatCompletionsModel(engine.model, openai_client(engine))
    settings = agents.ModelSettings(max_tokens=4)
    both = [Agent(name=name, instructions="Talk.", model=model, model_settings=settings) for name in "ab"]
    with weft.Program() as program, program.attach():
        await asyncio.gather(*(Runner.run(each, "Go.") for each in both))
    assert edges(program) == ["a0 <- ", "b0 <- "]
