"""Google's ADK: an agent as a tool, agents one after the other, and a transfer."""

from __future__ import annotations

import asyncio
import os
import sys

from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

MODEL = LiteLlm("openai/scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def root(kind: str) -> LlmAgent | SequentialAgent:
    reporter = LlmAgent(
        name="reporter", model=MODEL, description="Knows it.", instruction="You are the reporter.", tools=[weather]
    )
    if kind == "sequential":
        editor = LlmAgent(name="editor", model=MODEL, instruction="You are the editor.")
        return SequentialAgent(name="desk", sub_agents=[reporter, editor])
    if kind == "transfer":
        return LlmAgent(name="desk", model=MODEL, instruction="You are the desk.", sub_agents=[reporter])
    return LlmAgent(name="chief", model=MODEL, instruction="You are the chief.", tools=[AgentTool(reporter)])


async def ask(kind: str, city: str) -> None:
    runner = InMemoryRunner(root(kind), app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id=city)
    message = types.Content(role="user", parts=[types.Part(text=f"How is the weather in {city}?")])
    async for _event in runner.run_async(user_id=city, session_id=session.id, new_message=message):
        pass


async def main(case: str) -> None:
    kind, _, how = case.partition(" ")
    await asyncio.gather(*(ask(kind, city) for city in (["Rome", "Oslo"] if how == "two at once" else ["Rome"])))


asyncio.run(main(sys.argv[1]))
