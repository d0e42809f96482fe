"""Which tools run, as the process table shows them while agents of every framework wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import weft
from weft.testing import Reply, ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]
TWO = Reply(tool_calls=[("search", {"query": "a"}), ("search", {"query": "b"})])


def running(program: weft.Program) -> list[str]:
    assert program.row is not None
    return [tool.name for tool in program.row.tools_running]


async def test_langchain_tools_run_from_their_start_to_their_end_or_error(scripted_engine: MakeEngine) -> None:
    """One of the two searches fails. Neither runs any more then, before any call follows."""
    pytest.importorskip("langchain_core")
    from langchain_core.tools import tool

    from weft.integrations.langchain import ChatWeft

    seen: list[list[str]] = []

    @tool
    async def search(query: str) -> str:
        """Search for something."""
        seen.append(running(program))
        if query == "b":
            raise ValueError
        return query

    model = ChatWeft(engine=scripted_engine([TWO, "done"]))
    async with weft.Program("agent") as program:
        await model.ainvoke("Look", config=program.config())
        for query in ("a", "b"):
            try:
                await search.ainvoke({"query": query}, config=program.config())
            except ValueError:
                assert query == "b"
            assert running(program) == []
        await model.ainvoke("And now?", config=program.config())
    assert seen == [["search"], ["search"]]
    row = program.row
    assert row is not None
    assert row.tools_running == ()


async def test_openai_tools_run_from_the_answer_that_calls_them(scripted_engine: MakeEngine) -> None:
    """The client runs the tools of an answer, and the next request has their results. A stream calls tools, too."""
    pytest.importorskip("openai")
    from weft.integrations.openai import openai_client

    engine = scripted_engine([TWO, Reply(tool_calls=[("run", {})]), "done"])
    async with weft.Program("agent") as program:
        client = openai_client(engine, program)
        messages: list[Any] = [{"role": "user", "content": "Look"}]
        answer = (await client.chat.completions.create(model=engine.model, messages=messages)).choices[0].message
        assert running(program) == ["search", "search"]
        assert answer.tool_calls
        messages.append(answer.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in answer.tool_calls]
        async for _ in await client.chat.completions.create(model=engine.model, messages=messages, stream=True):
            assert "search" not in running(program)
        assert running(program) == ["run"]


async def test_autogen_tools_run_until_their_results_are_there(scripted_engine: MakeEngine) -> None:
    """Without reflection no call follows the tool, and the team's own events tell that it has returned."""
    pytest.importorskip("autogen_agentchat")
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat

    from weft.integrations.autogen import WeftChatCompletionClient, bind_team

    seen: list[list[str]] = []

    async def search(query: str) -> str:
        """Search for something."""
        seen.append(running(program))
        return query

    client = WeftChatCompletionClient(scripted_engine([Reply(tool_calls=[("search", {"query": "a"})])]))
    team = RoundRobinGroupChat([AssistantAgent("asker", client, tools=[search])], max_turns=1)
    async with weft.Program("agent") as program:
        await bind_team(team, program).run(task="Look")
        assert seen == [["search"]]
        assert running(program) == []


async def test_an_agents_next_call_ends_its_tools(scripted_engine: MakeEngine) -> None:
    """An agent outside of a team says nothing of its tools' ends, but its next call has their results."""
    pytest.importorskip("autogen_agentchat")
    from autogen_agentchat.agents import AssistantAgent

    from weft.integrations.autogen import WeftChatCompletionClient

    async def search(query: str) -> str:
        """Search for something."""
        assert "search" in running(program)
        return query

    client = WeftChatCompletionClient(scripted_engine([TWO, "done"]))
    async with weft.Program("agent") as program:
        agent = AssistantAgent("asker", client.bind(program), tools=[search], reflect_on_tool_use=True)
        await agent.run(task="Look")
        assert running(program) == []
