"""OpenAI's Agents SDK: an agent as a tool of another one, a handoff, and a judge as its documents show it."""

from __future__ import annotations

import asyncio
import os
import sys
from uuid import uuid4

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    TResponseInputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
QUESTION = "How is the weather in Rome?"


@function_tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


async def main(case: str) -> None:
    kind = OpenAIResponsesModel if "responses" in case else OpenAIChatCompletionsModel
    model = kind("scripted", client)
    reporter = Agent(name="reporter", instructions="You are the reporter.", tools=[weather], model=model)
    tool = reporter.as_tool("ask_reporter", "Ask the reporter.")
    chief = Agent(name="chief", instructions="You are the chief.", tools=[tool], model=model)
    desk = Agent(name="desk", instructions="You are the desk.", handoffs=[reporter], model=model)
    if "two at once" in case:
        await asyncio.gather(Runner.run(chief, QUESTION), Runner.run(chief, "How is the weather in Oslo?"))
    elif case == "header":  # two at once that share nothing but the run
        run = {"weft-program-id": str(uuid4())}
        named = OpenAIChatCompletionsModel("scripted", AsyncOpenAI(default_headers=run))
        agents = [Agent(name=who, instructions=f"You are the {who}.", model=named) for who in ("reporter", "editor")]
        await asyncio.gather(*(Runner.run(agent, "Hello, sea") for agent in agents))
    elif "handoff" in case:
        await Runner.run(desk, QUESTION)
    elif case == "judge":
        writer = Agent(name="writer", instructions="You write outlines.", model=model)
        judge = Agent(name="judge", instructions="You judge what others write.", model=model)
        said: list[TResponseInputItem] = [{"role": "user", "content": "An outline of a book on eels."}]
        for _ in range(2):
            said = (await Runner.run(writer, said)).to_input_list()
            found = await Runner.run(judge, said)
            said.append({"role": "user", "content": f"Feedback: {found.final_output}"})
    elif "resume" in case:
        session = SQLiteSession("one")
        await Runner.run(chief, QUESTION, session=session)
        await Runner.run(chief, "And tomorrow?", session=session)
    elif "abort" in case:
        result = Runner.run_streamed(reporter, "Talk for ever.")
        async for event in result.stream_events():
            if event.type == "raw_response_event" and "delta" in event.data.type:
                result.cancel()
                break
    else:
        await Runner.run(chief, QUESTION)


asyncio.run(main(sys.argv[1]))
