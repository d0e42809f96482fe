"""smolagents: an agent with a managed agent."""

from __future__ import annotations

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: The city.
    """
    return f"{city}: warm"


model = OpenAIServerModel("scripted", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
reporter = ToolCallingAgent(
    tools=[weather], model=model, name="reporter", description="Knows the weather.", max_steps=4
)
chief = ToolCallingAgent([], model, managed_agents=[reporter], max_steps=4)
chief.run("How is the weather in Rome?")
