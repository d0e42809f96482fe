"""Microsoft's Agent Framework: a tool, workflows one after the other and at once, and Magentic."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

HEADERS = {"weft-program-id": uuid.uuid4().hex} if "with an id" in sys.argv[1] else {}
CLIENT = OpenAIChatCompletionClient(
    model="scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", default_headers=HEADERS
)


def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


async def main(case: str) -> None:
    reporter = Agent(CLIENT, "You are the reporter.", name="reporter", description="Knows it.", tools=[weather])
    editor = Agent(CLIENT, "You are the editor.", name="editor", description="Edits.")
    question = "How is the weather in Rome?"
    if case == "sequential":
        from agent_framework.orchestrations import SequentialBuilder

        await SequentialBuilder(participants=[reporter, editor]).build().run(question)
    elif case.startswith("concurrent"):
        from agent_framework.orchestrations import ConcurrentBuilder

        await ConcurrentBuilder(participants=[reporter, editor]).build().run(question)
    elif case == "magentic":
        from agent_framework.orchestrations import MagenticBuilder

        manager = Agent(CLIENT, "You are the manager.", name="manager")
        await MagenticBuilder(participants=[reporter, editor], manager_agent=manager).build().run(question)
    elif case == "sub-agent":
        tool = reporter.as_tool(name="ask_reporter", arg_name="question")
        await Agent(CLIENT, "You are the chief.", name="chief", tools=[tool]).run(question)
    elif case == "two at once":
        await asyncio.gather(reporter.run(question), reporter.run("How is the weather in Oslo?"))
    else:
        session = reporter.create_session()
        await reporter.run(question, session=session)
        if case == "resume":
            await reporter.run("And tomorrow?", session=session)


asyncio.run(main(sys.argv[1]))
