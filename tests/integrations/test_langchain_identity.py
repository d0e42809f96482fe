"""LangChain and LangGraph: on every public path, each call belongs to its program and has the right parents.

test_langchain_shapes.py tests the shapes of programs.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnableParallel
from langchain_parts import CallRecorder, report
from langchain_paths import (
    AGENT_PATHS,
    NEED_VLLM,
    OVERLAPPING,
    PATHS,
    PROMPT,
    QUESTION,
    TEXT,
    TOPICS,
    CallPath,
    agent,
    check,
    drain,
    run_path,
    two_nodes,
    weather,
)
from langgraph.graph import END, START, MessagesState, StateGraph
from observers import EndedPrograms, levels, resolve
from scripted_runs import answer_like_a_tiny_model, run_in_steps
from typing_extensions import TypedDict

import weft
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler
from weft.testing import FakeClock, ScriptedEngine

pytestmark = pytest.mark.anyio
pytest_plugins = ["weft.testing.fixtures"]


@pytest.fixture
def engine(scripted_engine: Callable[..., ScriptedEngine]) -> ScriptedEngine:
    """An engine without a model: what is tested here is Weft's side of LangChain. test_langchain_live.py has vLLM."""
    return scripted_engine(answer_like_a_tiny_model, latency_s=0.5)


@pytest.fixture
def structured(engine: ScriptedEngine) -> ChatWeft:
    """A model for tool calls."""
    return ChatWeft(engine=engine, max_tokens=160)


# LangChain warns of interfaces that users still call: astream_log and events v1 are deprecated, events v3 is beta.
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("name", sorted(PATHS.keys() - NEED_VLLM - OVERLAPPING.keys()))
async def test_path(engine: ScriptedEngine, model: ChatWeft, name: str) -> None:
    """Every call on this path belongs to the program once, and its parents are the calls before it."""
    await run_path(engine, model, PATHS[name])


@pytest.mark.parametrize(("name", "calls"), OVERLAPPING.items())
async def test_path_on_threads(
    scripted_engine: Callable[..., ScriptedEngine], fake_clock: FakeClock, name: str, calls: int
) -> None:
    """Calls on threads are parallel if each has begun before any has ended."""
    engine = scripted_engine(answer_like_a_tiny_model, latency_s=0.5, clock=fake_clock)
    await run_in_steps(engine, fake_clock, run_path(engine, ChatWeft(engine=engine), PATHS[name]), calls)


@pytest.mark.parametrize("name", AGENT_PATHS)
async def test_agent_path(engine: ScriptedEngine, structured: ChatWeft, name: str) -> None:
    """Every call of an agent, of its tools and of agents that are its tools belongs to the program once."""
    await run_path(engine, structured, AGENT_PATHS[name])


@pytest.mark.parametrize("mode", ["given config", "ambient config"])
async def test_branches(engine: ScriptedEngine, model: ChatWeft, mode: str) -> None:
    """The calls of a branch are on a thread of their own, and the next call of the program joins the branches."""
    ended, recorder = EndedPrograms(engine), CallRecorder()

    async def part(branch: weft.Program) -> None:
        async with branch:
            config = branch.config(callbacks=[recorder])
            if mode == "given config":
                first = await model.ainvoke("Hello", config)
                await model.ainvoke(first.text, config)
            else:
                await (model | TEXT | model).ainvoke("Hello", config)

    async with weft.Program("branches") as program:
        await model.ainvoke("Plan", program.config(callbacks=[recorder]))
        await asyncio.gather(*(part(program.branch()) for _ in range(3)))
        await model.ainvoke("Sum up", program.config(callbacks=[recorder]))
    check(engine, ended, program, recorder, CallPath(model.invoke, [[0], [1, 1, 1], [1, 1, 1], [3]], threads=3))


