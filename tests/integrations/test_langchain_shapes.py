"""LangChain and LangGraph: every shape of program has its true threads and edges, however it is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda
from langchain_shapes import (
    GUESSES,
    QUESTION,
    ROWS,
    SHAPES,
    STRANDS,
    TEXT,
    TOLD_APART,
    Parts,
    Topics,
    agent,
    check_shape,
    drive,
    helpers,
    parts_for,
    updating,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from observers import resolve
from scripted_runs import answer_like_a_tiny_model, run_in_steps
from shapes import edges, expected

import weft
from weft.core.program import Program
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler
from weft.testing import FakeClock, ScriptedEngine

pytestmark = [
    pytest.mark.anyio,
    # LangChain warns of interfaces that users still call: astream_log and events v1 are deprecated, events v3 is beta.
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning"),
]


pytest_plugins = ["weft.testing.fixtures"]


@pytest.fixture
def engine(scripted_engine: Callable[..., ScriptedEngine]) -> ScriptedEngine:
    """An engine without a model: what is tested here is Weft's side of LangChain. test_langchain_live.py has vLLM."""
    return scripted_engine(answer_like_a_tiny_model, latency_s=0.5)


@pytest.mark.parametrize(("name", "how"), ROWS, ids=lambda value: value)
async def test_shape(model: ChatWeft, name: str, how: str) -> None:
    """The program has exactly these calls, edges and threads, and its row has the same calls, threads and account."""
    await check_shape(model, name, how)


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
async def test_shape_without_a_program(model: ChatWeft, name: str) -> None:
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
async def test_batch(model: ChatWeft, is_async: bool, given_answers: bool) -> None:
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
async def test_batch_one_at_a_time(model: ChatWeft, is_async: bool) -> None:
    """With `max_concurrency` 1, each input of a batch comes after the one before it."""
    async with weft.Program() as program:
        configs: Any = [{**program.config(), "run_name": name, "max_concurrency": 1} for name in "abc"]
        await resolve((model.abatch if is_async else model.batch)(["x", "y", "z"], configs))
    assert edges(program.graph) == expected("a>b b>c")


@pytest.mark.parametrize("lineage", ["message", "text", "quote", "nothing"])
@pytest.mark.parametrize("how", ["gather", "anyio", "threads"])
async def test_helpers_at_the_top(
    scripted_engine: Callable[..., ScriptedEngine], fake_clock: FakeClock, how: str, lineage: str
) -> None:
    """Lineage tells parallel helpers apart directly in a program as well as under a run. Their threads are right, and
    the other helper's call stays a guess."""
    engine = scripted_engine(answer_like_a_tiny_model, latency_s=1.0, clock=fake_clock)
    programs: list[Program] = []

    async def run() -> None:
        async with weft.Program() as program:
            programs.append(program)
            m = Parts(ChatWeft(engine=engine, callbacks=program.callbacks), is_async=how != "threads")
            main = helpers(m, lineage, how)
            await resolve(main(None) if m.is_async else main(None, program.config()))

    await run_in_steps(engine, fake_clock, run(), 2, 2, 1)
    (program,) = programs
    assert edges(program.graph) == expected(GUESSES if lineage == "nothing" else TOLD_APART)
    assert len(program.graph.threads) == 2


async def test_branches(model: ChatWeft) -> None:
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


async def test_result_that_comes_by_a_queue(model: ChatWeft) -> None:
    """A message that reaches a call outside of the run tree, by a queue, makes its call a parent."""
    m, answers, taken = Parts(model, is_async=True), asyncio.Queue[AIMessage](), asyncio.Event()

    async def produce(text: str) -> None:
        await answers.put(await m("made").ainvoke(text))
        await taken.wait()  # so that the run is open while the other call is made

    async def consume(_: str) -> AIMessage:
        answer = await m("taken").ainvoke([await answers.get()])
        taken.set()
        return answer

    async with weft.Program() as program:
        config = program.config()
        await asyncio.gather(
            RunnableLambda(produce).ainvoke("Hello", config), RunnableLambda(consume).ainvoke("Hello", config)
        )
    assert edges(program.graph) == expected("made>taken")


# -- interceptions


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "astream messages"])
async def test_tools_between_calls(model: ChatWeft, how: str) -> None:
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


async def test_waiting_for_a_human(engine: ScriptedEngine, model: ChatWeft) -> None:
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
        engine.clock.advance(7.0)
        await compiled.ainvoke(Command(resume="yes"), config)
    (gap,) = program.graph.interceptions
    assert (gap.tools, gap.duration_s) == (("human",), 7.0)
    assert edges(program.graph) == expected("first>second")


async def test_times_and_costs(model: ChatWeft) -> None:
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
