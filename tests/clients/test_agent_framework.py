"""Microsoft Agent Framework in this process: which calls its agents' calls come after, by the framework's spans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from cases import AGENT_FRAMEWORK
from observers import EndedPrograms
from span_parts import edges, on_path, page_blocks, provider, run_block

import weft
from weft.testing import ScriptedEngine

pytestmark = [pytest.mark.clients, pytest.mark.anyio]
pytest_plugins = ["weft.testing.fixtures"]
__all__ = ["provider"]

MakeEngine = Callable[..., ScriptedEngine]


@pytest.fixture(autouse=True)
def parts(provider: Any) -> Any:
    """Agents of the real framework, with spans."""
    del provider
    on_path(AGENT_FRAMEWORK)
    import agent_framework_parts

    return agent_framework_parts


ASKED = ["a0 <- chief0", "a1 <- a0", "b0 <- chief0", "chief0 <- ", "chief1 <- a1, b0"]
SHAPES = {
    "tools": ASKED,
    "tools in a stream": ASKED,
    "agents as tools": ASKED,
    "sequential": ["a0 <- ", "a1 <- a0", "b0 <- a1"],
    "concurrent": ["a0 <- ", "a1 <- a0", "b0 <- "],
    "fan": ["a0 <- ", "a1 <- a0", "b0 <- a1", "c0 <- a1", "d0 <- b0, c0"],
    "magentic": [
        *("manager0 <- ", "manager1 <- manager0", "manager2 <- manager1", "manager3 <- writer0"),
        *("manager4 <- manager3", "writer0 <- manager2"),
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_parents_are_exact(parts: Any, scripted_engine: MakeEngine, shape: str) -> None:
    """Each call comes after the calls that the framework waited for, and none of that is a guess."""
    team = parts.Team(scripted_engine(parts.answer))
    with weft.Program(shape) as program, program.attach():
        await parts.run(team, shape)
    assert edges(program) == SHAPES[shape]


async def test_programs_share_agents(parts: Any, scripted_engine: MakeEngine) -> None:
    """Five programs at once run one agent object, and each has its own calls."""
    team = parts.Team(scripted_engine(parts.answer))
    agent = team.asking()

    async def one(name: str) -> weft.Program:
        with weft.Program(name) as program, program.attach():
            await agent.run("Go.")
        return program

    programs = await asyncio.gather(*(one(f"run-{number}") for number in range(5)))
    assert [edges(program) for program in programs] == [ASKED] * 5


@pytest.mark.parametrize("how", ["run", "stream"])
async def test_the_middleware_makes_each_run_a_program(parts: Any, scripted_engine: MakeEngine, how: str) -> None:
    """A run of an agent is a program with the agent's name and the session's id. Agents inside it are not."""
    from weft.integrations.agent_framework import ProgramMiddleware

    engine = scripted_engine(parts.answer)
    ended = EndedPrograms(engine)
    agent = parts.Team(engine, middleware=[ProgramMiddleware()]).asking(middleware=[ProgramMiddleware()])
    session = agent.create_session()
    await asyncio.gather(
        *(agent.run("Go.", session=session) if how == "run" else parts.stream(agent) for _ in range(2))
    )
    assert [(row.info.name, row.calls, str(row.state)) for row in ended.rows] == [("chief", 5, "finished")] * 2
    if how == "run":
        assert {row.info.session_id for row in ended.rows} == {session.session_id}


async def test_a_failing_run_is_a_failed_program(parts: Any, scripted_engine: MakeEngine) -> None:
    """The error of a call reaches the caller, and the program has failed; in a stream, too."""
    from weft.integrations.agent_framework import ProgramMiddleware

    engine = scripted_engine(lambda _request: RuntimeError("no"))
    ended = EndedPrograms(engine)
    agent = parts.Team(engine, middleware=[ProgramMiddleware()]).b
    for go in (lambda: agent.run("Go."), lambda: parts.stream(agent)):
        with pytest.raises(Exception, match="no"):
            await go()
    assert [str(row.state) for row in ended.rows] == ["failed"] * 2


async def test_a_stream_that_is_left_ends_its_program(parts: Any, scripted_engine: MakeEngine) -> None:
    """Closing the stream aborts the call and ends the program."""
    from weft.integrations.agent_framework import ProgramMiddleware

    engine = scripted_engine(parts.answer)
    ended = EndedPrograms(engine)
    updates = parts.Team(engine, middleware=[ProgramMiddleware()]).b.run("Go.", stream=True)
    await anext(updates)
    await updates.close()
    assert len(ended.rows) == 1
    assert not engine.table


async def test_the_examples_of_the_page(parts: Any, scripted_engine: MakeEngine) -> None:
    """The agent is a program of its own, and the workflow is one with two calls."""
    engine = scripted_engine(parts.answer)
    agent, workflow, _pydantic_ai = page_blocks()
    await run_block(workflow, weft=weft, **await run_block(agent, engine=engine))
    assert [(row.info.name, row.calls) for row in engine.table.ended()] == [("report", 2), ("writer", 1)]


@pytest.mark.engine
async def test_on_a_real_engine(parts: Any, engine: weft.Engine) -> None:
    """Two agents at once, one after the other in each, answer from a real model."""
    team = parts.Team(engine)
    with weft.Program("real") as program, program.attach():
        await asyncio.gather(*(each.run("Go.", options={"max_tokens": 4}) for each in (team.b, team.c)))
        await team.d.run("Go.", options={"max_tokens": 4})
    assert edges(program)[:2] == ["b0 <- ", "c0 <- "]
    assert program.row is not None
    assert program.row.calls == 3
