"""smolagents: an agent with a managed agent."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: The city.
    """
    return f"{city}: warm"


run = {"default_headers": {"weft-program-id": str(uuid4())}} if sys.argv[1] == "header" else None
url = os.environ["OPENAI_BASE_URL"]
model = OpenAIServerModel("scripted", api_base=url, api_key="none", client_kwargs=run)
reporter = ToolCallingAgent(
    tools=[weather], model=model, name="reporter", description="Knows the weather.", max_steps=4
)
if sys.argv[1] == "header":  # two at once that share nothing
    with ThreadPoolExecutor() as pool:
        both = [ToolCallingAgent([], model, max_steps=2) for _ in range(2)]
        list(pool.map(lambda agent, thing: agent.run(f"Name a {thing}."), both, ("fish", "bird")))
elif sys.argv[1] == "two at once":
    with ThreadPoolExecutor() as pool:
        reporters = [ToolCallingAgent([weather], model, max_steps=4) for _ in range(2)]
        list(pool.map(lambda agent, city: agent.run(f"How is the weather in {city}?"), reporters, ("Rome", "Oslo")))
elif sys.argv[1] == "resume":
    reporter.run("How is the weather in Rome?")
    reporter.run("And tomorrow?", reset=False)
elif sys.argv[1] == "planning":
    ToolCallingAgent([weather], model, max_steps=4, planning_interval=2).run("How is the weather in Rome?")
else:
    chief = ToolCallingAgent([], model, managed_agents=[reporter], max_steps=4)
    chief.run("How is the weather in Rome?")
