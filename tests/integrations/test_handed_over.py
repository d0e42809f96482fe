"""A handle that a run passes on to code elsewhere, such as a worker with a queue: its calls are in that run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")
pytest.importorskip("autogen_core", reason="the AutoGen extra is not installed")

from autogen_core.models import UserMessage
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.graph import START, MessagesState, StateGraph
from shapes import edges, expected

import weft
from weft.core.program import adapter
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import openai_client
from weft.testing import ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]
Job = Callable[[], Awaitable[Any]]
Do = Callable[[Job], Awaitable[Any]]


class Worker:
    """A task that does jobs from a queue, one after another. It has the context of the code that starts it."""

    def __init__(self) -> None:
        self._jobs: asyncio.Queue[tuple[Job, asyncio.Future[Any]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._task or asyncio.create_task(self._work())

    async def do(self, job: Job) -> Any:
        """Put a job into the queue, and wait for its result."""
        done = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((job, done))
        return await done

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _work(self) -> None:
        while True:
            job, done = await self._jobs.get()
            try:
                done.set_result(await job())
            except Exception as error:
                done.set_exception(error)


@asynccontextmanager
async def a_worker() -> AsyncIterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        await worker.stop()


def asks(model: ChatWeft, name: str) -> Callable[[Any], Awaitable[Any]]:
    """The code of a node that makes one call."""

    async def ask(_: Any) -> Any:
        return {"messages": [await model.with_config(run_name=name).ainvoke("Hello")]}

    return ask


def node(code: Callable[[], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def run(_: Any) -> Any:
        await code()
        return {"messages": [AIMessage("done")]}

    return run


async def run_nodes(program: weft.Program, *nodes: Any) -> None:
    """Run a graph of nodes in a chain."""
    steps = [(f"step {number}", each) for number, each in enumerate(nodes)]
    graph = StateGraph(MessagesState).add_sequence(steps).add_edge(START, "step 0").compile()
    await graph.ainvoke({"messages": []}, program.config())


# -- what a node passes on: each function is called in the node, and the job that it returns makes a call elsewhere


def a_config(model: ChatWeft, program: weft.Program) -> Job:
    return functools.partial(model.ainvoke, "Go on", program.config(run_name="mid"))


def a_config_for_a_bound_model(model: ChatWeft, program: weft.Program) -> Job:
    return functools.partial(model.bind(stop=["."]).ainvoke, "Go on", program.config(run_name="mid"))


def a_config_for_a_sequence(model: ChatWeft, program: weft.Program) -> Job:
    sequence = RunnableLambda(lambda _: "Go on") | model.with_config(run_name="mid")
    return functools.partial(sequence.ainvoke, "Go on", program.config())


def a_model_with_callbacks(model: ChatWeft, program: weft.Program) -> Job:
    bound = model.with_config(callbacks=program.callbacks, run_name="mid")
    return functools.partial(bound.ainvoke, "Go on")


def a_config_of_a_branch(model: ChatWeft, program: weft.Program) -> Job:
    branch = program.branch()

    async def job() -> None:
        with branch:
            await model.ainvoke("Go on", branch.config(run_name="mid"))

    return job


def an_openai_client(model: ChatWeft, program: weft.Program) -> Job:
    chat: Any = openai_client(model.engine, program).chat.completions
    return functools.partial(chat.create, model="scripted", messages=[{"role": "user", "content": "Go on"}])


def an_autogen_client(model: ChatWeft, program: weft.Program) -> Job:
    client = WeftChatCompletionClient(model.engine).bind(program, agent="mid")
    return functools.partial(client.create, [UserMessage(content="Go on", source="user")])


PASSED_ON = {
    each.__name__: each
    for each in (
        a_config,
        a_config_for_a_bound_model,
        a_config_for_a_sequence,
        a_model_with_callbacks,
        a_config_of_a_branch,
        an_openai_client,
        an_autogen_client,
    )
}


@pytest.mark.parametrize("started", ["before the program", "around the graph", "in an earlier node", "in the node"])
@pytest.mark.parametrize("what", PASSED_ON)
async def test_a_worker_works_for_the_run_that_passes_the_handle_on(
    scripted_engine: MakeEngine, what: str, started: str
) -> None:
    """Its call comes after the calls of that run so far, and what follows the run comes after it, wherever the worker
    was started. The other calls are in other runs."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    async with a_worker() as worker, weft.Program() as program:

        async def first() -> None:
            if started == "in an earlier node":
                worker.start()
            await asks(model, "a")(None)

        async def middle() -> None:
            if started == "in the node":
                worker.start()
            await asks(model, "b")(None)
            await worker.do(PASSED_ON[what](model, program))
            await asks(model, "c")(None)

        async def around(_: Any) -> None:
            if started == "around the graph":
                worker.start()
            await run_nodes(program, node(first), node(middle), asks(model, "end"))

        if started == "before the program":
            worker.start()
        await RunnableLambda(around).ainvoke("", program.config())
    assert edges(program.graph, unnamed="mid") == expected("a>b b>mid mid>c c>end")
    assert len(program.graph.threads) == 1


