"""Agents that call other agents, as users of frameworks write them, against a scripted endpoint: one program, no id.

An agent that is called starts with a history of its own. The frameworks' own clients write the requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

import agents
import httpx
import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from weft.core.identity import Evidence, identity_of
from weft.core.identity.items import items_of_answer
from weft.core.identity.lineage import Lineage

URL = "http://model/v1"
TASK = "Find out how many people live in each city of the north, and write a table with the source of each figure."
REPORT = "Two million people live there according to the census, one and a half million in the largest of the cities."


class Endpoint:
    """Answers as a model that hands its task to each tool once, and then reports."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._lineage = Lineage()
        self._numbers = count()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        evidence = identity_of([], body, "-")
        assert isinstance(evidence, Evidence), "the client sends an id"
        placed = self._lineage.place(evidence, body, "-")
        self.found.append(placed.identity.program_id)
        names = [each.get("name") or each["function"]["name"] for each in body.get("tools") or ()]
        number = next(self._numbers)
        parameters = {"research": "input", "delegate": "task", "researcher": "task"}
        called = {item[2] for item in placed.said.items if item[0] == "call"}
        calls = [
            (f"chatcmpl-tool-{number:016x}", name, json.dumps({parameters[name]: TASK} if name in parameters else {}))
            for name in names
            if name not in called
        ][:1]
        as_body = _response if request.url.path.endswith("/responses") else _completion
        answer = {"id": f"answer-{number}", **as_body("" if calls else f"{REPORT} {number}", calls)}
        self._lineage.answered(placed, items_of_answer(answer), "-", None)
        return httpx.Response(200, json=answer)

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self))


def _completion(text: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, name, arguments in calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _response(text: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    output = [
        {"type": "function_call", "id": "f", "call_id": each, "name": name, "arguments": arguments}
        for each, name, arguments in calls
    ]
    fields = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "completed"}
    more = {"object": "response", "created_at": 1, "model": "m", "output": output or [said]}
    return {**more, **fields}


def _agent(endpoint: Endpoint, api: str, name: str, **fields: Any) -> agents.Agent[Any]:
    client = openai.AsyncOpenAI(base_url=URL, api_key="k", http_client=endpoint.client)
    of_chat = api == "chat"
    model = agents.OpenAIChatCompletionsModel("m", client) if of_chat else agents.OpenAIResponsesModel("m", client)
    return agents.Agent(name=name, instructions=f"You are {name}.", model=model, **fields)


async def agents_as_tools(endpoint: Endpoint, api: str) -> None:
    """OpenAI's Agents SDK: an agent is another one's tool."""
    helper = _agent(endpoint, api, "helper")
    top = _agent(endpoint, api, "top", tools=[helper.as_tool("research", "Does research.")])
    await agents.Runner.run(top, "Compare them.", run_config=agents.RunConfig(tracing_disabled=True))


async def agents_handoff(endpoint: Endpoint, api: str) -> None:
    """OpenAI's Agents SDK: an agent hands the conversation to another one."""
    top = _agent(endpoint, api, "top", handoffs=[_agent(endpoint, api, "helper")])
    await agents.Runner.run(top, "Compare them.", run_config=agents.RunConfig(tracing_disabled=True))


async def langgraph(endpoint: Endpoint, api: str) -> None:
    """LangGraph: a supervisor whose tool runs an agent, and a second turn."""
    fields: dict[str, Any] = {"model": "m", "base_url": URL, "api_key": "k", "http_async_client": endpoint.client}
    model = ChatOpenAI(**fields, use_responses_api=api == "responses")
    helper = create_agent(model, tools=[], system_prompt="You search.")

    @tool
    async def delegate(task: str) -> str:
        """Let another agent do a task."""
        found = await helper.ainvoke({"messages": [("user", task)]})
        return str(found["messages"][-1].text)

    top = create_agent(model, tools=[delegate], system_prompt="You delegate.")
    state = await top.ainvoke({"messages": [("user", "Compare them.")]})
    await top.ainvoke({"messages": [*state["messages"], ("user", "And then?")]})


def _autogen(endpoint: Endpoint) -> OpenAIChatCompletionClient:
    skills = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    info: Any = {**skills, "family": ModelFamily.UNKNOWN}
    return OpenAIChatCompletionClient(
        model="m", base_url=URL, api_key="k", model_info=info, http_client=endpoint.client
    )


async def autogen_tool(endpoint: Endpoint, _api: str) -> None:
    """AutoGen: an agent is another one's tool."""
    helper = AssistantAgent("researcher", _autogen(endpoint), description="Does research.")
    top = AssistantAgent("top", _autogen(endpoint), tools=[AgentTool(helper)], max_tool_iterations=3)
    await top.run(task="Compare them.")


async def autogen_team(endpoint: Endpoint, _api: str) -> None:
    """AutoGen: agents that take turns, and get the others' words as a user's."""
    members: list[Any] = [AssistantAgent(name, _autogen(endpoint), system_message=name) for name in ("ann", "ben")]
    await RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(5)).run(task="Compare them.")


TEAMS: dict[str, Callable[[Endpoint, str], Coroutine[Any, Any, None]]] = {
    "Agents SDK, tools": agents_as_tools,
    "Agents SDK, handoff": agents_handoff,
    "LangGraph": langgraph,
    "AutoGen, tools": autogen_tool,
    "AutoGen, team": autogen_team,
}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("team", TEAMS)
def test_a_team_is_one_program(team: str, api: str) -> None:
    """Whatever an agent hands to another one, their calls are of one program."""
    if team.startswith("AutoGen") and api == "responses":
        pytest.skip("its client has Chat Completions only")
    endpoint = Endpoint()
    asyncio.run(TEAMS[team](endpoint, api))
    assert len(endpoint.found) >= 2
    assert len(set(endpoint.found)) == 1