async def test_ids_on_the_message(engine: ScriptedEngine, model: ChatWeft) -> None:
    """A message has the ids of its call and program, and the next call has the message's call as its parent."""
    async with weft.Program("ids", session_id="mine") as program:
        first = await model.ainvoke("Hello", program.config())
        second = await model.ainvoke("Hello", program.config())
        assert engine.sessions == {"mine": {program.program_id}}
    one, two = report(first), report(second)
    assert (one["program_id"], two["program_id"]) == (program.program_id, program.program_id)
    assert one["parents"] == ()
    assert two["parents"] == (one["call_id"],)
    assert one["thread_id"] == two["thread_id"]
    assert first.response_metadata["id"] == f"chatcmpl-{one['call_id']}"


# -- several programs at once


class Counted(TypedDict):
    """The state of a loop that makes a number of calls."""

    left: int
    answers: Annotated[list[AnyMessage], operator.add]


def counting_graph(model: ChatWeft) -> Any:
    """A graph that makes `left` calls. Every other call is made without the config."""

    async def node(state: Counted, config: RunnableConfig) -> dict[str, Any]:
        await asyncio.sleep(0)
        answer = await (model.ainvoke("Hello", config) if state["left"] % 2 else model.ainvoke("Hello"))
        return {"left": state["left"] - 1, "answers": [answer]}

    graph = StateGraph(Counted).add_node(node).add_edge(START, "node")
    graph.add_conditional_edges("node", lambda state: "node" if state["left"] else END)
    return graph.compile()


