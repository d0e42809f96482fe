"""However AutoGen's runs end, nothing of them stays on the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_parts import asked, babbling, calling, endless

import weft
from weft.core.errors import ProgramEndedError
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

HOW = ["task", "wait_for", "move_on_after", "token"]


async def until(condition: Callable[[], object], seconds: float) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  nothing tells
            await anyio.sleep(0.005)


async def generating(engine: weft.Engine, requests: int = 1) -> None:
    """Wait until so many calls are at work on the engine, and a little longer."""
    await until(lambda: engine._llm.get_num_unfinished_requests() >= requests, 10)
    await anyio.sleep(0.03)


async def quiet(engine: weft.Engine) -> None:
    """Wait until nothing is in flight; a call that nobody aborted would take longer than this waits."""
    await until(lambda: not engine._in_flight and not engine._llm.get_num_unfinished_requests(), 2)


async def broken_off(
    engine: weft.Engine, how: str, run: Callable[[CancellationToken | None], Awaitable[Any]], requests: int = 1
) -> None:
    """Run something that would take seconds, cancel it while the engine is at it, and see to it that it stops."""
    if how == "move_on_after":
        with anyio.move_on_after(0.3) as scope:
            await run(None)
        assert scope.cancelled_caught
    elif how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(None), 0.3)
    else:
        token = CancellationToken() if how == "token" else None
        task = asyncio.ensure_future(run(token))
        await generating(engine, requests)
        started_s = time.monotonic()
        if token is not None:
            token.cancel()
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started_s < 4
    await quiet(engine)


async def answered(client: WeftChatCompletionClient, way: str, token: CancellationToken | None) -> None:
    if way == "create":
        await client.create(asked(), cancellation_token=token)
    else:
        async for _ in client.create_stream(asked(), cancellation_token=token):
            pass


# -- calls


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", ["create", "stream"])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
async def test_a_cancelled_call(engine: weft.Engine, how: str, way: str, bound: bool) -> None:
    """It is aborted in the engine, and the program goes on, or is cancelled if the call was all of it."""
    before = len(engine.table.ended())
    async with weft.Program("mine") as program:
        client = endless(engine).bind(program, agent="ann") if bound else endless(engine)
        await broken_off(engine, how, lambda token: answered(client, way, token))
        if bound:
            assert [str(call.state) for call in program.graph.calls] == ["cancelled"]
            assert str(program.state) == "idle"
            await babbling(engine).bind(program, agent="ann").create(asked())
    (row,) = engine.table.ended()[: len(engine.table.ended()) - before]
    assert (row.info.name, str(row.state), row.calls) == (
        ("mine", "finished", 2) if bound else ("chat", "cancelled", 1)
    )
    assert row.account.output_tokens < 1000
    assert client.total_usage().completion_tokens == 0


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
async def test_a_closed_stream(engine: weft.Engine, bound: bool) -> None:
    """A stream that is closed early aborts its call."""
    before = len(engine.table.ended())
    async with weft.Program("mine") as program:
        client = endless(engine).bind(program) if bound else endless(engine)
        stream = client.create_stream(asked())
        assert isinstance(await anext(stream), str)
        assert engine._in_flight
        await stream.aclose()
        await quiet(engine)
    (row,) = engine.table.ended()[: len(engine.table.ended()) - before]
    assert (row.info.name, str(row.state)) == (("mine", "finished") if bound else ("chat", "cancelled"))


@pytest.mark.parametrize("way", ["create", "stream"])
async def test_a_token_that_is_cancelled_already(engine: weft.Engine, way: str) -> None:
    """The call is cancelled before it begins."""
    token = CancellationToken()
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answered(endless(engine), way, token)
    await quiet(engine)


async def test_a_token_that_is_cancelled_between_two_pieces(engine: weft.Engine) -> None:
    """The stream ends with the next piece that is asked for; a token that lives longer than a stream is left alone."""
    token = CancellationToken()
    assert [piece async for piece in babbling(engine).create_stream(asked(), cancellation_token=token)]
    stream = endless(engine).create_stream(asked(), cancellation_token=token)
    await anext(stream)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    await quiet(engine)


async def test_a_call_that_outlives_its_program(engine: weft.Engine) -> None:
    """It is aborted and told so by the typed error."""
    with weft.Program("over") as program:
        task = asyncio.create_task(endless(engine).bind(program).create(asked()))
        await generating(engine)
    with pytest.raises(ProgramEndedError, match="over"):
        await task
    await quiet(engine)


# -- agents and teams


def agent(name: str, client: WeftChatCompletionClient, **extra: Any) -> AssistantAgent:
    return AssistantAgent(name, client, system_message=f"You are {name}.", **extra)


def round_robin(engine: weft.Engine, **extra: Any) -> Any:
    return RoundRobinGroupChat([agent(name, endless(engine)) for name in ("ann", "bob")], max_turns=6, **extra)


def selector(engine: weft.Engine) -> Any:
    members: list[Any] = [agent(name, endless(engine)) for name in ("ann", "bob", "cid")]
    return SelectorGroupChat(members, endless(engine), max_turns=6)


def flow(engine: weft.Engine) -> Any:
    nodes: list[Any] = [agent("a", babbling(engine)), *(agent(name, endless(engine)) for name in ("b", "c"))]
    graph = DiGraphBuilder()
    for node in nodes:
        graph.add_node(node)
    return GraphFlow(nodes, graph=graph.add_edge("a", "b").add_edge("a", "c").build())


def nested(engine: weft.Engine) -> Any:
    return RoundRobinGroupChat([round_robin(engine, name="inner")], max_turns=2)


def streaming(engine: weft.Engine) -> Any:
    return RoundRobinGroupChat([agent("ann", endless(engine), model_client_stream=True)], max_turns=2)


TEAMS = {team.__name__: team for team in (round_robin, selector, flow, nested, streaming)}
on_every_team = pytest.mark.parametrize("what", TEAMS)


@on_every_team
@pytest.mark.parametrize("how", HOW)
async def test_a_cancelled_team(engine: weft.Engine, what: str, how: str) -> None:
    """A bound team stops at once with its caller, where AutoGen would go on to the end; its program is cancelled."""
    requests = 2 if what == "flow" else 1

    @weft.program(name="team")
    async def main(token: CancellationToken | None, program: weft.Program) -> None:
        await bind_team(TEAMS[what](engine), program).run(task="Talk.", cancellation_token=token)

    await broken_off(engine, how, main, requests)
    row = engine.table.ended()[0]
    assert (row.info.name, str(row.state)) == ("team", "cancelled")
    assert row.account.output_tokens < 1000
    await asyncio.sleep(0.05)
    await quiet(engine)  # and nobody starts another call


@pytest.mark.parametrize("what", [name for name in TEAMS if name != "selector"])  # it says nothing before it selects
async def test_a_closed_stream_of_a_team(engine: weft.Engine, what: str) -> None:
    """So it does when the stream of its messages is closed, and closing raises nothing."""
    async with weft.Program() as program:
        messages = bind_team(TEAMS[what](engine), program).run_stream(task="Talk.")
        await anext(messages)
        await generating(engine)
        await messages.aclose()
        await quiet(engine)
        calls = len(program.graph)
        await asyncio.sleep(0.05)
        assert len(program.graph) == calls
    assert {str(call.state) for call in program.graph.calls} <= {"cancelled", "finished"}


@pytest.mark.parametrize("how", ["task", "token"])
async def test_a_cancelled_team_on_a_runtime_that_goes_on(engine: weft.Engine, how: str) -> None:
    """One of two teams on a shared runtime is cancelled: the other is not."""
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    other = RoundRobinGroupChat([agent("cid", babbling(engine, tokens=150))], max_turns=3, runtime=runtime)
    async with weft.Program("other") as second, weft.Program("first") as first:
        going_on = asyncio.create_task(bind_team(other, second).run(task="Talk."))
        team, token = bind_team(round_robin(engine, runtime=runtime), first), CancellationToken()
        task = asyncio.create_task(team.run(task="Talk.", cancellation_token=token))
        await until(lambda: str(first.state) == "active", 5)
        await anyio.sleep(0.03)
        (token if how == "token" else task).cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: str(first.state) == "idle", 2)
        assert len((await going_on).messages) == 4
    await runtime.stop_when_idle()
    await quiet(engine)
    assert [str(call.state) for call in first.graph.calls] == ["cancelled"]
    assert {str(call.state) for call in second.graph.calls} == {"finished"}


@pytest.mark.parametrize("how", ["task", "wait_for", "move_on_after"])  # AutoGen 0.7.5 waits for ever after a token
@pytest.mark.parametrize("inside", ["agent", "team"])
async def test_a_cancelled_agent_whose_tools_are_agents(engine: weft.Engine, how: str, inside: str) -> None:
    """The agents that run as tools stop too, at the latest with the program; so does a team with such an agent."""
    tasks = [(name, {"task": f"Write, {name}."}) for name in ("ann", "bob")]

    @weft.program
    async def main(_token: CancellationToken | None, program: weft.Program) -> None:
        tools: list[Any] = [AgentTool(agent(name, endless(engine))) for name, _ in tasks]
        chief: Any = agent("chief", calling(engine, *tasks), tools=tools)
        runner = chief if inside == "agent" else RoundRobinGroupChat([chief], max_turns=2)
        await bind_team(runner, program).run(task="Talk.")

    await broken_off(engine, how, main, requests=2)
    assert str(engine.table.ended()[0].state) == "cancelled"


async def test_an_error_inside_a_team(engine: weft.Engine) -> None:
    """AutoGen tells it by its text; the program ends as failed, with nothing left over."""

    @weft.program
    async def main(program: weft.Program) -> None:
        await bind_team(RoundRobinGroupChat([agent("ann", babbling(engine))], max_turns=2), program).run(
            task="again " * 5000
        )

    with pytest.raises(RuntimeError, match=r"ContextLengthError.*max_model_len"):
        await main()
    await quiet(engine)
    assert str(engine.table.ended()[0].state) == "failed"
