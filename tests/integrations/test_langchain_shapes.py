"""LangChain and LangGraph: every shape of program has its true threads and edges, however it is run."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_shapes import (
    GUESSES,
    QUESTION,
    SHAPES,
    STRANDS,
    TEXT,
    TOLD_APART,
    Parts,
    Topics,
    agent,
    drive,
    helpers,
    updating,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from observers import TIMEOUT_S, expiring_timeouts, resolve, wait_until_idle
from shapes import edges, expected

import weft
from weft.core.program import Program
from weft.core.program.graph import CallState, ProgramGraph
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

pytestmark = [
    pytest.mark.engine,
    pytest.mark.anyio,
    # LangChain warns of interfaces that users still call: astream_log and events v1 are deprecated, events v3 is beta.
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
]


# -- the tests


ROWS = [(name, how) for name, row in SHAPES.items() for how in row.methods]


def parts_for(model: ChatWeft, how: str) -> Parts:
    """Parts that are sync or async, as a method needs them."""
    return Parts(model, is_async=how.split(maxsplit=1)[0] not in ("invoke", "stream"))


@pytest.mark.parametrize(("name", "how"), ROWS, ids=lambda value: value)
async def test_shape(engine: weft.Engine, model: ChatWeft, name: str, how: str) -> None:
    """The program has exactly these calls, edges and threads, and its row has the same calls, threads and account."""
    row = SHAPES[name]
    runnable, given = row.build(parts_for(model, how))
    async with weft.Program(name) as program:
        await drive(runnable, given, program.config(), how)
    graph = program.graph
    assert edges(graph) == expected(row.edges)
    assert len(graph.threads) == row.threads
    assert {call.label for call in graph.calls if call.state is not CallState.FINISHED} <= {"bad", "worse"}
    assert ProgramGraph.from_json(graph.to_json()).calls == graph.calls
    arrived = [call for call in graph.calls if call.arrival_s is not None]
    assert program.row is not None
    assert program.row.calls == len(arrived)
    assert set(program.row.threads) == {call.thread_id for call in arrived}
    assert program.row.account.output_tokens == sum(call.account.output_tokens for call in arrived)
    assert program.row.account.service_s == pytest.approx(sum(call.service_s for call in arrived))
    assert program.row.attained.total_service_s >= graph.critical_path().service_s - 1e-6


class ProgramRecorder(ProgramCallbackHandler):
    """A handler that records the programs of root runs."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: dict[str, Program] = {}

    def _open_program(self, *args: Any) -> Program:
        program = super()._open_program(*args)
        self.programs[program.program_id] = program
        return program


@pytest.mark.parametrize("name", SHAPES)
async def test_shape_without_a_program(engine: weft.Engine, model: ChatWeft, name: str) -> None:
    """Without a program, the root run is one. It has the same shape, and the session that the metadata names."""
    row, handler = SHAPES[name], ProgramRecorder()
    runnable, given = row.build(parts_for(model, row.methods[0]))
    await drive(runnable, given, {"callbacks": [handler], "metadata": {"session_id": "mine"}}, row.methods[0])
    (program,) = handler.programs.values()
    assert (str(program.state), program.session_id) == ("finished", "mine")
    assert edges(program.graph) == expected(row.edges)
    assert len(program.graph.threads) == row.threads
    assert len(handler._open_runs) == 0


# -- at the top of a program, outside of any run


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("given_answers", [True, False])
async def test_batch(engine: weft.Engine, model: ChatWeft, is_async: bool, given_answers: bool) -> None:
    """The inputs of a batch are branches. They are parents of the next call: certain ones if its input contains their
    answers, and guesses otherwise."""
    m = Parts(model, is_async)
    async with weft.Program() as program:
        m("a").invoke("Hello", program.config())
        each = m.gate(3) | m("b")
        answers = await resolve((each.abatch if is_async else each.batch)(["x", "y", "z"], program.config()))
        m("c").invoke(answers if given_answers else "Sum up", program.config())
    sign = ">" if given_answers else "~"
    assert edges(program.graph) == expected(f"a>b a>b2 a>b3 b{sign}c b2{sign}c b3{sign}c")
    assert len(program.graph.threads) == 3


@pytest.mark.parametrize("is_async", [False, True])
async def test_batch_one_at_a_time(engine: weft.Engine, model: ChatWeft, is_async: bool) -> None:
    """With `max_concurrency` 1, each input of a batch comes after the one before it."""
    async with weft.Program() as program:
        configs: Any = [{**program.config(), "run_name": name, "max_concurrency": 1} for name in "abc"]
        await resolve((model.abatch if is_async else model.batch)(["x", "y", "z"], configs))
    assert edges(program.graph) == expected("a>b b>c")


