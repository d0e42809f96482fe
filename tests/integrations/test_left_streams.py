"""Streams that code leaves, by `break` or for a while: a call that the code makes then comes after their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from shapes import edges, expected

import weft
from weft.integrations.langchain import ChatWeft
from weft.testing import ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]
GIVEN: Any = {"messages": []}


@pytest.fixture
def model(scripted_engine: MakeEngine) -> ChatWeft:
    """A model whose answers tell nothing."""
    return ChatWeft(engine=scripted_engine(lambda _: "fine"))


def asks(model: ChatWeft, name: str) -> Callable[[Any], Awaitable[Any]]:
    """The code of a node that makes one call."""

    async def ask(_: Any) -> Any:
        return {"messages": [await model.with_config(run_name=name).ainvoke("Hello")]}

    return ask


def chain(model: ChatWeft, *names: str) -> Any:
    """A graph of nodes in a chain."""
    graph = StateGraph(MessagesState).add_sequence([(name, asks(model, name)) for name in names])
    return graph.add_edge(START, names[0]).compile()


async def call(model: ChatWeft, program: weft.Program, name: str) -> None:
    await model.ainvoke("Go on", program.config(run_name=name))


async def an_agent(model: ChatWeft, program: weft.Program, name: str) -> None:
    await chain(model, name).ainvoke(GIVEN, program.config())


async def a_branch(model: ChatWeft, program: weft.Program, name: str) -> None:
    with program.branch() as branch:
        await call(model, branch, name)


async def around(code: Callable[[], Awaitable[None]], place: str, program: weft.Program) -> None:
    """Run code at the top of a program, or in a run of it."""
    if place == "the top":
        await code()
    else:

        async def run(_: Any) -> None:
            await code()

        await RunnableLambda(run).ainvoke("", program.config())


@pytest.mark.parametrize("place", ["the top", "a run"])
@pytest.mark.parametrize("follows", [call, an_agent, a_branch], ids=lambda each: each.__name__)
async def test_a_call_at_once_after_a_break(model: ChatWeft, follows: Any, place: str) -> None:
    """The stream is not closed yet, and LangChain has not reported its end. The finished node's call is a guess."""
    async with weft.Program() as program:

        async def code() -> None:
            async for _ in chain(model, "a", "b").astream(GIVEN, program.config()):
                break
            await follows(model, program, "end")

        await around(code, place, program)
    assert edges(program.graph) == expected("a~end")
    assert len(program.graph.threads) == 1


@pytest.mark.parametrize("part", ["the whole text", "a quotation", "the message"])
async def test_a_call_after_a_break_that_uses_the_answer(scripted_engine: MakeEngine, part: str) -> None:
    """What the call is given proves the edge."""
    model = ChatWeft(engine=scripted_engine(["an answer that is long enough", "fine"]))
    async with weft.Program() as program:
        async for update in chain(model, "a", "b").astream(GIVEN, program.config()):
            message = update["a"]["messages"][-1]
            break
        texts = {"the whole text": message.text, "a quotation": f"Improve: {message.text}!"}
        given = [HumanMessage(texts[part])] if part in texts else [message, HumanMessage("Go on")]
        await model.ainvoke(given, program.config(run_name="end"))
    assert edges(program.graph) == expected("a>end")


async def test_a_closed_stream_is_exact(model: ChatWeft) -> None:
    """`aclose` reports the end of the stream before the next call."""
    async with weft.Program() as program:
        stream = chain(model, "a", "b").astream(GIVEN, program.config())
        async for _ in stream:
            break
        await stream.aclose()
        await call(model, program, "end")
    assert edges(program.graph) == expected("a>end")


async def test_calls_in_the_body_of_a_loop_over_a_stream(model: ChatWeft) -> None:
    """Each comes after the calls of the nodes so far, and after the one before it."""
    async with weft.Program() as program:
        async for update in chain(model, "a", "b", "c").astream(GIVEN, program.config()):
            await call(model, program, f"after {next(iter(update))}")
    found = edges(program.graph)
    assert {"a~after a", "b~after b", "c~after c", "after a~after b", "after b~after c", "a>b", "b>c"} == {
        edge for edge in found if ">" in edge or "~" in edge
    }


async def test_parallel_nodes_before_a_break(model: ChatWeft) -> None:
    """The code need not have waited for all of them."""
    graph = StateGraph(MessagesState).add_node("a", asks(model, "a")).add_node("b", asks(model, "b"))
    graph.add_node("c", asks(model, "c")).add_edge(START, "a").add_edge(START, "b").add_edge(["a", "b"], "c")
    async with weft.Program() as program:
        async for _ in graph.compile().astream(GIVEN, program.config(), stream_mode="values"):
            if len(program.graph) == 2:
                break
        await call(model, program, "end")
    assert edges(program.graph) == expected("a~end b~end")


async def test_another_task_does_not_come_after_a_stream_that_is_open(model: ChatWeft) -> None:
    """A task beside the one that reads the stream has not waited for its calls."""
    async with weft.Program() as program:
        stream = chain(model, "a", "b").astream(GIVEN, program.config())
        await anext(stream)
        await asyncio.create_task(call(model, program, "other"))
        await stream.aclose()
    assert edges(program.graph) == {"a", "other"}


async def test_a_stream_in_a_stream_that_is_left(model: ChatWeft) -> None:
    """Both are left, and the call comes after what both have done."""
    async with weft.Program() as program:
        outer = chain(model, "a", "b").astream(GIVEN, program.config())
        await anext(outer)
        inner = chain(model, "x", "y").astream(GIVEN, program.config())
        await anext(inner)
        await call(model, program, "end")
        await inner.aclose()
        await outer.aclose()
    assert edges(program.graph) == expected("a~x x~end")


async def test_tasks_that_have_begun_runs_are_not_kept(model: ChatWeft) -> None:
    """A task is remembered as long as runs that it has begun are open."""
    async with weft.Program() as program:
        await chain(model, "a", "b").ainvoke(GIVEN, program.config())
        stream = chain(model, "c", "d").astream(GIVEN, program.config())
        await anext(stream)
        assert len(program._shared.tree._begun) == 1
        await stream.aclose()
        assert program._shared.tree._begun == {}
