"""LlamaIndex: an agent with a tool, a team with a handoff, and two calls of one run."""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import uuid4

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike

run = {"weft-program-id": str(uuid4())} if sys.argv[1] == "header" else None
model = OpenAILike(
    model="scripted",
    default_headers=run,
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=100_000,
)


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def reporter() -> FunctionAgent:
    return FunctionAgent(
        name="reporter", description="Knows it.", system_prompt="You are the reporter.", tools=[weather], llm=model
    )


async def main(case: str) -> None:
    question = "How is the weather in Rome?"
    if case == "two at once":
        await asyncio.gather(reporter().run(question), reporter().run("How is the weather in Oslo?"))
    elif case == "header":  # two at once that share nothing
        await asyncio.gather(*(model.acomplete(f"Name a {thing}.") for thing in ("fish", "bird")))
    elif case == "handoff":
        desk = FunctionAgent(
            name="desk",
            description="Hands on.",
            system_prompt="You are the desk.",
            tools=[],
            llm=model,
            can_handoff_to=["reporter"],
        )
        await AgentWorkflow(agents=[desk, reporter()], root_agent="desk").run(question)
    else:  # an abort is one, too
        agent = reporter()
        memory = Memory.from_defaults(session_id="one", token_limit=50_000)
        await agent.run(question, memory=memory)
        if case == "resume":
            await agent.run("And tomorrow?", memory=memory)


asyncio.run(main(sys.argv[1]))