@pytest.mark.parametrize("lineage", ["message", "text", "quote", "nothing"])
@pytest.mark.parametrize("how", ["gather", "anyio", "threads"])
async def test_helpers_at_the_top(engine: weft.Engine, model: ChatWeft, how: str, lineage: str) -> None:
    """Lineage tells parallel helpers apart directly in a program as well as under a run. Their threads are right, and
    the other helper's call stays a guess."""
    m = Parts(model, is_async=how != "threads")

    async with weft.Program() as program:
        bound = Parts(model.model_copy(update={"callbacks": program.callbacks}), m.is_async)
        main = helpers(bound, lineage, how)
        await resolve(main(None) if m.is_async else main(None, program.config()))
    assert edges(program.graph) == expected(GUESSES if lineage == "nothing" else TOLD_APART)
    assert len(program.graph.threads) == 2


async def test_branches(engine: weft.Engine, model: ChatWeft) -> None:
    """Helpers with a branch each are told apart without lineage."""
    m = Parts(model, is_async=True)

    async def helper(branch: weft.Program, name: str) -> None:
        async with branch:
            await m(f"{name}_first").ainvoke("Go on", branch.config())
            await m(f"{name}_last").ainvoke("Go on", branch.config())

    async with weft.Program() as program:
        await asyncio.gather(*(helper(program.branch(), name) for name in ("fog", "herring")))
        await m("join").ainvoke("Go on", program.config())
    assert edges(program.graph) == expected(STRANDS)
    assert len(program.graph.threads) == 2


async def test_result_that_comes_by_a_queue(engine: weft.Engine, model: ChatWeft) -> None:
    """A message that reaches a call outside of the run tree, by a queue, makes its call a parent."""
    m, answers = Parts(model, is_async=True), asyncio.Queue[AIMessage]()

    async def produce(text: str) -> None:
        await answers.put(await m("made").ainvoke(text))
        await asyncio.sleep(0.3)

    async def consume(_: str) -> AIMessage:
        return await m("taken").ainvoke([await answers.get()])

    async with weft.Program() as program:
        config = program.config()
        await asyncio.gather(
            RunnableLambda(produce).ainvoke("Hello", config), RunnableLambda(consume).ainvoke("Hello", config)
        )
    assert edges(program.graph) == expected("made>taken")


async def test_task_that_outlives_its_node(engine: weft.Engine, model: ChatWeft) -> None:
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


# -- interceptions


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "astream messages"])
async def test_tools_between_calls(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """Interceptions between an agent's calls name the tools that ran, even if the tools make calls themselves."""
    async with weft.Program() as program:
        await drive(agent(parts_for(model, how), steps=2), QUESTION, program.config(), how)
    gaps = [
        (program.graph[gap.after].label, program.graph[gap.before].label, gap.tools)
        for gap in program.graph.interceptions
    ]
    assert sorted(gaps) == [
        ("ask", "ask", ()),
        ("ask", "ask", ()),
        ("ask", "model", ("ask",)),
        ("model", "ask", ("ask",)),
        ("model", "ask", ("ask",)),
    ]
    assert all(gap.duration_s >= 0 for gap in program.graph.interceptions)


async def test_waiting_for_a_human(engine: weft.Engine, model: ChatWeft) -> None:
    """When a graph interrupts itself for a human, the time until the answer is an interception named "human"."""
    m = Parts(model, is_async=True)

    def ask_human(_: Topics) -> Any:
        interrupt("Shall I go on?")
        return {}

    graph = StateGraph(Topics).add_node("first", updating(m, m.asks("first", lambda _: "Hello"), "notes"))
    graph.add_node("human", ask_human).add_node("second", updating(m, m.asks("second", lambda _: "Hello"), "notes"))
    graph.add_edge(START, "first").add_edge("first", "human").add_edge("human", "second")
    compiled = graph.compile(checkpointer=InMemorySaver())
    async with weft.Program() as program:
        config: Any = program.config(configurable={"thread_id": "1"})
        await compiled.ainvoke({"notes": []}, config)
        await compiled.ainvoke(Command(resume="yes"), config)
    (gap,) = program.graph.interceptions
    assert gap.tools == ("human",)
    assert gap.duration_s > 0
    assert edges(program.graph) == expected("first>second")


async def test_times_and_costs(engine: weft.Engine, model: ChatWeft) -> None:
    """The accounts of the calls add up to the program's row, and the critical path of a chain is its service."""
    m = Parts(model, is_async=True)
    async with weft.Program() as program:
        await (m("a") | TEXT | m("b")).ainvoke("Hello", program.config())
    graph, row = program.graph, program.row
    assert row is not None
    assert sum((call.account for call in graph.calls), weft.Account()) == row.account
    assert graph.critical_path().service_s == pytest.approx(row.attained.service_s)
    first, second = graph.calls
    assert None not in (first.arrival_s, first.completion_s, second.arrival_s)
    assert row.start_s <= first.arrival_s < first.completion_s <= second.arrival_s  # type: ignore[operator]


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
