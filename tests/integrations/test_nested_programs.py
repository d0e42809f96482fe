"""A program inside a run of another program: each call belongs to the inner one, however LangChain merges callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")
pytest.importorskip("autogen_core", reason="the AutoGen extra is not installed")

from autogen_core.models import UserMessage
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph

import weft
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler
from weft.integrations.openai import openai_client
from weft.testing import ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]
QUESTION: Any = {"messages": [HumanMessage("Hello")]}


def labels(program: weft.Program) -> list[str]:
    """The labels of a program's calls, and after each one those of its parents."""
    graph = program.graph
    return [
        f"{call.label} <- {', '.join(graph[edge.parent].label + ('' if edge.exact else '?') for edge in call.parents)}"
        for call in graph.calls
    ]


FORMS: dict[str, Callable[[ChatWeft], Any]] = {
    "plain": lambda model: model,
    "tools": lambda model: model.bind_tools([]),
    "config": lambda model: model.with_config(tags=["tag"]),
    "sequence": lambda model: model | (lambda message: message),
    "bound sequence": lambda model: (model | (lambda message: message)).with_config(tags=["tag"]),
    "retry": lambda model: model.with_retry(),
    "agent": lambda model: create_agent(model, []),
}


def node(result: Callable[[], Awaitable[str]]) -> Any:
    """A node that puts a text into the state."""

    async def run(_: Any) -> Any:
        return {"messages": [HumanMessage(await result())]}

    return run


def between(model: ChatWeft, part: Any) -> Any:
    """A graph of three nodes: a call "a", the part, and a call "b"."""

    def asks(name: str) -> Any:
        async def ask() -> str:
            return (await model.with_config(run_name=name).ainvoke("Hello")).text

        return node(ask)

    graph = StateGraph(MessagesState).add_sequence([("one", asks("a")), ("two", part), ("three", asks("b"))])
    return graph.add_edge(START, "one").compile()


@pytest.mark.parametrize("how", ["node", "tool"])
@pytest.mark.parametrize("form", FORMS)
async def test_the_innermost_program_gets_the_call(scripted_engine: MakeEngine, form: str, how: str) -> None:
    """A call with the config of a program that was opened inside a run of another one belongs to the inner program.

    Session, tenant and row are the inner program's, too. The outer program has its own calls and edges only.
    """
    engine = scripted_engine(lambda _: "fine")
    model, inner = ChatWeft(engine=engine), list[weft.Program]()
    runnable = FORMS[form](model)

    @weft.program(session_id="inside", tenant="tenant")
    async def look(program: weft.Program) -> str:
        inner.append(program)
        await runnable.ainvoke(QUESTION if form == "agent" else "Hello", config=program.config())
        return "found"

    @tool
    async def search(query: str) -> str:
        """Search."""
        return await look()

    async def ask_tool() -> str:
        return await search.ainvoke({"query": "fog"})

    async with weft.Program("outer", session_id="outside") as outer:
        await between(model, node(look if how == "node" else ask_tool)).ainvoke(QUESTION, config=outer.config())
    (program,) = inner
    assert labels(outer) == ["a <- ", "b <- a"]
    assert len(program.graph) == 1
    rows = {row.info.name: row.info for row in engine.table.ended()}
    assert (rows["look"].session_id, rows["look"].tenant) == ("inside", "tenant")
    assert rows["look"].parent_program_id == program.parent_program_id == outer.program_id
    assert rows["outer"].parent_program_id is None
    assert [call.program_id for call in engine.calls] == [outer.program_id, program.program_id, outer.program_id]


@pytest.mark.parametrize("form", FORMS)
async def test_a_program_opened_before_is_inner_where_it_is_used(scripted_engine: MakeEngine, form: str) -> None:
    """A program that was opened at the top, and is first used inside a run of another one, runs inside that one."""
    engine = scripted_engine(lambda _: "fine")
    model = ChatWeft(engine=engine)
    async with weft.Program("outer") as outer, weft.Program("inner") as inner:

        async def look() -> str:
            given = QUESTION if form == "agent" else "Hello"
            await FORMS[form](model).ainvoke(given, config=inner.config())
            return "found"

        await between(model, node(look)).ainvoke(QUESTION, config=outer.config())
    assert (len(inner.graph), labels(outer)) == (1, ["a <- ", "b <- a"])
    assert inner.parent_program_id == outer.program_id