@pytest.mark.parametrize("given", ["{}", "Improve this: {}"], ids=["the whole text", "a quotation"])
async def test_a_text_reaches_a_parallel_strand_by_a_queue(scripted_engine: MakeEngine, given: str) -> None:
    """A call that is given the answer comes after it, and the strand that has passed the answer on does not wait."""
    engine = scripted_engine(["an answer that is long enough", "first of its strand", "fine", "fine"])
    model = ChatWeft(engine=engine)
    texts: asyncio.Queue[str] = asyncio.Queue()

    async with weft.Program() as program:

        async def written(_: Any) -> Any:
            message = await model.ainvoke("Begin", program.config(run_name="written"))
            ready.set()
            texts.put_nowait(message.text)
            await model.ainvoke("Go on", program.config(run_name="next"))

        async def read(_: Any) -> Any:
            await ready.wait()
            await model.ainvoke("Read", program.config(run_name="own"))
            await model.ainvoke(given.format(await texts.get()), program.config(run_name="quotes"))

        ready = asyncio.Event()
        await RunnableParallel(a=RunnableLambda(written), b=RunnableLambda(read)).ainvoke("", program.config())
    assert expected("written>next written>quotes own>quotes") <= edges(program.graph)
    assert "next>quotes" not in edges(program.graph)


async def test_a_worker_outlives_the_inner_program_that_started_it(scripted_engine: MakeEngine) -> None:
    """Its context names the inner program. Later calls belong to the program that they name, which is around it."""
    engine = scripted_engine(lambda _: "fine")

    @weft.program
    async def inner(worker: Worker, program: weft.Program) -> None:
        async def start(_: Any) -> None:
            worker.start()

        await RunnableLambda(start).ainvoke("", program.config())

    async with a_worker() as worker, weft.Program() as program:

        async def code(_: Any) -> None:
            await inner(worker)
            model = ChatWeft(engine=engine, name="late", callbacks=program.callbacks)
            await worker.do(functools.partial(model.ainvoke, "Go on"))

        await RunnableLambda(code).ainvoke("", program.config())
    assert edges(program.graph) == {"late"}


async def test_a_worker_on_a_thread(scripted_engine: MakeEngine) -> None:
    """A thread that gets a config works for the run that made it, if it cannot be inside an open run in there."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()
        async with weft.Program() as program:

            async def middle() -> None:
                config = program.config(run_name="mid")
                await loop.run_in_executor(pool, lambda: model.invoke("Go on", config))

            await run_nodes(program, asks(model, "a"), node(middle), asks(model, "end"))
    assert edges(program.graph) == expected("a>mid mid>end")


async def test_a_thread_of_an_inner_run_that_got_the_config_of_an_outer_one(scripted_engine: MakeEngine) -> None:
    """It may be inside each open run in there, so what its call comes after is a guess."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    loop = asyncio.get_running_loop()
    async with weft.Program() as program:

        async def middle() -> None:
            config = program.config(run_name="mid")

            async def inner(_: Any) -> None:
                await asks(model, "inner")(None)
                await loop.run_in_executor(None, lambda: model.invoke("Go on", config))

            await RunnableLambda(inner).ainvoke("Go on")

        await run_nodes(program, asks(model, "a"), node(middle), asks(model, "end"))
    assert edges(program.graph) == expected("a>inner inner~mid mid>end")