async def test_programs_share_a_graph(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Eight programs at once share one graph, one model and one engine. Each has exactly its own calls."""
    graph, ended = counting_graph(model), EndedPrograms(engine)

    @weft.program(name="shared")
    async def main(calls: int, program: weft.Program) -> tuple[weft.Program, list[AIMessage]]:
        result = await graph.ainvoke({"left": calls, "answers": []}, program.config())
        return program, result["answers"]

    results = await asyncio.gather(*(main(1 + n % 4) for n in range(8)))
    assert len({program.program_id for program, _ in results}) == 8
    for n, (program, answers) in enumerate(results):
        assert program.row is not None
        assert program.row.calls == len(answers) == 1 + n % 4
        assert {report(message)["program_id"] for message in answers} == {program.program_id}
        assert len(program.row.threads) == 1
        assert levels([report(message) for message in answers]) == [[0]] + [[1]] * (n % 4)
    assert len(ended.rows) == 8


async def test_programs_share_an_agent(engine: ScriptedEngine, structured: ChatWeft) -> None:
    """Programs at once share one agent, on the event loop and in threads. Each has exactly its own calls."""
    shared, ended = agent(structured, [weather]), EndedPrograms(engine)

    @weft.program
    async def on_the_loop(runs: int, program: weft.Program) -> tuple[weft.Program, list[AnyMessage]]:
        messages = []
        for _ in range(runs):
            messages += (await shared.ainvoke(QUESTION, program.config()))["messages"]
        return program, messages

    @weft.program
    def in_a_thread(runs: int, program: weft.Program) -> tuple[weft.Program, list[AnyMessage]]:
        messages = []
        for _ in range(runs):
            messages += shared.invoke(QUESTION, program.config())["messages"]
        return program, messages

    results = await asyncio.gather(
        on_the_loop(1), on_the_loop(2), asyncio.to_thread(in_a_thread, 1), asyncio.to_thread(in_a_thread, 2)
    )
    for (program, messages), runs in zip(results, (1, 2, 1, 2), strict=True):
        assert program.row is not None
        answers = [report(message) for message in messages if isinstance(message, AIMessage)]
        assert program.row.calls == len(answers) == 2 * runs
        assert {answer["program_id"] for answer in answers} == {program.program_id}
    assert len(ended.rows) == 4


async def test_worker_task_of_another_program(engine: ScriptedEngine, model: ChatWeft) -> None:
    """A worker task that the first program started makes a call with the config of the second: the second has the call.

    LangChain's context variable, which the worker inherited, names the first program.
    """
    jobs: asyncio.Queue[tuple[RunnableConfig, asyncio.Future[AIMessage]]] = asyncio.Queue()
    workers: list[asyncio.Task[None]] = []

    async def work() -> None:
        while True:
            config, answer = await jobs.get()
            answer.set_result(await model.ainvoke("Hello", config))

    async def node(_state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        if not workers:
            workers.append(asyncio.create_task(work()))
        answer = asyncio.get_running_loop().create_future()
        await jobs.put((config, answer))
        return {"messages": [await answer]}

    graph = StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()
    try:
        async with weft.Program("first") as first:
            first_answer = (await graph.ainvoke(QUESTION, first.config()))["messages"][-1]
            async with weft.Program("second") as second:
                second_answer = (await graph.ainvoke(QUESTION, second.config()))["messages"][-1]
    finally:
        workers[0].cancel()
    assert report(first_answer)["program_id"] == first.program_id
    assert report(second_answer)["program_id"] == second.program_id
    assert first.row is not None
    assert second.row is not None
    assert (first.row.calls, second.row.calls) == (1, 1)


async def test_config_of_another_program_wins(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Inside a run of one program, a config of another program makes the calls the other program's."""
    async with weft.Program("outer") as outer, weft.Program("inner") as inner:

        async def node(text: str) -> list[AIMessage]:
            return [
                await model.ainvoke(text, inner.config()),
                await (PROMPT | model).ainvoke({"topic": text}, inner.config()),
                await model.ainvoke(text),
            ]

        answers = await RunnableLambda(node).ainvoke("Hello", outer.config())
    assert [report(answer)["program_id"] for answer in answers] == [
        inner.program_id,
        inner.program_id,
        outer.program_id,
    ]


# -- without the decorator


async def test_each_root_run_is_a_program(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Under one shared handler, every root run is a program, which has the run's name and ends with it."""
    ended, handler = EndedPrograms(engine), ProgramCallbackHandler()
    for n in range(2):
        config: RunnableConfig = {"callbacks": [handler], "run_name": f"run {n}"}
        await (PROMPT | model | TEXT | model).ainvoke(TOPICS[0], config)
        assert len(engine.table) == 0
    assert [(row.info.name, row.calls, str(row.state)) for row in ended.rows] == [
        ("run 0", 2, "finished"),
        ("run 1", 2, "finished"),
    ]
    assert len(ended.rows[0].threads) == 1


@pytest.mark.parametrize(
    ("run", "name", "shape"),
    [
        (lambda model, config: model.invoke("Hello", config), "ChatWeft", (1, 1)),
        (lambda model, config: list(model.stream("Hello", config)), "ChatWeft", (1, 1)),
        (lambda model, config: (PROMPT | model).invoke(TOPICS[0], config), "RunnableSequence", (1, 1)),
        (lambda model, config: RunnableParallel(a=model, b=model).invoke("x", config), "RunnableParallel<a,b>", (2, 2)),
        (lambda model, config: two_nodes(model).ainvoke(QUESTION, config), "LangGraph", (2, 1)),
        (lambda model, config: drain(two_nodes(model).astream(QUESTION, config)), "LangGraph", (2, 1)),
        (lambda model, config: drain(model.astream_events("x", config, version="v2")), "ChatWeft", (1, 1)),
    ],
    ids=["model", "stream", "expression", "parallel", "graph", "graph stream", "events"],
)
async def test_root_run_without_a_name(
    engine: ScriptedEngine, model: ChatWeft, run: Any, name: str, shape: tuple[int, int]
) -> None:
    """A program has LangChain's name of its root run, and all calls under this run."""
    ended = EndedPrograms(engine)
    await resolve(run(model, {"callbacks": [ProgramCallbackHandler()]}))
    (row,) = ended.rows
    assert (row.info.name, str(row.state)) == (name, "finished")
    assert (row.calls, len(row.threads)) == shape


async def test_batch_of_root_runs(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Each input of a batch is a root run, and so a program."""
    ended = EndedPrograms(engine)
    await (PROMPT | model).abatch(TOPICS, {"callbacks": [ProgramCallbackHandler()]})
    assert [(row.calls, len(row.threads)) for row in ended.rows] == [(1, 1)] * 4


@pytest.mark.parametrize(
    ("extra", "session"),
    [
        ({"metadata": {"session_id": "s-1"}}, "s-1"),
        ({"metadata": {"conversation_id": "c-1"}}, "c-1"),
        ({"metadata": {"thread_id": "t-1"}}, "t-1"),
        ({"metadata": {"thread_id": 7}}, "7"),
        ({"configurable": {"thread_id": "checkpointed"}}, "checkpointed"),
        ({"metadata": {"thread_id": "t-1", "session_id": "s-1", "conversation_id": "c-1"}}, "s-1"),
        ({}, None),
    ],
)
async def test_session_of_a_root_run(
    engine: ScriptedEngine, model: ChatWeft, extra: dict[str, Any], session: str | None
) -> None:
    """A root run has the session that its metadata names, in LangSmith's order, or else a session of its own."""
    ended = EndedPrograms(engine)
    for _ in range(2):
        await two_nodes(model).ainvoke(QUESTION, {"callbacks": [ProgramCallbackHandler()], **extra})
    first, second = (row.info.session_id for row in ended.rows)
    assert (first == second) == (session is not None)
    assert session is None or first == session


async def test_an_unusable_session_of_a_root_run(
    engine: ScriptedEngine, model: ChatWeft, caplog: pytest.LogCaptureFixture
) -> None:
    """A root run whose session id is not usable is one program in a session of its own, and a warning says so."""
    ended = EndedPrograms(engine)
    config: RunnableConfig = {"callbacks": [ProgramCallbackHandler()], "metadata": {"session_id": "x" * 300}}
    await two_nodes(model).ainvoke(QUESTION, config)
    (row,) = ended.rows
    assert row.calls == 2
    assert row.info.session_id.startswith("sess-")
    assert "session id is not usable" in caplog.text


async def test_root_runs_at_once(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Root runs at once under one shared handler keep their calls apart."""
    graph, ended, handler = counting_graph(model), EndedPrograms(engine), ProgramCallbackHandler()

    async def one(calls: int) -> tuple[int, set[str]]:
        config: RunnableConfig = {"callbacks": [handler], "run_name": f"{calls} calls"}
        answers = (await graph.ainvoke({"left": calls, "answers": []}, config))["answers"]
        return len(answers), {report(message)["program_id"] for message in answers}

    results = await asyncio.gather(*(one(1 + n % 4) for n in range(8)))
    assert all(len(programs) == 1 for _, programs in results)
    rows = {row.info.program_id: row for row in ended.rows}
    assert len(rows) == 8
    for calls, (program,) in results:
        assert rows[program].calls == calls  # type: ignore[index]
        assert rows[program].info.name == f"{calls} calls"  # type: ignore[index]


@pytest.mark.parametrize("run_name", ["expression", None])
async def test_failing_root_run(engine: ScriptedEngine, model: ChatWeft, run_name: str | None) -> None:
    """A root run that raises ends its program as failed, and the program keeps the calls before the error."""
    ended = EndedPrograms(engine)

    def fail(_message: AIMessage) -> None:
        raise LookupError("no")

    config: RunnableConfig = {"callbacks": [ProgramCallbackHandler()]}
    with pytest.raises(LookupError):
        await (model | fail).ainvoke("Hello", {**config, "run_name": run_name} if run_name else config)
    assert [(row.info.name, row.calls, str(row.state)) for row in ended.rows] == [
        (run_name or "RunnableSequence", 1, "failed")
    ]


async def test_without_any_handler(engine: ScriptedEngine, model: ChatWeft) -> None:
    """Without a handler, each call is a program with the model's name."""
    ended = EndedPrograms(engine)
    named = model.model_copy(update={"name": "clerk"})
    await (named | TEXT | named).ainvoke("Hello")
    list(model.stream("Hello"))
    await drain(model.astream("Hello"))
    model.batch(["Hello", "Hello"])
    assert [row.info.name for row in ended.rows] == ["clerk"] * 2 + ["chat"] * 4
    assert {(row.calls, str(row.state)) for row in ended.rows} == {(1, "finished")}
