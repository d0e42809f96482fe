"""pydantic-ai in this process: its spans make exact what lineage could only guess."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cases import PYDANTIC_AI
from span_parts import edges, on_path, page_blocks, provider, run_block

import weft
from weft.integrations.openai import openai_client as bound_client
from weft.integrations.otel import openai_client
from weft.testing import Reply, ScriptedEngine

pytestmark = [pytest.mark.clients, pytest.mark.anyio]
pytest_plugins = ["weft.testing.fixtures"]
__all__ = ["provider"]

MakeEngine = Callable[..., ScriptedEngine]


@pytest.fixture(autouse=True)
def framework(provider: Any) -> None:
    """The real framework, with spans."""
    del provider
    on_path(PYDANTIC_AI)


def answer(request: Mapping[str, Any]) -> Any:
    """The chief asks both reporters at once, and each looks the weather up twice."""
    system, *messages = request["messages"]
    if system["role"] == "user":
        return "Herring."
    done = sum(each["role"] == "tool" for each in messages)
    if "chief" in system["content"]:
        return "Warm." if done else Reply("", [(f"ask_{name}", {"city": "Rome"}) for name in "ab"])
    return "Warm." if done > 1 else Reply("", [("weather", {"city": "Rome"})])


def chief(model: Any) -> Any:
    """An agent whose two tools run an agent each."""
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import Instrumentation

    spans = [Instrumentation()]
    a, b = (Agent(model, name=name, instructions="reporter", capabilities=spans) for name in "ab")
    made = Agent(model, name="chief", instructions="chief", capabilities=spans)

    def weather(city: str) -> str:
        """Look up the weather of a city."""
        return f"{city}: warm"

    @made.tool_plain
    async def ask_a(city: str) -> str:
        """Ask a."""
        return (await a.run(city)).output

    @made.tool_plain
    async def ask_b(city: str) -> str:
        """Ask b."""
        return (await b.run(city)).output

    a.tool_plain(weather)
    b.tool_plain(weather)
    return made


def model(engine: Any, client: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(engine.model, provider=OpenAIProvider(openai_client=client))


async def test_parallel_tools_that_ask_agents(scripted_engine: MakeEngine) -> None:
    """Exact parents, tools and agents' names, in three programs at once that share all agents."""
    engine = scripted_engine(answer)
    agent = chief(model(engine, openai_client(engine)))

    async def one() -> list[str]:
        with weft.Program() as program, program.attach():
            await agent.run("Go.")
        return edges(program)

    asked = [f"{name}{number} <- {name}{number - 1}" for name in "ab" for number in (1, 2)]
    asked += ["a0 <- chief0", "b0 <- chief0", "chief0 <- ", "chief1 <- a2, b2"]
    assert await asyncio.gather(*(one() for _ in range(3))) == [sorted(asked)] * 3


async def test_lineage_alone_guesses(scripted_engine: MakeEngine) -> None:
    """Without spans, a client of the program finds all calls, but not all of what they come after."""
    engine = scripted_engine(answer)
    with weft.Program() as program:
        await chief(model(engine, bound_client(engine, program))).run("Go.")
    assert len(program.graph) == 8
    assert any("?" in edge for edge in edges(program))


async def test_the_example_of_the_page(scripted_engine: MakeEngine) -> None:
    """The call has the agent's name."""
    engine = scripted_engine(answer)
    names = await run_block(page_blocks()[2], weft=weft, engine=engine, client=openai_client(engine))
    assert edges(names["program"]) == ["writer0 <- "]


@pytest.mark.engine
async def test_on_a_real_engine(engine: weft.Engine) -> None:
    """A run on vLLM."""
    from pydantic_ai import Agent
    from pydantic_ai.capabilities import Instrumentation

    made = model(engine, openai_client(engine))
    options: Any = {"capabilities": [Instrumentation()], "model_settings": {"max_tokens": 4}}
    both = [Agent(made, name=name, **options) for name in "ab"]
    with weft.Program() as program, program.attach():
        await asyncio.gather(*(each.run("Go.") for each in both))
    assert edges(program) == ["a0 <- ", "b0 <- "]
