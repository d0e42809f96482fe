"""Agents and workflows of Microsoft Agent Framework. It is imported where the framework's packages are on the path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorResponse,
    Executor,
    WorkflowBuilder,
    WorkflowContext,
    handler,
    orchestrations,
)
from cases import magentic

from weft.integrations.agent_framework import WeftChatClient
from weft.testing import Reply


def answer(request: Mapping[str, Any]) -> Any:
    """What an agent's instructions say that it does: call tools, all at once, and then answer."""
    system = next((each["content"] for each in request["messages"] if each["role"] == "system"), "")
    if "GIVEN OR VERIFIED" in str(request) or "You are the manager" in system:
        return magentic(request)
    if system.startswith("Call ") and not any(each["role"] == "tool" for each in request["messages"]):
        return Reply("", [(name, {"city": "Rome"}) for name in system.removeprefix("Call ").split()])
    return "Ships bring herring and mackerel to the harbour."


class Join(Executor):
    """Asks the last agent, when all have answered."""

    def __init__(self, agent: Any) -> None:
        super().__init__(id="join")
        self.agent = agent

    @handler
    async def join(self, answers: list[AgentExecutorResponse], context: WorkflowContext[Any, str]) -> None:
        assert len(answers) == 2
        await context.yield_output((await self.agent.run("Go on.")).text)


class Team:
    """Agents of one client: `a` uses a tool, `b`, `c` and `d` answer."""

    def __init__(self, engine: Any, **more: Any) -> None:
        self.client = WeftChatClient(engine)
        self.a = Agent(self.client, "Call weather", name="a", description="Knows it.", tools=[weather], **more)
        self.b, self.c, self.d = (
            Agent(self.client, f"You are {name}.", name=name, description="Knows it.", **more) for name in "bcd"
        )

    def chief(self, *tools: Any, **more: Any) -> Any:
        """An agent that calls all tools at once."""
        names = " ".join(getattr(each, "name", None) or each.__name__ for each in tools)
        return Agent(self.client, f"Call {names}", name="chief", tools=list(tools), **more)

    def asking(self, **more: Any) -> Any:
        """An agent with two tools whose code asks agents."""

        async def ask_a(city: str) -> str:
            """Ask a."""
            return str((await self.a.run(city)).text)

        async def ask_b(city: str) -> str:
            """Ask b."""
            return str((await self.b.run(city)).text)

        return self.chief(ask_a, ask_b, **more)

    def fan(self) -> Any:
        """A workflow: a, then b and c at once, then d."""
        first, *both = (AgentExecutor(each) for each in (self.a, self.b, self.c))
        join = Join(self.d)
        builder = WorkflowBuilder(start_executor=first, output_from=[join])
        return builder.add_fan_out_edges(first, both).add_fan_in_edges(both, join).build()


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


async def stream(agent: Any) -> None:
    async for _update in agent.run("Go.", stream=True):
        pass


async def run(team: Team, shape: str) -> None:
    if shape == "tools":
        await team.asking().run("Go.")
    elif shape == "tools in a stream":
        await stream(team.asking())
    elif shape == "agents as tools":
        await team.chief(*(each.as_tool(name=f"ask_{each.name}", arg_name="city") for each in (team.a, team.b))).run(
            "Go."
        )
    elif shape == "sequential":
        await orchestrations.SequentialBuilder(participants=[team.a, team.b]).build().run("Go.")
    elif shape == "concurrent":
        await orchestrations.ConcurrentBuilder(participants=[team.a, team.b]).build().run("Go.")
    elif shape == "fan":
        await team.fan().run("Go.")
    else:
        manager = Agent(team.client, "You are the manager.", name="manager")
        writer = Agent(team.client, "You are the writer.", name="writer", description="Writes.")
        await (
            orchestrations.MagenticBuilder(participants=[writer], manager_agent=manager).build().run("Write on ships.")
        )