@pytest.mark.parametrize("made", ["in the node", "in an earlier node", "at the top"])
async def test_one_config_for_a_loop_of_calls(scripted_engine: MakeEngine, made: str) -> None:
    """Each call comes after the one before it in its own run, wherever the config was made. It does not go back to
    what had ended when the config was made."""
    model, kept = ChatWeft(engine=scripted_engine(lambda _: "fine")), list[Any]()
    async with weft.Program() as program:

        async def keep() -> None:
            if made != "at the top":
                kept.append(program.config(run_name="loop"))

        async def loop() -> None:
            await keep()
            for _ in range(3):
                await model.ainvoke("Go on", kept[0])

        if made == "at the top":
            kept.append(program.config(run_name="loop"))
        nodes = [node(keep)] if made == "in an earlier node" else []
        await run_nodes(program, *nodes, asks(model, "a"), node(loop), asks(model, "end"))
        await model.ainvoke("Go on", kept[0])
        await model.ainvoke("Go on", kept[0])
    found = expected("a>loop loop>loop2 loop2>loop3 loop3>end end>loop4 loop4>loop5")
    assert edges(program.graph) == found


async def test_a_worker_makes_a_loop_of_calls_with_one_config(scripted_engine: MakeEngine) -> None:
    """The position of the config is where the first call begins. The next calls come one after another."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    async with a_worker() as worker, weft.Program() as program:
        worker.start()

        async def middle() -> None:
            config = program.config(run_name="mid")
            for _ in range(3):
                await worker.do(functools.partial(model.ainvoke, "Go on", config))

        await run_nodes(program, asks(model, "a"), node(middle), asks(model, "end"))
    assert edges(program.graph) == expected("a>mid mid>mid2 mid2>mid3 mid3>end")


@pytest.mark.parametrize("what", ["a_config", "a_config_of_a_branch", "an_openai_client"])
async def test_a_worker_that_a_parallel_run_has_started(scripted_engine: MakeEngine, what: str) -> None:
    """While that run is open, the code might as well be that run's own, with a config that it was given. So what the
    call comes after is a guess."""
    model, is_started, is_over = ChatWeft(engine=scripted_engine(lambda _: "fine")), asyncio.Event(), asyncio.Event()
    async with a_worker() as worker, weft.Program() as program:

        async def left(_: Any) -> None:
            worker.start()
            await asks(model, "x")(None)
            is_started.set()
            await is_over.wait()

        async def right(_: Any) -> None:
            await asks(model, "y")(None)
            await is_started.wait()
            await worker.do(PASSED_ON[what](model, program))
            is_over.set()

        both = RunnableParallel(left=left, right=right)
        await (RunnableLambda(asks(model, "a")) | both | asks(model, "end")).ainvoke("", program.config())
    assert edges(program.graph, unnamed="mid") == expected("a>x a>y x~mid y~mid mid>end")


async def test_a_call_of_a_worker_after_the_end_of_the_run_is_a_guess(scripted_engine: MakeEngine) -> None:
    """The worker need not have waited for what ended beside the run. What does not come after its call stays exact."""
    model, jobs = ChatWeft(engine=scripted_engine(lambda _: "fine")), list[Job]()
    async with a_worker() as worker, weft.Program() as program:
        worker.start()

        async def left(_: Any) -> Any:
            await asks(model, "x")(None)
            jobs.append(a_config(model, program))

        async def late() -> None:
            await worker.do(jobs[0])
            await asks(model, "b")(None)

        graph = StateGraph(MessagesState).add_node("left", left).add_node("right", asks(model, "y"))
        graph.add_node("late", node(late)).add_edge(START, "left").add_edge(START, "right")
        await graph.add_edge(["left", "right"], "late").compile().ainvoke({"messages": []}, program.config())
    assert edges(program.graph) == expected("x~mid y~mid x>b y>b")


async def test_a_config_is_the_same_outside_of_runs() -> None:
    """A handle has one callback handler, and a branch its own, as long as no run passes them on."""
    with weft.Program() as program:
        assert program.callbacks[0] is program.config()["callbacks"][0] is adapter(program, "langchain")
        with program.branch() as branch:
            assert branch.callbacks[0] is adapter(branch, "langchain") is not adapter(program, "langchain")


async def test_what_a_run_passes_on_is_the_handle(scripted_engine: MakeEngine) -> None:
    """Callbacks that are made in a run carry the same program or branch, whose end they bring about."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    async with weft.Program() as program:

        async def check() -> None:
            for handle in (program, program.branch()):

                async def inside(_: Any, handle: weft.Program = handle) -> None:
                    carried = handle.callbacks[0].program
                    assert carried is not handle
                    assert carried.program_id == program.program_id
                    assert carried.is_branch == handle.is_branch
                    await model.ainvoke("Go on", handle.config())

                await RunnableLambda(inside).ainvoke("", handle.config())

        await run_nodes(program, node(check))
    assert len(program.graph) == 2