async def test_a_program_opened_inside_is_inner_wherever_it_is_used(scripted_engine: MakeEngine) -> None:
    """A step of one program makes another one, which is used once the first has ended."""
    engine, made = scripted_engine(lambda _: "fine"), list[weft.Program]()
    model = ChatWeft(engine=engine)

    async def make() -> str:
        made.append(weft.Program("inner"))
        return "made"

    async with weft.Program("outer") as outer:
        await between(model, node(make)).ainvoke(QUESTION, config=outer.config())
    async with made[0] as inner:
        await model.ainvoke("Hello", config=inner.config())
    assert inner.parent_program_id == outer.program_id
    assert labels(outer) == ["a <- ", "b <- a"]


async def test_the_outer_handle_inside_the_inner_program(scripted_engine: MakeEngine) -> None:
    """A call with the outer program's config inside a run of the inner program is at its place in the outer one."""
    engine = scripted_engine(lambda _: "fine")
    model, programs = ChatWeft(engine=engine), list[weft.Program]()
    async with weft.Program("outer") as outer:

        @weft.program
        async def look(program: weft.Program) -> str:
            async def ask(_: Any) -> str:
                await model.ainvoke("Hello", config=program.config(run_name="own"))
                await model.ainvoke("Hello", config=outer.config(run_name="mid"))
                return "found"

            programs.append(program)
            return await RunnableLambda(ask).ainvoke("Hello", config=program.config())

        await between(model, node(look)).ainvoke(QUESTION, config=outer.config())
    assert labels(outer) == ["a <- ", "mid <- a", "b <- mid"]
    assert labels(programs[0]) == ["own <- "]


async def test_clients_of_other_frameworks_inside_a_program(scripted_engine: MakeEngine) -> None:
    """Programs of AutoGen and OpenAI clients that are opened inside a node know the node's program as well."""
    engine = scripted_engine(lambda _: "fine")
    inner: list[weft.Program] = []

    @weft.program
    async def look(program: weft.Program) -> str:
        inner.append(program)
        client = WeftChatCompletionClient(engine).bind(program, agent="agent")
        await client.create([UserMessage(content="Hello", source="user")])
        chat: Any = openai_client(engine, program).chat.completions
        await chat.create(model=engine.model, messages=[{"role": "user", "content": "Hello"}])
        return "found"

    async with weft.Program("outer") as outer:
        await between(ChatWeft(engine=engine), node(look)).ainvoke(QUESTION, config=outer.config())
    assert labels(outer) == ["a <- ", "b <- a"]
    assert (len(inner[0].graph), inner[0].parent_program_id) == (2, outer.program_id)


async def test_programs_of_root_runs_are_inner_programs(scripted_engine: MakeEngine) -> None:
    """A handler that opens a program for each root run opens an inner one inside a run of another program."""
    engine = scripted_engine(lambda _: "fine")
    model = ChatWeft(engine=engine)

    async def look() -> str:
        config: Any = {"callbacks": [ProgramCallbackHandler()], "run_name": "inner"}
        await create_agent(model, []).ainvoke(QUESTION, config=config)
        return "found"

    async with weft.Program("outer") as outer:
        await between(model, node(look)).ainvoke(QUESTION, config=outer.config())
    assert labels(outer) == ["a <- ", "b <- a"]
    parents = {row.info.name: row.info.parent_program_id for row in engine.table.ended()}
    assert parents == {"outer": None, "inner": outer.program_id}


async def test_a_handler_without_a_program_inside_its_own_run(scripted_engine: MakeEngine) -> None:
    """A handler that is given again inside a root run carries the root run's program there."""
    engine = scripted_engine(lambda _: "fine")
    model, handler = ChatWeft(engine=engine), ProgramCallbackHandler()

    async def look() -> str:
        return (await model.ainvoke("Hello", config={"callbacks": [handler]})).text

    await between(model, node(look)).ainvoke(QUESTION, config={"callbacks": [handler]})
    assert [row.calls for row in engine.table.ended()] == [3]


async def test_a_task_that_outlives_the_run_is_no_inner_program(scripted_engine: MakeEngine) -> None:
    """A program is inside another one only while the run is open: context is kept by tasks for ever."""
    engine = scripted_engine(lambda _: "fine")
    model, over, tasks = ChatWeft(engine=engine), asyncio.Event(), list[asyncio.Task[Any]]()
    late: list[weft.Program] = []

    @weft.program
    async def look(program: weft.Program) -> str:
        late.append(program)
        return (await model.ainvoke("Hello", config=program.config())).text

    async def start() -> str:
        async def wait() -> None:
            await over.wait()
            await look()

        tasks.append(asyncio.create_task(wait()))
        return "started"

    async with weft.Program("outer") as outer:
        await between(model, node(start)).ainvoke(QUESTION, config=outer.config())
    over.set()
    await tasks[0]
    assert (late[0].parent_program_id, len(late[0].graph)) == (None, 1)
