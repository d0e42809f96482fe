"""Google's ADK: an agent as a tool, agents one after the other, and a transfer."""

from __future__ import annotations

import asyncio
import os
import sys

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.models.lite_llm import LiteLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

MODEL = LiteLlm("openai/scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")


class RunHeader(BasePlugin):
    """Names the run in each request: the invocation is the same for all agents of a run."""

    async def before_model_callback(self, *, callback_context: CallbackContext, llm_request: LlmRequest) -> None:
        options = llm_request.config.http_options or types.HttpOptions()
        options.headers = {**(options.headers or {}), "weft-program-id": callback_context.invocation_id}
        llm_request.config.http_options = options


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def root(kind: str) -> LlmAgent | SequentialAgent | ParallelAgent | LoopAgent:
    if kind == "header":  # two at once that share nothing
        both = [LlmAgent(name=thing, model=MODEL, instruction=f"Name a {thing}.") for thing in ("fish", "bird")]
        return ParallelAgent(name="both", sub_agents=both)
    reporter = LlmAgent(
        name="reporter", model=MODEL, description="Knows it.", instruction="You are the reporter.", tools=[weather]
    )
    editor = LlmAgent(name="editor", model=MODEL, instruction="You are the editor.")
    if kind == "loop":
        return LoopAgent(name="desk", sub_agents=[reporter, editor], max_iterations=2)
    if kind == "sequential":
        return SequentialAgent(name="desk", sub_agents=[reporter, editor])
    if kind == "transfer":
        return LlmAgent(name="desk", model=MODEL, instruction="You are the desk.", sub_agents=[reporter])
    return LlmAgent(name="chief", model=MODEL, instruction="You are the chief.", tools=[AgentTool(reporter)])


async def ask(kind: str, city: str) -> None:
    runner = InMemoryRunner(root(kind), app_name="app", plugins=[RunHeader("run")] if kind == "header" else [])
    session = await runner.session_service.create_session(app_name="app", user_id=city)
    for text in (f"How is the weather in {city}?", *(["And tomorrow?"] if kind == "resume" else [])):
        message = types.Content(role="user", parts=[types.Part(text=text)])
        async for _event in runner.run_async(user_id=city, session_id=session.id, new_message=message):
            pass


async def main(case: str) -> None:
    await asyncio.gather(*(ask(case, city) for city in (["Rome", "Oslo"] if case == "two at once" else ["Rome"])))


asyncio.run(main(sys.argv[1]))
