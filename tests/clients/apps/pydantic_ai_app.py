"""pydantic-ai: an agent whose tool asks another agent."""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import uuid4

from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelMessage
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none"))
reporter = Agent(model, system_prompt="You are the reporter.")
chief = Agent(model, system_prompt="You are the chief.")


@chief.tool_plain
async def ask_reporter(question: str) -> str:
    """Ask the reporter."""
    return (await reporter.run(question)).output


@reporter.tool_plain
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


async def shorter(messages: list[ModelMessage]) -> list[ModelMessage]:
    """Have another agent write a summary, as pydantic-ai's documents show it, or with a question of its own."""
    if len(messages) < 5:
        return messages
    asked = "Sum up." if sys.argv[1] == "prompted summary" else None
    summary = await Agent(model, instructions="Sum up this conversation.").run(asked, message_history=messages[:3])
    return summary.new_messages() + messages[-1:]


async def main(case: str) -> None:
    question = "How is the weather in Rome?"
    if case == "two at once":
        await asyncio.gather(chief.run(question), chief.run("How is the weather in Oslo?"))
    elif case == "header":  # two at once that share nothing
        run = {"weft-program-id": str(uuid4())}
        named = OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=AsyncOpenAI(default_headers=run)))
        await asyncio.gather(*(Agent(named).run(f"Name a {thing}.") for thing in ("fish", "bird")))
    elif case == "abort":
        async with reporter.run_stream("Talk for ever.") as result:
            async for _text in result.stream_text(debounce_by=None):
                break
    elif "summary" in case:
        guide = Agent(model, instructions="You are the guide.", capabilities=[ProcessHistory(shorter)])
        said: list[ModelMessage] = []
        for asked in (question, "And the wind?", "And tomorrow?"):
            said = (await guide.run(asked, message_history=said)).all_messages()
    else:
        first = await chief.run(question)
        if case == "resume":
            await chief.run("And tomorrow?", message_history=first.all_messages())


asyncio.run(main(sys.argv[1]))
