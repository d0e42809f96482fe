"""AutoGen: an agent, and teams by selector, swarm and Magentic-One."""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import uuid4

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import MagenticOneGroupChat, SelectorGroupChat, Swarm
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

run = {"weft-program-id": str(uuid4())} if sys.argv[1] == "header" else None
MODEL = OpenAIChatCompletionClient(
    model="scripted",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key="none",
    default_headers=run,
    model_info={
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": ModelFamily.UNKNOWN,
    },
)


async def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def team(kind: str) -> SelectorGroupChat | Swarm | MagenticOneGroupChat:
    end = TextMentionTermination("THE END") | MaxMessageTermination(12)
    if kind == "swarm":
        desk = AssistantAgent("desk", MODEL, handoffs=["reporter"], system_message="You are the desk.")
        reporter = AssistantAgent("reporter", MODEL, tools=[weather], system_message="You are the reporter.")
        return Swarm([desk, reporter], termination_condition=end)
    tools = [weather] if kind == "selector-with-a-tool" else None
    writer = AssistantAgent("writer", MODEL, tools=tools, description="Writes.", system_message="You are the writer.")
    editor = AssistantAgent("editor", MODEL, description="Edits.", system_message="You are the editor.")
    if kind == "magentic":
        return MagenticOneGroupChat([writer, editor], MODEL, termination_condition=end)
    return SelectorGroupChat([writer, editor], MODEL, termination_condition=end, allow_repeated_speaker=True)


async def main(case: str) -> None:
    if case in ("one run", "resume", "abort"):
        agent = AssistantAgent(
            "reporter", MODEL, tools=[weather], reflect_on_tool_use=True, system_message="You are the reporter."
        )
        for task in ("How is the weather in Rome?", *(["And tomorrow?"] if case == "resume" else [])):
            await agent.run(task=task)
        return
    if case == "header":  # two at once that share nothing
        both = [AssistantAgent(f"agent_{thing}", MODEL) for thing in ("fish", "bird")]
        await asyncio.gather(*(each.run(task=f"Name a {each.name}.") for each in both))
        return
    kind, _, how = case.partition(" ")
    cities = ["Rome", "Oslo"] if how == "two at once" else ["Rome"]
    await asyncio.gather(*(team(kind).run(task=f"Write about ships in {city}.") for city in cities))


asyncio.run(main(sys.argv[1]))
