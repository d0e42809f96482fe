"""Agents and teams of every shape: the parents, threads and programs of their calls.

What is tested is Weft's side of AutoGen, so the engine has no model. A test of each kind runs on vLLM, too.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from autogen_agentchat.agents import AssistantAgent, MessageFilterAgent, MessageFilterConfig, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import PerSourceFilter
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import StructuredMessage, ToolCallSummaryMessage
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_parts import babbling, calling, parents, saying, terse, threads
from pydantic import BaseModel
from scripted_runs import InSteps, on_vllm_only, on_vllm_too

import weft
from weft.engine.host.frontend import FrontEnd
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]


@pytest.fixture
def engine(scripted_or_vllm: FrontEnd) -> FrontEnd:
    """The engine of these tests."""
    return scripted_or_vllm


async def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"The sun shines in {city}."


WEATHER = ("weather", {"city": "Paris"})


def agent(name: str, client: WeftChatCompletionClient, **extra: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=f"You are {name}.", **extra)


def sources(result: TaskResult) -> list[str]:
    return [message.source for message in result.messages]


# -- one agent


@on_vllm_too
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_and_its_tools(engine: FrontEnd, streamed: bool) -> None:
    """A call, two tools, a call, two tools and a reflection are one chain, whose calls name the tools before them."""
    client = calling(engine, WEATHER, ("weather", {"city": "Rome"}))
    async with weft.Program() as program:
        asker = agent(
            "asker",
            client.bind(program, agent="asker"),
            tools=[weather],
            max_tool_iterations=2,
            reflect_on_tool_use=True,
            model_client_stream=streamed,
        )
        result = await asker.run(task="How is the weather?")
    assert parents(program) == {"asker1": [], "asker2": ["asker1"], "asker3": ["asker2"]}
    assert len(threads(program)) == 1
    assert [call.tools for call in program.graph.calls] == [(), ("weather",), ("weather",)]
    assert "The sun shines in Rome." in str(result.messages)


@on_vllm_only
async def test_tools_that_a_model_must_call(engine: FrontEnd) -> None:
    """A client whose default is a required tool call makes its agent call a tool."""
    async with weft.Program() as program:
        client = terse(engine, tool_choice="required", parallel_tool_calls=False)
        asker = bind_team(agent("asker", client, tools=[weather]), program)
        result = await asker.run(task="How is the weather?")
    assert isinstance(result.messages[-1], ToolCallSummaryMessage)
    assert result.messages[-1].content.startswith("The sun shines in")


class Ship(BaseModel):
    """The form of a structured answer."""

    kind: Literal["sail", "steam"]


@on_vllm_only
async def test_structured_output_of_an_agent(engine: FrontEnd) -> None:
    """An agent with an output type sends messages of that type."""
    async with weft.Program() as program:
        asker = bind_team(agent("asker", terse(engine), output_content_type=Ship), program)
        result = await asker.run(task="Which ship?")
    last = result.messages[-1]
    assert isinstance(last, StructuredMessage)
    assert isinstance(last.content, Ship)


@on_vllm_too
@pytest.mark.parametrize("steps", [1, 2])
async def test_agents_as_tools_at_once(engine: FrontEnd, in_steps: InSteps, steps: int) -> None:
    """Two agents that run as tools in parallel are branches, and the exact edges make each a chain. The answer joins
    them. Which call of the other agent had ended before a second call, and is a guess, depends on the engine."""
    inner: dict[str, Any] = {"tools": [weather], "reflect_on_tool_use": steps == 2}
    rome = ("weather", {"city": "Rome"})
    writer = agent("writer", calling(engine, WEATHER) if steps == 2 else babbling(engine), **inner)
    critic = agent("critic", calling(engine, rome) if steps == 2 else babbling(engine), **inner)
    tasks = ("writer", {"task": "Write about the harbour."}), ("critic", {"task": "Judge the harbour."})
    chief = agent(
        "chief", calling(engine, *tasks), tools=[AgentTool(writer), AgentTool(critic)], reflect_on_tool_use=True
    )

    async def run() -> weft.Program:
        async with weft.Program() as program:
            await bind_team(chief, program).run(task="Tell me about the harbour.")
        return program

    program = await in_steps(run(), 1, *[2] * steps, 1)
    expected = {"chief1": [], "writer1": ["chief1"], "critic1": ["chief1"]}
    if steps == 2:
        expected |= {"writer2": ["writer1"], "critic2": ["critic1"]}
    expected["chief2"] = [f"critic{steps}", f"writer{steps}"]
    found = parents(program)
    assert {name: [each for each in found[name] if not each.endswith("?")] for name in found} == expected
    assert len(threads(program)) == 2
    assert program.graph.calls[-1].tools == ("writer", "critic")


# -- teams


async def test_round_robin(engine: FrontEnd) -> None:
    """The agents' calls are a chain on one thread, and carry the agents' names."""
    team = RoundRobinGroupChat([agent(name, babbling(engine)) for name in ("ann", "bob")], max_turns=4)
    async with weft.Program() as program:
        result = await bind_team(team, program).run(task="Talk.")
    assert sources(result) == ["user", "ann", "bob", "ann", "bob"]
    assert parents(program) == {"ann1": [], "bob1": ["ann1"], "ann2": ["bob1"], "bob2": ["ann2"]}
    assert len(threads(program)) == 1


@on_vllm_too
async def test_selector(engine: FrontEnd) -> None:
    """The selector's calls are part of the chain, and carry the team's name."""
    names = ["ann", "bob", "cid"]
    team = SelectorGroupChat(
        [agent(name, babbling(engine)) for name in names],
        saying(engine, *names),
        name="chair",
        allow_repeated_speaker=True,
        max_turns=3,
    )
    async with weft.Program() as program:
        result = await bind_team(team, program).run(task="Talk.")
    labels = [call.label for call in program.graph.calls]
    assert labels[::2] == ["chair"] * 3
    assert labels[1::2] == sources(result)[1:]
    assert [len(edges) for edges in parents(program).values()] == [0, 1, 1, 1, 1, 1]
    assert len(threads(program)) == 1


@on_vllm_too
async def test_swarm(engine: FrontEnd) -> None:
    """Agents that hand over to each other make a chain."""
    team = Swarm(
        [
            agent("ann", calling(engine, ("transfer_to_bob", {})), handoffs=["bob"]),
            agent("bob", terse(engine, tool_choice="required", parallel_tool_calls=False), handoffs=["ann"]),
        ],
        termination_condition=MaxMessageTermination(4),
    )
    async with weft.Program() as program:
        await bind_team(team, program).run(task="Talk.")
    assert parents(program) == {"ann1": [], "bob1": ["ann1"], "ann2": ["bob1"]}
    assert len(threads(program)) == 1


def diamond(engine: FrontEnd, **extra: Any) -> GraphFlow:
    """A flow of a, then b and c in parallel, then d."""
    a, b, c, d = (agent(name, babbling(engine, tokens=8 + 6 * n)) for n, name in enumerate("abcd"))
    graph = DiGraphBuilder()
    for node in (a, b, c, d):
        graph.add_node(node)
    graph.add_edge(a, b).add_edge(a, c).add_edge(b, d).add_edge(c, d)
    return GraphFlow([a, b, c, d], graph=graph.build(), **extra)


@on_vllm_too
async def test_graph_flow(engine: FrontEnd, in_steps: InSteps) -> None:
    """Fan-out makes branches on threads of their own, and fan-in joins them. A second run continues the first."""

    async def run() -> tuple[weft.Program, dict[str, list[str]]]:
        async with weft.Program() as program:
            team = bind_team(diamond(engine), program)
            await team.run(task="Talk.")
            first = parents(program)
            await team.run(task="Again.")
        return program, first

    program, first = await in_steps(run(), 1, 2, 1, 1, 2, 1)
    assert first == {"a1": [], "b1": ["a1"], "c1": ["a1"], "d1": ["b1", "c1"]}
    assert list(parents(program).items())[4:] == [("a2", ["d1"]), ("b2", ["a2"]), ("c2", ["a2"]), ("d2", ["b2", "c2"])]
    assert sorted(map(len, threads(program))) == [1, 1, 6]


async def test_graph_flow_with_branches_of_two_steps(engine: FrontEnd, in_steps: InSteps) -> None:
    """GraphFlow waits for all running agents before it starts the next ones. So the next call has all of them as
    parents. Those whose message is not in its input are guesses."""
    agents = {name: agent(name, babbling(engine, tokens=12 + n)) for n, name in enumerate("abcde")}
    only = MessageFilterConfig(per_source=[PerSourceFilter(source="b", position="last", count=1)])
    filtered = MessageFilterAgent("d", agents["d"], only)
    graph = DiGraphBuilder()
    nodes: list[Any] = [agents["a"], agents["b"], agents["c"], filtered, agents["e"]]
    for node in nodes:
        graph.add_node(node)
    graph.add_edge("a", "b").add_edge("a", "c").add_edge("b", filtered).add_edge(filtered, "e").add_edge("c", "e")

    async def run() -> weft.Program:
        async with weft.Program() as program:
            await bind_team(GraphFlow(nodes, graph=graph.build()), program).run(task="Talk.")
        return program

    program = await in_steps(run(), 1, 2, 1, 1)
    assert parents(program) == {"a1": [], "b1": ["a1"], "c1": ["a1"], "d1": ["b1", "c1?"], "e1": ["c1", "d1"]}
    assert sorted(map(sorted, threads(program))) == [["a1", "b1", "d1"], ["c1", "e1"]]  # The older branch is continued.


async def test_teams_inside_teams(engine: FrontEnd) -> None:
    """The calls of a team that is a participant, inside an agent or inside a tool belong to the program."""
    inner = RoundRobinGroupChat(
        [agent("in1", babbling(engine)), agent("in2", babbling(engine))], max_turns=2, name="in"
    )
    mind = SocietyOfMindAgent(
        "mind", RoundRobinGroupChat([agent("idea", babbling(engine))], max_turns=1), babbling(engine)
    )
    crew = RoundRobinGroupChat([agent("mate", babbling(engine))], max_turns=1)
    tool = TeamTool(crew, "crew", "Ask the crew.")
    captain = agent("captain", calling(engine, ("crew", {"task": "Set the sails."})), tools=[tool])
    team = RoundRobinGroupChat([inner, mind, captain], max_turns=3)
    async with weft.Program() as program:
        await bind_team(team, program).run(task="Talk.")
        assert program.row is not None
        assert program.row.calls == 6
    order = ["in11", "in21", "idea1", "mind1", "captain1", "mate1"]
    assert parents(program) == {name: order[max(n - 1, 0) : n] for n, name in enumerate(order)}


async def test_teams_on_branches(engine: FrontEnd, in_steps: InSteps) -> None:
    """Teams on branches run in parallel, and the next call joins them whatever its input is."""

    async def run_team(branch: weft.Program, *names: str) -> None:
        async with branch:
            team = RoundRobinGroupChat([agent(name, babbling(engine)) for name in names], max_turns=2)
            await bind_team(team, branch).run(task="Talk.")

    async def run() -> weft.Program:
        client = babbling(engine)
        async with weft.Program() as program:
            await agent("first", client.bind(program, agent="first")).run(task="Talk.")
            await asyncio.gather(run_team(program.branch(), "ann", "bob"), run_team(program.branch(), "cid", "dan"))
            await agent("last", client.bind(program, agent="last")).run(task="Talk.")
        return program

    program = await in_steps(run(), 1, 2, 2, 1)
    edges = parents(program)
    assert (edges["bob1"], edges["dan1"]) == (["ann1"], ["cid1"])
    assert (edges["ann1"], edges["cid1"], edges["last1"]) == (["first1"], ["first1"], ["bob1", "dan1"])
    assert len(threads(program)) == 2


# -- several programs at once


@on_vllm_too
@pytest.mark.parametrize("started", ["before", "by the first program", "by each team"])
async def test_two_programs_on_one_runtime(engine: FrontEnd, in_steps: InSteps, started: str) -> None:
    """Programs whose teams share a runtime, a client and agent names keep their calls apart."""
    client = babbling(engine)
    clients: dict[str, WeftChatCompletionClient] = {}

    @weft.program
    async def main(task: str, runtime: SingleThreadedAgentRuntime | None, program: weft.Program) -> weft.Program:
        if runtime is not None and runtime._run_context is None:
            runtime.start()
        clients[program.program_id] = own = client.bind(program)
        if task == "flow":
            team: Any = diamond(engine, runtime=runtime)
        else:
            team = RoundRobinGroupChat([agent(name, own) for name in ("a", "b")], max_turns=6, runtime=runtime)
        result = await bind_team(team, program).run(task=f"Talk about the {task}.")
        assert len(result.messages) == (5 if task == "flow" else 7)
        return program

    async def run() -> list[weft.Program]:
        runtime = None if started == "by each team" else SingleThreadedAgentRuntime()
        if runtime is not None and started == "before":
            runtime.start()
        programs = await asyncio.gather(*(main(task, runtime) for task in ("tide", "flow", "moon", "flow", "wind")))
        if runtime is not None:
            await runtime.stop_when_idle()
        return programs

    programs = await in_steps(run(), 5, 7, 5, 3, 3, 3)
    for program, calls in zip(programs, (6, 4, 6, 4, 6), strict=True):
        assert program.row is not None
        assert program.row.calls == len(program.graph) == calls
        if calls == 6:
            assert clients[program.program_id].total_usage().prompt_tokens == program.row.account.prompt_tokens
            assert [call.label for call in program.graph.calls] == ["a", "b"] * 3
            assert len(threads(program)) == 1
        else:
            assert parents(program) == {"a1": [], "b1": ["a1"], "c1": ["a1"], "d1": ["b1", "c1"]}
    ids = [call.call_id for program in programs for call in program.graph.calls]
    assert len(set(ids)) == len(ids)


@on_vllm_too
async def test_a_program_and_calls_without_one(engine: FrontEnd) -> None:
    """The calls of an unbound agent do not belong to a program that runs at the same time, not even from its tools."""
    stray = agent("stray", babbling(engine))

    async def ask_stray() -> str:
        """Ask an agent without a program."""
        return str((await stray.run(task="Talk.")).messages[-1])

    asker = agent("asker", calling(engine, ("ask_stray", {})), tools=[ask_stray])
    before = len(engine.table.ended())
    async with weft.Program("mine") as program:
        await asyncio.gather(
            bind_team(asker, program).run(task="Talk."),
            RoundRobinGroupChat([agent("other", babbling(engine))], max_turns=2).run(task="Talk."),
        )
    assert [call.label for call in program.graph.calls] == ["asker"]
    ended = engine.table.ended()[: len(engine.table.ended()) - before]
    assert sorted((row.info.name, row.calls) for row in ended) == [("chat", 1)] * 3 + [("mine", 1)]
