"""Two hundred programs of mixed shapes and both frameworks at once: every call belongs to its program."""

from __future__ import annotations

import asyncio
import operator
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypedDict

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_core.models import UserMessage
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

import weft
from weft.core.process_rows import ProgramState
from weft.integrations.autogen import WeftChatCompletionClient, bind_team
from weft.integrations.langchain import ChatWeft

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

PROGRAMS = 200
TICKET = re.compile(r"Ticket \d{4}")

Shape = Callable[[str, weft.Engine, weft.Program], Awaitable[int]]


def chat(engine: weft.Engine) -> ChatWeft:
    return ChatWeft(engine=engine, temperature=0, max_tokens=4)


async def chain(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """Three calls in a chain, the last one streamed."""
    model, config = chat(engine), program.config()
    for _ in range(2):
        await model.ainvoke(ticket, config=config)
    async for _ in model.astream(ticket, config=config):
        pass
    return 3


async def branches(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """LCEL: three parallel calls, then a join."""
    model = chat(engine)
    runnable = RunnableParallel(dict.fromkeys("abc", model)) | RunnableLambda(lambda _: ticket) | model
    await runnable.ainvoke(ticket, config=program.config())
    return 4


async def threads(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """A sync batch in a thread. LangChain distributes it over further threads."""
    await asyncio.to_thread(chat(engine).batch, [ticket] * 3, config=program.config())
    return 3


async def helpers(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """Coroutines that are gathered inside a runnable, and get no config."""
    model = chat(engine)

    async def helper() -> None:
        for _ in range(2):
            await model.ainvoke(ticket)

    async def both(_: str) -> None:
        await asyncio.gather(helper(), helper())

    await RunnableLambda(both).ainvoke(ticket, config=program.config())
    return 4


async def map_reduce(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """LangGraph: `Send` to three workers, then a node that reduces."""

    class State(TypedDict):
        found: Annotated[list[str], operator.add]

    model = chat(engine)

    async def work(_: Any) -> dict[str, list[str]]:
        message: BaseMessage = await model.ainvoke(ticket)
        return {"found": [message.text]}

    async def reduce(_: State) -> dict[str, list[str]]:
        await model.ainvoke(ticket)
        return {"found": []}

    graph: Any = StateGraph(State)
    graph.add_node("work", work)
    graph.add_node("reduce", reduce)
    graph.add_conditional_edges(START, lambda _: [Send("work", {}) for _ in range(3)], ["work"])
    graph.add_edge("work", "reduce")
    graph.add_edge("reduce", END)
    await graph.compile().ainvoke({"found": []}, config=program.config())
    return 4


async def bound_client(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """AutoGen's client alone: two parallel calls, then one."""
    client = WeftChatCompletionClient(engine, temperature=0, max_tokens=4).bind(program, agent="solo")
    messages = [UserMessage(content=ticket, source="user")]
    await asyncio.gather(client.create(messages), client.create(messages))
    async for _ in client.create_stream(messages):
        pass
    return 3


def agents(engine: weft.Engine, *names: str) -> list[AssistantAgent]:
    client = WeftChatCompletionClient(engine, temperature=0, max_tokens=4, ignore_eos=True)
    return [AssistantAgent(name, client) for name in names]


async def round_robin(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """An AutoGen team, whose agents run in tasks of the runtime."""
    team = RoundRobinGroupChat(list(agents(engine, "a", "b")), termination_condition=MaxMessageTermination(4))
    await bind_team(team, program).run(task=ticket)
    return 3


async def graph_flow(ticket: str, engine: weft.Engine, program: weft.Program) -> int:
    """An AutoGen flow with fan-out and fan-in."""
    first, left, right, last = agents(engine, "first", "left", "right", "last")
    builder = DiGraphBuilder()
    for agent in (first, left, right, last):
        builder.add_node(agent)
    builder.add_edge(first, left).add_edge(first, right).add_edge(left, last).add_edge(right, last)
    team = GraphFlow(participants=builder.get_participants(), graph=builder.build())
    await bind_team(team, program).run(task=ticket)
    return 4


SHAPES: list[Shape] = [chain, branches, threads, helpers, map_reduce, bound_client, round_robin, graph_flow]


async def test_two_hundred_programs_at_once(engine: weft.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt names its program by a ticket, so the program of each call at the engine can be checked."""
    programs_of: dict[str, set[str]] = defaultdict(set)  # ids of programs by ticket
    calls: dict[str, int] = defaultdict(int)  # number of calls by id of the program
    open_call = engine.call_path.open

    def record(body: Any, program: weft.Program, identity: Any, **options: Any) -> Any:
        (ticket,) = set(TICKET.findall(str(body["messages"])))
        programs_of[ticket].add(program.program_id)
        calls[program.program_id] += 1
        assert identity.program_id == program.program_id
        return open_call(body, program, identity, **options)

    monkeypatch.setattr(engine.call_path, "open", record)
    monkeypatch.setattr(
        engine._link.endpoint(None).admission, "_limit", lambda: 1000
    )  # the default would refuse some calls
    programs: dict[str, weft.Program] = {}

    @weft.program
    async def run(shape: Shape, ticket: str, program: weft.Program) -> int:
        programs[ticket] = program
        return await shape(ticket, engine, program)

    tickets = [f"Ticket {number:04d}" for number in range(PROGRAMS)]
    expected = await asyncio.gather(*(run(SHAPES[n % len(SHAPES)], ticket) for n, ticket in enumerate(tickets)))
    for ticket, count in zip(tickets, expected, strict=True):
        program = programs[ticket]
        assert programs_of[ticket] == {program.program_id}
        assert program.state is ProgramState.FINISHED
        row = program.row
        assert row is not None
        assert calls[program.program_id] == row.calls == len(program.graph.calls) == count
        assert row.account.output_tokens >= count
    assert len(engine.table) == 0
    assert not engine._in_flight
