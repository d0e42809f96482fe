"""The OpenAI SDK: the programs, parents and threads of calls.

What is tested is Weft's side of the SDK, so the engine has no model. Some of the tests run on vLLM, too.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from observers import EndedPrograms, levels
from openai import AsyncOpenAI
from openai_parts import QUESTION, Answer, ask, short
from scripted_runs import InSteps, on_vllm_too

import weft
from weft.engine.host.frontend import FrontEnd
from weft.integrations.openai import openai_client, sync_openai_client

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]


@pytest.fixture
def engine(scripted_or_vllm: FrontEnd) -> FrontEnd:
    """The engine of these tests."""
    return scripted_or_vllm


@on_vllm_too
async def test_fork_and_join(engine: FrontEnd, in_steps: InSteps) -> None:
    """Sequential calls are a chain, parallel calls are a fork, and the next call joins them."""

    async def run() -> tuple[weft.Program, list[Answer]]:
        async with weft.Program() as program:
            first = await ask(engine, program, "create")
            parallel = await asyncio.gather(*(ask(engine, program, how) for how in ("create", "stream")))
            last = await ask(engine, program, "stream sync")
        return program, [first, *parallel, last]

    program, answers = await in_steps(run(), 1, 2, 1)
    calls = [answer.weft for answer in answers]
    assert levels(calls) == [[0], [1, 1], [2]]
    assert program.graph.calls[0].call_id == calls[0]["call_id"]


async def test_branches(engine: FrontEnd, in_steps: InSteps) -> None:
    """The calls of a client on a branch are on a thread of their own."""

    async def twice(program: weft.Program) -> list[dict[str, Any]]:
        async with program.branch() as branch:
            return [(await ask(engine, branch, how)).weft for how in ("create", "stream")]

    async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
        async with weft.Program() as program:
            first, second = await asyncio.gather(twice(program), twice(program))
            return first, second, (await ask(engine, program, "create")).weft

    first, second, last = await in_steps(run(), 2, 2, 1)
    assert levels([*first, *second, last]) == [[0, 0], [1, 1], [2]]
    assert len({call["thread_id"] for call in first}) == len({call["thread_id"] for call in second}) == 1


@on_vllm_too
async def test_lineage_tells_strands_apart(engine: FrontEnd, in_steps: InSteps) -> None:
    """Two strands of calls that run in parallel without branches are told apart by the inputs of the calls."""

    async def strand(name: str, client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Tell {name} about the harbour."}]
        for _ in range(3):
            answer = await client.chat.completions.create(model=engine.model, messages=messages, **short(max_tokens=30))
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": f"Go on, says {name}."})

    async def run() -> weft.Program:
        async with weft.Program() as program:
            client = openai_client(engine, program)
            await asyncio.gather(strand("Ada", client), strand("Grace", client))
        return program

    program = await in_steps(run(), 2, 2, 2)
    assert len(program.graph.threads) == 2
    assert sorted(len(calls) for calls in program.graph.threads.values()) == [3, 3]


async def test_program_of_its_own(engine: FrontEnd) -> None:
    """Without a program, every call is a program of its own."""
    ended = EndedPrograms(engine)
    for how in ("create", "stream", "create sync", "stream sync"):
        await ask(engine, None, how)
    assert [(row.calls, str(row.state)) for row in ended.rows] == [(1, "finished")] * 4


async def test_many_at_once(engine: FrontEnd) -> None:
    """Many programs at once, on one event loop and on threads, have exactly their own calls."""

    async def one(how: str) -> tuple[str, set[str]]:
        async with weft.Program() as program:
            answers = [await ask(engine, program, how) for _ in range(2)]
        return program.program_id, {answer.weft["program_id"] for answer in answers}

    found = await asyncio.gather(*(one(how) for how in ("create", "stream", "create sync", "stream sync") * 4))
    assert all(programs == {program_id} for program_id, programs in found)


@on_vllm_too
def test_one_client_on_several_event_loops(engine: FrontEnd) -> None:
    """A client may be used from several event loops, and a sync client from several threads."""
    with weft.Program() as program:
        client, sync_client = openai_client(engine, program), sync_openai_client(engine, program)
        request = {"model": engine.model, "messages": QUESTION, **short()}

        def on_a_loop_of_its_own(_: int) -> None:
            async def call() -> None:
                await client.chat.completions.create(**request)

            asyncio.run(call())
            sync_client.chat.completions.create(**request)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(on_a_loop_of_its_own, range(8)))
    assert program.row is not None
    assert program.row.calls == 16
