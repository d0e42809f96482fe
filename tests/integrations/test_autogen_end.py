"""No call of AutoGen stays on the engine, however its run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="the AutoGen extra is not installed")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_parts import asked, babbling, calling, endless
from observers import assert_aborted, cancel_while_generating, wait_until_generating, wait_until_idle
from polling import until
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.errors import ProgramEndedError
from weft.integrations.autogen import WeftChatCompletionClient, bind_team

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

HOW = ["task", "wait_for", "move_on_after", "token"]


async def cancel_run(
    engine: weft.Engine, how: str, run: Callable[[CancellationToken | None], Awaitable[Any]], requests: int = 1
) -> None:
    """Start a run that makes endless calls, cancel it while they generate, and assert that they are aborted."""
    if how != "token":
        await cancel_while_generating(engine, how, lambda: run(None), requests)
        return
    token = CancellationToken()
    task = asyncio.ensure_future(run(token))
    records = await wait_until_generating(engine, requests)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_aborted(records)
    await wait_until_idle(engine)


async def consume_answer(client: WeftChatCompletionClient, way: str, token: CancellationToken | None) -> None:
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
    """A cancelled call is aborted in the engine. Its program goes on, or is cancelled if the call is the program."""
    before = len(engine.table.ended())
    async with weft.Program("mine") as program:
        client = endless(engine).bind(program, agent="ann") if bound else endless(engine)
        await cancel_run(engine, how, lambda token: consume_answer(client, way, token))
        if bound:
            assert [str(call.state) for call in program.graph.calls] == ["cancelled"]
            assert str(program.state) == "idle"
            await babbling(engine).bind(program, agent="ann").create(asked())
    (row,) = engine.table.ended()[: len(engine.table.ended()) - before]
    assert (row.info.name, str(row.state), row.calls) == (
        ("mine", "finished", 2) if bound else ("chat", "cancelled", 1)
    )
    assert row.account.output_tokens < ENDLESS_TOKENS
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
        await wait_until_idle(engine)
    (row,) = engine.table.ended()[: len(engine.table.ended()) - before]
    assert (row.info.name, str(row.state)) == (("mine", "finished") if bound else ("chat", "cancelled"))


@pytest.mark.parametrize("way", ["create", "stream"])
async def test_a_token_that_was_cancelled_before(engine: weft.Engine, way: str) -> None:
    """A call with a cancelled token is cancelled before it begins."""
    token = CancellationToken()
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consume_answer(endless(engine), way, token)
    await wait_until_idle(engine)


async def test_a_token_that_is_cancelled_between_two_pieces(engine: weft.Engine) -> None:
    """A stream ends at the next piece after its token was cancelled. The token may be used for several streams."""
    token = CancellationToken()
    assert [piece async for piece in babbling(engine).create_stream(asked(), cancellation_token=token)]
    stream = endless(engine).create_stream(asked(), cancellation_token=token)
    await anext(stream)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(stream)
    await wait_until_idle(engine)


async def test_a_call_that_outlives_its_program(engine: weft.Engine) -> None:
    """A call that is in flight when its program ends is aborted, and raises ProgramEndedError."""
    with weft.Program("over") as program:
        task = asyncio.create_task(endless(engine).bind(program).create(asked()))
        await wait_until_generating(engine)
    with pytest.raises(ProgramEndedError, match="over"):
        await task
    await wait_until_idle(engine)


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
    """A bound team stops at once with its caller, where AutoGen would run to the end. Its program is cancelled."""
    requests, before = 2 if what == "flow" else 1, asyncio.all_tasks()

    @weft.program(name="team")
    async def main(token: CancellationToken | None, program: weft.Program) -> None:
        await bind_team(TEAMS[what](engine), program).run(task="Talk.", cancellation_token=token)

    await cancel_run(engine, how, main, requests)
    row = engine.table.ended()[0]
    assert (row.info.name, str(row.state)) == ("team", "cancelled")
    assert row.account.output_tokens < ENDLESS_TOKENS
    await until(lambda: asyncio.all_tasks() <= before)  # What is left of the team cannot start another call,
    await wait_until_idle(engine)  # and it has started none.
    assert len(engine.table) == 0


# A selector is left out, because it yields no message before its first call.
@pytest.mark.parametrize("what", [name for name in TEAMS if name != "selector"])
async def test_a_closed_stream_of_a_team(engine: weft.Engine, what: str) -> None:
    """A bound team stops when the stream of its messages is closed, and closing raises nothing."""
    before = asyncio.all_tasks()
    async with weft.Program() as program:
        messages = bind_team(TEAMS[what](engine), program).run_stream(task="Talk.")
        await anext(messages)
        await wait_until_generating(engine)
        await messages.aclose()
        await wait_until_idle(engine)
        calls = len(program.graph)
        await until(lambda: asyncio.all_tasks() <= before)  # What is left of the team cannot start another call,
        assert len(program.graph) == calls  # and it has started none.
    assert {str(call.state) for call in program.graph.calls} <= {"cancelled", "finished"}


@pytest.mark.parametrize("how", ["task", "token"])
async def test_a_cancelled_team_on_a_shared_runtime(engine: weft.Engine, how: str) -> None:
    """Cancelling one of two teams on a shared runtime does not cancel the other."""
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    other = RoundRobinGroupChat([agent("cid", babbling(engine, tokens=150))], max_turns=3, runtime=runtime)
    async with weft.Program("other") as second, weft.Program("first") as first:
        other_run = asyncio.create_task(bind_team(other, second).run(task="Talk."))
        team, token = bind_team(round_robin(engine, runtime=runtime), first), CancellationToken()
        task = asyncio.create_task(team.run(task="Talk.", cancellation_token=token))
        await until(lambda: str(first.state) == "active")
        await wait_until_generating(engine, tokens=151)  # more than a call of the other team has
        (token if how == "token" else task).cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: str(first.state) == "idle")
        assert len((await other_run).messages) == 4
    await runtime.stop_when_idle()
    await wait_until_idle(engine)
    assert [str(call.state) for call in first.graph.calls] == ["cancelled"]
    assert {str(call.state) for call in second.graph.calls} == {"finished"}


@pytest.mark.parametrize("how", ["task", "wait_for", "move_on_after"])  # AutoGen 0.7.5 hangs after a token.
@pytest.mark.parametrize("inside", ["agent", "team"])
async def test_a_cancelled_agent_whose_tools_are_agents(engine: weft.Engine, how: str, inside: str) -> None:
    """Agents that run as tools stop with the cancelled agent or team, at the latest at the end of the program."""
    tasks = [(name, {"task": f"Write, {name}."}) for name in ("ann", "bob")]

    @weft.program
    async def main(_token: CancellationToken | None, program: weft.Program) -> None:
        tools: list[Any] = [AgentTool(agent(name, endless(engine))) for name, _ in tasks]
        chief: Any = agent("chief", calling(engine, *tasks), tools=tools)
        runner = chief if inside == "agent" else RoundRobinGroupChat([chief], max_turns=2)
        await bind_team(runner, program).run(task="Talk.")

    await cancel_run(engine, how, main, requests=2)
    assert str(engine.table.ended()[0].state) == "cancelled"


async def test_an_error_inside_a_team(engine: weft.Engine) -> None:
    """AutoGen raises an error with the text of the original one. The program fails, and no call is left."""

    @weft.program
    async def main(program: weft.Program) -> None:
        await bind_team(RoundRobinGroupChat([agent("ann", babbling(engine))], max_turns=2), program).run(
            task="again " * engine.max_model_len
        )

    with pytest.raises(RuntimeError, match=r"ContextLengthError.*max_model_len"):
        await main()
    await wait_until_idle(engine)
    assert str(engine.table.ended()[0].state) == "failed"
