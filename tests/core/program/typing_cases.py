"""What type checkers must accept and refuse of decorated functions and of engines.

A line that must be refused has the comment `# refused`. `test_typing.py` runs the checkers over this file. Nothing here
is executed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, assert_type

from langchain_core.runnables import Runnable
from langgraph.graph.state import CompiledStateGraph

import weft


@weft.program
async def last(question: str, program: weft.Program) -> int:
    return len(question) + len(program.name)


@weft.program
async def first(program: weft.Program, question: str, times: int = 1) -> int:
    return len(question) * times + len(program.name)


@weft.program(name="renamed", tags=["typed"])
async def with_options(question: str, times: int, program: weft.Program, *, loud: bool = False) -> int:
    return len(question) * times + loud + len(program.name)


@weft.program
async def after_four(a: str, b: int, c: float, d: bytes, program: weft.Program, *, loud: bool = False) -> int:
    return len(a) + b + int(c) + len(d) + loud + len(program.name)


@weft.program
async def optional(question: str, program: weft.Program | None = None, times: int = 1) -> int:
    return len(question) * times + (program is None)


@weft.program
def blocking(question: str, program: weft.Program) -> int:
    return len(question) + len(program.name)


@weft.program
async def stream(question: str, program: weft.Program) -> AsyncGenerator[str]:
    yield question + program.name


@weft.program
async def without_annotation(question: str, program: weft.Program):  # type: ignore[no-untyped-def] # noqa: ANN201
    yield question + program.name


@weft.program
def pieces(question: str, program: weft.Program) -> Generator[str]:
    yield question + program.name


@weft.program
async def keyword_only(question: str, *, program: weft.Program) -> int:
    return len(question) + len(program.name)


class Agent:
    @weft.program
    async def answer(self, question: str, program: weft.Program) -> int:
        return len(question) + len(program.name)

    @weft.program
    async def vote(self, program: weft.Program, question: str, times: int = 1) -> int:
        return len(question) * times + len(program.name)


async def results_are_known(program: weft.Program) -> None:
    assert_type(await last("x"), int)
    assert_type(await last("x", program=program), int)
    assert_type(await last.options(session_id="user")("x"), int)
    assert_type(await first("x"), int)
    assert_type(await first("x", times=2), int)
    assert_type(await first(question="x", times=2), int)
    assert_type(await first("x", 2, program=program), int)
    assert_type(await with_options("x", 2, loud=True), int)
    assert_type(await after_four("x", 2, 0.5, b""), int)
    assert_type(await after_four("x", 2, 0.5, b"", loud=True, program=program), int)
    assert_type(await optional("x", times=2), int)
    assert_type(blocking("x"), int)
    assert_type(await keyword_only("x"), int)
    async for text in stream("x"):
        assert_type(text, str)
    async for text in without_annotation("x"):
        text.upper()
    for text in pieces("x"):
        assert_type(text, str)


async def methods_are_bound(agent: Agent, program: weft.Program) -> None:
    assert_type(await agent.answer("x"), int)
    assert_type(await agent.answer("x", program=program), int)
    assert_type(await agent.vote("x", times=2), int)
    assert_type(await agent.vote(question="x"), int)
    assert_type(await Agent.answer(agent, "x"), int)
    assert_type(await Agent.vote.options(session_id="user")(agent, "x"), int)


async def wrong_calls_are_refused(agent: Agent) -> None:
    await last(1, 2, 3, foo="x")  # refused
    await last(1)  # refused
    await last("x", "y")  # refused
    await last()  # refused
    await last(question="x")  # refused: Python has no type that knows the names before the program
    await first(1)  # refused
    await first("x", foo=1)  # refused
    await first()  # refused
    await with_options("x", "y")  # refused
    await with_options("x")  # refused
    await after_four("x", 2, 0.5)  # refused
    await after_four("x", 2, 0.5, "")  # refused
    await with_options("x", 1, quiet=True)  # refused
    blocking(1)  # refused
    blocking()  # refused
    stream(1, 2)  # refused
    await agent.answer(1, 2)  # refused
    await agent.answer()  # refused
    await agent.vote()  # refused
    await agent.vote(1)  # refused
    await agent.vote("x", foo=1)  # refused
    await keyword_only(1, 2)  # accepted: Python has no type for a function less a parameter that is keyword-only
    last.options(nme="x")  # refused


async def arguments_of_an_engine_are_known(settings: dict[str, Any]) -> None:
    assert_type(await weft.Engine.create("m", policy="atlas", max_calls=3, max_num_seqs=4), weft.Engine)
    assert_type(await weft.Engine.create("m", **settings), weft.Engine)
    weft.Engine("m", max_model_len=4096, kv_transfer_config=None)
    weft.Engine("m", **settings)
    several = await weft.AsyncMultiLLMEngine.create("m", replicas=2, enforce_eager=True)
    assert_type(several, weft.AsyncMultiLLMEngine)
    await weft.Engine.create("m", max_cals=3)  # refused
    await weft.Engine.create("m", max_calls="3")  # refused
    await weft.Engine.create("m", max_num_seqs="four")  # refused
    await weft.Engine.create("m", "atlas")  # refused
    weft.Engine("m", max_cals=3)  # refused
    await weft.AsyncMultiLLMEngine.create("m", replica=2)  # refused


async def the_config_of_a_program_is_one_of_langchain(
    agent: Runnable[str, str], graph: CompiledStateGraph[Any, Any, Any, Any], program: weft.Program
) -> None:
    await agent.ainvoke("x", config=program.config())
    await agent.ainvoke("x", program.config(recursion_limit=50))
    graph.invoke({}, config=program.config())
    async for _ in graph.astream({}, program.config()):
        pass
