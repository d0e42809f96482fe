"""CrewAI: a crew, one after the other and with a manager."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"
from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool

run = {"weft-program-id": str(uuid4())} if sys.argv[1] == "header" else None
model = LLM(model="openai/scripted", base_url=os.environ["OPENAI_BASE_URL"], api_key="none", default_headers=run)


@tool("weather")
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"{city}: warm"


def agent(role: str, tools: list[object]) -> Agent:
    return Agent(role=role, goal=f"To be the {role}.", backstory=f"You are the {role}.", tools=tools, llm=model)


reporter, editor = agent("reporter", [weather]), agent("editor", [])
report = Task(description="Find the weather in Rome.", expected_output="A sentence.", agent=reporter)
if sys.argv[1] == "hierarchical":
    report = Task(description="Find the weather in Rome.", expected_output="A sentence.")
    crew = Crew(agents=[reporter, editor], tasks=[report], process=Process.hierarchical, manager_llm=model)
else:
    edit = Task(description="Make it shorter.", expected_output="A sentence.", agent=editor, context=[report])
    crew = Crew(agents=[reporter, editor], tasks=[report, edit])
if sys.argv[1] == "two at once":

    def find(city: str) -> None:
        one = agent("reporter", [weather])
        task = Task(description=f"Find the weather in {city}.", expected_output="A sentence.", agent=one)
        Crew(agents=[one], tasks=[task]).kickoff()

    with ThreadPoolExecutor() as pool:
        list(pool.map(find, ("Rome", "Oslo")))
elif sys.argv[1] == "header":  # two at once that share nothing

    def kickoff(thing: str) -> None:
        namer = agent(f"namer of a {thing}", [])
        Crew(
            agents=[namer], tasks=[Task(description=f"Name a {thing}.", expected_output="A word.", agent=namer)]
        ).kickoff()

    with ThreadPoolExecutor() as pool:
        list(pool.map(kickoff, ("fish", "bird")))
else:
    crew.kickoff()
