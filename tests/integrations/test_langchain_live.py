"""LangChain and LangGraph on vLLM: one path and one shape of each kind, and what needs calls that last.

test_langchain_identity.py and test_langchain_shapes.py have all paths and shapes, without a model.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_paths import AGENT_PATHS, PATHS, run_path
from langchain_shapes import Parts, Topics, check_shape
from langgraph.graph import START, StateGraph
from observers import TIMEOUT_S, expiring_timeouts, wait_until_idle
from shapes import edges

import weft
from weft.core.program.graph import CallState
from weft.integrations.langchain import ChatWeft

pytestmark = [
    pytest.mark.engine,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),  # events v3
]

LIVE_PATHS = (
    "invoke",
    "astream",
    "abatch",
    "agenerate_by_streaming",
    "parallel_astream",
    "fallback_from_a_malformed_call",
    "fallback_from_a_rejected_call",
    "structured_output",
    "astream_events_v3_of_a_model",
    "graph_astream_of_several_modes",
)
LIVE_SHAPES = (
    ("fork_and_join", "stream"),
    ("function_that_calls_during_the_stream", "astream"),
    ("fallbacks", "ainvoke"),
    ("agent_with_two_tools_at_once", "astream messages"),
    ("send_map_reduce", "ainvoke"),
    ("graphs_in_parallel_nodes", "invoke"),
    ("helpers_by_gather_with_message", "ainvoke"),
    ("helpers_by_threads_with_text", "invoke"),
    ("helpers_by_anyio_with_quote", "astream"),
    ("helpers_by_gather_with_nothing", "ainvoke"),
)


@pytest.mark.parametrize("name", LIVE_PATHS)
async def test_path(engine: weft.Engine, model: ChatWeft, name: str) -> None:
    """Every call on this path belongs to the program once, and has waited and run."""
    calls = await run_path(engine, model, PATHS[name])
    assert min(call["wait_s"] for call in calls) > 0


@pytest.mark.parametrize("name", ["agent_invoke", "agent_astream_messages", "agent_whose_tool_is_an_agent"])
async def test_agent_path(engine: weft.Engine, structured: ChatWeft, name: str) -> None:
    """Every call of an agent, of its tools and of agents that are its tools belongs to the program once."""
    calls = await run_path(engine, structured, AGENT_PATHS[name])
    assert min(call["wait_s"] for call in calls) > 0


@pytest.mark.parametrize(("name", "how"), LIVE_SHAPES)
async def test_shape(model: ChatWeft, name: str, how: str) -> None:
    """The program has the true calls, edges and threads where lineage is read from a model's own text."""
    await check_shape(model, name, how)


async def test_task_that_outlives_its_node(model: ChatWeft) -> None:
    """A call of a task that outlives its node is a guess in the graph around the node."""
    m, tasks = Parts(model, is_async=True), list[asyncio.Task[Any]]()

    async def first(_: Topics) -> Any:
        tasks.append(asyncio.create_task(m("late").bind(max_tokens=100).ainvoke("Hello")))
        return {"notes": [await m("first").ainvoke("Hello")]}

    async def second(_: Topics) -> Any:
        await tasks[0]
        return {"notes": [await m("second").ainvoke("Hello")]}

    graph = StateGraph(Topics).add_sequence([("one", first), ("two", second)]).add_edge(START, "one").compile()
    async with weft.Program() as program:
        await graph.ainvoke({"notes": []}, program.config())
        await m("last").ainvoke("Hello", program.config())
    found = edges(program.graph)
    assert {"first>second", "second>last"} <= found
    assert len(program.graph.threads) == 2


async def test_cancelled_call(engine: weft.Engine, endless: ChatWeft, model: ChatWeft) -> None:
    """A call whose caller stopped waiting is cancelled in the graph, with the service until then."""
    async with weft.Program() as program:
        async with expiring_timeouts(engine):
            with anyio.move_on_after(TIMEOUT_S):
                await endless.with_config(run_name="endless").ainvoke("Hello", program.config())
        await wait_until_idle(engine)
        # The end of the next call brings the account of the first.
        await model.with_config(run_name="next").ainvoke("Hello", program.config())
    graph = program.graph
    assert edges(graph) == {"endless", "next"}
    assert [call.state for call in graph.calls] == [CallState.CANCELLED, CallState.FINISHED]
    assert graph.calls[0].completion_s is not None
    assert program.row is not None
    assert sum(call.service_s for call in graph.calls) == pytest.approx(program.row.account.service_s)
