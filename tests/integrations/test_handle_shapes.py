"""A handle used inside one of its program's runs: its calls are at their place in the run, however it is passed."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")
pytest.importorskip("autogen_core", reason="the AutoGen extra is not installed")

from autogen_core.models import UserMessage
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnableParallel
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy
from shapes import edges, expected

import weft
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import openai_client, sync_openai_client
from weft.testing import Reply, ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., ScriptedEngine]
Part = Callable[[ChatWeft, weft.Program], Awaitable[Any]]
PARTS: dict[str, tuple[Part, str]] = {}


def part(text: str) -> Callable[[Part], Part]:
    """Add a part of a program, the code of a node, to the table with the edges that it makes between "a" and "end"."""

    def enter(function: Part) -> Part:
        PARTS[function.__name__] = function, text
        return function

    return enter


@part("a>mid mid>end")
async def own_config(model: ChatWeft, program: weft.Program) -> None:
    await model.ainvoke("Go on", config=program.config(run_name="mid"))


@part("a>mid mid>end")
async def own_config_with_a_bound_model(model: ChatWeft, program: weft.Program) -> None:
    await model.bind(stop=["."]).with_config(tags=["tag"]).ainvoke("Go on", config=program.config(run_name="mid"))


@part("a>mid mid>mid2 mid2>end")
async def own_config_with_a_sequence(model: ChatWeft, program: weft.Program) -> None:
    named = model.with_config(run_name="mid")
    await (named | (lambda _: "Go on") | named).ainvoke("Go on", config=program.config())


@part("a>mid mid>end")
async def own_callbacks_of_the_model(model: ChatWeft, program: weft.Program) -> None:
    await model.model_copy(update={"callbacks": program.callbacks}).ainvoke("Go on", config={"run_name": "mid"})


@part("a>mid mid>mid2 mid2>end")
async def own_config_before_and_after_none(model: ChatWeft, program: weft.Program) -> None:
    await model.with_config(run_name="mid").ainvoke("Go on")
    await model.ainvoke("Go on", config=program.config(run_name="mid"))


@part("a>mid mid>end")
async def own_config_on_a_thread(model: ChatWeft, program: weft.Program) -> None:
    await asyncio.to_thread(model.invoke, "Go on", config=program.config(run_name="mid"))


@part("a>mid mid>end")
async def branch_on_a_thread_without_context(model: ChatWeft, program: weft.Program) -> None:
    with program.branch() as branch:
        call = functools.partial(model.invoke, "Go on", config=branch.config(run_name="mid"))
        await asyncio.get_running_loop().run_in_executor(None, call)


@part("a>x a>y x>x2 y>y2 x2>end y2>end")
async def branches(model: ChatWeft, program: weft.Program) -> None:
    async def ask(branch: weft.Program, name: str) -> None:
        async with branch:
            await model.ainvoke("Go on", config=branch.config(run_name=name))
            await model.with_config(run_name=name).ainvoke("Go on", config=branch.config())

    await asyncio.gather(ask(program.branch(), "x"), ask(program.branch(), "y"))


@part("a>x a>y x>x2 y>y2 x2>z y2>z z>end")
async def branches_and_a_join(model: ChatWeft, program: weft.Program) -> None:
    await branches(model, program)
    await model.ainvoke("Go on", config=program.config(run_name="z"))


@part("a>x a>y x>x2 y~y2 x2~y2 y2>end")
async def branch_next_to_the_plain_handle(model: ChatWeft, program: weft.Program) -> None:
    """A strand of the plain handle goes on after the end of a branch, for which it did not wait."""
    ended, go_on = asyncio.Event(), asyncio.Event()

    async def on_a_branch(branch: weft.Program) -> None:
        async with branch:
            await model.ainvoke("Go on", config=branch.config(run_name="x"))
            await go_on.wait()
            await model.ainvoke("Go on", config=branch.config(run_name="x"))
        ended.set()

    async def plain() -> None:
        await model.ainvoke("Go on", config=program.config(run_name="y"))
        go_on.set()
        await ended.wait()
        await model.ainvoke("Go on", config=program.config(run_name="y"))

    await asyncio.gather(on_a_branch(program.branch()), plain())


@part("a>x x>x2 x2>end")
async def branch_of_a_branch(model: ChatWeft, program: weft.Program) -> None:
    async with program.branch() as outer:

        async def ask(_: Any) -> None:
            async with outer.branch() as inner:
                await model.ainvoke("Go on", config=inner.config(run_name="x"))
            await model.ainvoke("Go on", config=program.config(run_name="x"))

        await RunnableLambda(ask).ainvoke("Go on", config=outer.config())


@weft.program
async def asking(model: ChatWeft, name: str, program: weft.Program) -> None:
    """An entrypoint of two calls."""
    await model.ainvoke("Go on", config=program.config(run_name=name))
    await model.bind(stop=["."]).ainvoke("Go on", config=program.config(run_name=name))


@part("a>x x>x2 x2>end")
async def program_passed_from_a_tool(model: ChatWeft, program: weft.Program) -> None:
    @tool
    async def look(query: str) -> str:
        """Look."""
        await asking(model, "x", program=program)
        return "found"

    await look.ainvoke({"query": "fog"})


@part("a>x a>y x>x2 y>y2 x2>end y2>end")
async def program_passed_twice_at_once(model: ChatWeft, program: weft.Program) -> None:
    await asyncio.gather(*(asking(model, name, program=program) for name in "xy"))


@part("a>model model>x x>x2 x2>model2 model2>end")
async def program_passed_from_the_tool_of_an_agent(model: ChatWeft, program: weft.Program) -> None:
    @tool
    async def look(query: str) -> str:
        """Look."""
        await asking(model, "x", program=program)
        return "found"

    agent = create_agent(model, [look])
    await agent.ainvoke({"messages": [HumanMessage("tool")]}, config=program.config())


def failing(model: ChatWeft, name: str) -> Any:
    """A sequence that makes a call and fails after it."""

    def fail(_: Any) -> Any:
        raise ConnectionError

    return model.with_config(run_name=name) | fail


@part("a>mid mid>mid2 mid2>end")
async def named_fallbacks_with_a_bound_attempt(model: ChatWeft, program: weft.Program) -> None:
    await failing(model, "mid").with_fallbacks([model.bind(stop=["."])]).ainvoke("Go on", {"run_name": "mid"})


@part("a>mid mid>mid2 mid2>mid3 mid3>end")
async def named_fallbacks_in_a_sequence(model: ChatWeft, program: weft.Program) -> None:
    last = model.with_config(run_name="mid") | (lambda _: "done")
    attempts = failing(model, "mid").with_fallbacks([failing(model, "mid"), last])
    await (RunnableLambda(lambda _: "Go on") | attempts.with_config(run_name="attempts")).ainvoke("Hello")


@part("a>x a>y x>x2 y>y2 x2>end y2>end")
async def named_fallbacks_side_by_side(model: ChatWeft, program: weft.Program) -> None:
    x, y = (failing(model, name).with_fallbacks([model.bind(stop=["."])]).with_config(run_name=name) for name in "xy")
    await RunnableParallel(x=x, y=y).ainvoke("Go on")


@part("a>mid mid>mid2 mid2>mid3 mid3>end")
async def config_that_a_tool_was_given(model: ChatWeft, program: weft.Program) -> None:
    @tool
    async def look(query: str, config: RunnableConfig) -> str:
        """Look."""
        named = model.with_config(run_name="mid")
        await named.ainvoke("Go on")
        await model.ainvoke("Go on", {**config, "run_name": "mid"})
        await named.ainvoke("Go on")
        return "found"

    await look.ainvoke({"query": "fog"})


@part("a>mid mid>mid2 mid2>end")
async def openai_clients(model: ChatWeft, program: weft.Program) -> None:
    client: Any = openai_client(model.engine, program)
    await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Go on"}])
    sync: Any = sync_openai_client(model.engine, program)
    await asyncio.to_thread(
        sync.chat.completions.create, model="scripted", messages=[{"role": "user", "content": "Go on"}]
    )


@part("a>mid mid>mid2 mid2>end")
async def autogen_client(model: ChatWeft, program: weft.Program) -> None:
    client = WeftChatCompletionClient(model.engine).bind(program, agent="mid")
    await client.create([UserMessage(content="Go on", source="user")])
    _ = [chunk async for chunk in client.create_stream([UserMessage(content="Go on", source="user")])]


def reply(body: Any) -> Any:
    """A tool call if the message asks for it, otherwise a text that tells nothing."""
    last = body["messages"][-1]
    return Reply(tool_calls=[("look", {"query": "fog"})]) if last["content"] == "tool" else "fine"


def asks(model: ChatWeft, label: str) -> Any:
    """The code of a node that makes one call."""

    async def ask(_: Any) -> Any:
        return {"messages": [await model.with_config(run_name=label).ainvoke("Hello")]}

    return ask


async def between_two_calls(model: ChatWeft, program: weft.Program, part: Part, around: str) -> None:
    """Run a part of a program between the calls "a" and "end", each in a node or step of its own."""

    async def middle(_: Any) -> Any:
        await part(model, program)
        return {"messages": [AIMessage("done")]}

    steps = [asks(model, "a"), middle, asks(model, "end")]
    if around == "node":
        graph = StateGraph(MessagesState).add_sequence([(f"step {n}", step) for n, step in enumerate(steps)])
        await graph.add_edge(START, "step 0").compile().ainvoke({"messages": []}, program.config())
    elif around == "sequence":
        await (RunnableLambda(steps[0]) | steps[1] | steps[2]).ainvoke("Hello", program.config())
    else:
        async with program.branch() as branch:
            await (RunnableLambda(steps[0]) | steps[1] | steps[2]).ainvoke("Hello", branch.config())


@pytest.mark.parametrize("around", ["node", "sequence", "branch"])
@pytest.mark.parametrize("name", PARTS)
async def test_handle_inside_a_run(scripted_engine: MakeEngine, name: str, around: str) -> None:
    """A handle used inside a run starts from the run's frontier, and what follows the run comes after its calls."""
    model = ChatWeft(engine=scripted_engine(reply))
    function, text = PARTS[name]

    async with weft.Program() as program:
        await between_two_calls(model, program, function, around)
    assert edges(program.graph, unnamed="mid") == expected(text)


async def on_a_thread(call: Callable[[], Any]) -> None:
    """Call on a thread that does not get the context of LangChain."""
    await asyncio.get_running_loop().run_in_executor(None, call)


def with_its_own_branch(model: ChatWeft, program: weft.Program) -> None:
    with program.branch() as branch:
        model.invoke("Go on", config=branch.config(run_name="mid"))


def with_the_handle(model: ChatWeft, program: weft.Program) -> None:
    model.invoke("Go on", config=program.config(run_name="mid"))


def in_an_entrypoint(model: ChatWeft, program: weft.Program) -> None:
    weft.program(with_the_handle)(model, program=program)


HANDLES = {"the same": with_the_handle, "a branch": with_its_own_branch, "an entrypoint": in_an_entrypoint}


@pytest.mark.parametrize("around", ["node", "sequence", "branch"])
@pytest.mark.parametrize("handle", HANDLES)
async def test_a_call_on_a_thread_without_context_is_a_guess(
    scripted_engine: MakeEngine, handle: str, around: str
) -> None:
    """A thread that a node makes itself does not say that it is inside the node, so no edge claims to be exact.

    The node may be in a branch, while the thread uses the handle of the program, or opens a branch of that.
    """
    model = ChatWeft(engine=scripted_engine(reply))

    async def part(model: ChatWeft, program: weft.Program) -> None:
        await on_a_thread(functools.partial(HANDLES[handle], model, program))

    async with weft.Program() as program:
        await between_two_calls(model, program, part, around)
    assert edges(program.graph) == expected("a~mid mid~end")


async def test_the_handle_of_an_outer_branch_on_a_thread(scripted_engine: MakeEngine) -> None:
    """It may be used inside a run of a branch of that branch. A branch next to it has nothing to do with the run."""
    model = ChatWeft(engine=scripted_engine(reply))

    async with weft.Program() as program:
        other = program.branch()
        async with program.branch() as outer, outer.branch() as inner:

            async def middle(_: Any) -> None:
                await on_a_thread(functools.partial(with_the_handle, model, outer))

                await on_a_thread(lambda: model.invoke("Go on", config=other.config(run_name="other")))

            await (RunnableLambda(asks(model, "a")) | middle | asks(model, "b")).ainvoke("Hello", inner.config())
        other.end()
    assert edges(program.graph) == {"other", *expected("a~mid mid~b")}


async def test_branches_on_threads_are_exact(scripted_engine: MakeEngine) -> None:
    """Branches that are opened before their threads begin, and calls of the opening thread, claim exact edges."""
    model, begun, go_on = ChatWeft(engine=scripted_engine(reply)), threading.Event(), threading.Event()

    def chain(branch: weft.Program, name: str) -> None:
        with branch:
            named = model.with_config(run_name=name)

            def ask(_: Any) -> None:
                named.invoke("Go on")
                begun.set()
                go_on.wait(60)
                named.invoke("Go on")

            RunnableLambda(ask).invoke("Hello", branch.config())

    async with weft.Program() as program:
        await model.ainvoke("Hello", program.config(run_name="a"))
        first = asyncio.ensure_future(on_a_thread(functools.partial(chain, program.branch(), "x")))
        await asyncio.to_thread(begun.wait, 60)
        second = asyncio.ensure_future(on_a_thread(functools.partial(chain, program.branch(), "y")))
        go_on.set()
        await asyncio.gather(first, second)
        await model.ainvoke("Hello", program.config(run_name="end"))
    assert edges(program.graph) == expected("a>x x>x2 a>y y>y2 x2>end y2>end")


async def test_calls_of_a_parallel_part_stay_together(scripted_engine: MakeEngine) -> None:
    """Lineage names one of two calls that ended with one run. The others that had ended stay guesses."""
    numbers, ended = itertools.count(), asyncio.Event()
    model = ChatWeft(engine=scripted_engine(lambda _: f"the answer with the number {next(numbers)}"))

    async def two_and_one() -> None:
        both = RunnableParallel(x=model.with_config(run_name="x"), y=model.with_config(run_name="y"))
        answers = await both.ainvoke("Hello")
        await model.ainvoke([answers["x"]], config={"run_name": "z"})
        ended.set()

    async def other() -> None:
        await model.ainvoke("Hello", config={"run_name": "other"})
        await ended.wait()

    async def at_once(_: Any) -> None:
        await asyncio.gather(two_and_one(), other())

    async with weft.Program() as program:
        await RunnableLambda(at_once).ainvoke("", program.config())
    assert edges(program.graph) == expected("other x>z y~z other~z")


async def test_chains_that_run_at_once_stay_exact(scripted_engine: MakeEngine) -> None:
    """They begin in one thread, in which a framework would have told if one were inside another one."""
    model = ChatWeft(engine=scripted_engine(reply))
    async with weft.Program() as program:
        chains = (RunnableLambda(lambda _: "Go on") | model.with_config(run_name=name) for name in "xy")
        await model.ainvoke("Hello", program.config(run_name="a"))
        await asyncio.gather(*(chain.ainvoke("Hello", program.config()) for chain in chains))
    assert edges(program.graph) == expected("a>x a>y")


@pytest.mark.parametrize("fails", ["before the call", "after the call", "in a parallel step"])
async def test_attempts_of_a_node_are_a_chain(scripted_engine: MakeEngine, fails: str) -> None:
    """With LangGraph's `RetryPolicy`, each attempt of a node comes after the calls of the one before."""
    model = ChatWeft(engine=scripted_engine(lambda _: "fine"))
    attempts: list[int] = []

    async def flaky(_: Any) -> Any:
        attempts.append(1)
        if fails == "before the call" and len(attempts) < 3:
            raise ConnectionError
        message = await model.with_config(run_name="try").ainvoke("Hello")
        if len(attempts) < 3:
            raise ConnectionError
        return {"messages": [message]}

    graph = StateGraph(MessagesState).add_node("a", asks(model, "a")).add_edge(START, "a")
    graph.add_node("flaky", flaky, retry_policy=RetryPolicy(initial_interval=0.0, jitter=False))
    graph.add_node("end", asks(model, "end")).add_edge("a", "flaky")
    text = "a>try try>end" if fails == "before the call" else "a>try try>try2 try2>try3 try3>end"
    if fails == "in a parallel step":
        graph.add_node("b", asks(model, "b")).add_edge("a", "b").add_edge(["flaky", "b"], "end")
        text += " a>b b>end"
    else:
        graph.add_edge("flaky", "end")
    async with weft.Program() as program:
        await graph.compile().ainvoke({"messages": []}, program.config())
    assert edges(program.graph) == expected(text)
    assert len(program.graph.threads) == (2 if fails == "in a parallel step" else 1)


@pytest.mark.parametrize("times_out", ["first", "second"])
async def test_a_call_that_timed_out_is_made_again(scripted_engine: MakeEngine, times_out: str) -> None:
    """A call that a time-out cancelled and that is made again continues its thread, as a failed one does."""
    clock = weft.testing.FakeClock()
    engine = scripted_engine([Reply("fine", latency_s=0.0), Reply("late", latency_s=9.0), "fine"], clock=clock)
    if times_out == "first":
        engine = scripted_engine([Reply("late", latency_s=9.0), "fine"], clock=clock)
    model = ChatWeft(engine=engine)
    async with weft.Program() as program:
        if times_out == "second":
            await model.ainvoke("Hello", program.config(run_name="a"))
        late = asyncio.create_task(model.ainvoke("Hello", program.config(run_name="late")))
        await engine.until_waiting(1)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        await model.ainvoke("Hello", program.config(run_name="again"))
    text = {"first": {"late", "again"}, "second": expected("a>late a>again")}[times_out]
    assert edges(program.graph) == text
    assert len(program.graph.threads) == 1


@pytest.mark.parametrize("limit", ["a time-out in the node", "a time-out in the agent"])
async def test_what_follows_a_cancelled_tool(scripted_engine: MakeEngine, limit: str) -> None:
    """LangChain does not report that a tool was cancelled. It ends with the run around it, and runs no longer."""
    begun: list[asyncio.Event] = []

    @tool
    async def look(query: str) -> str:
        """Look."""
        await model.with_config(run_name="look").ainvoke("Hello")
        begun[-1].set()
        await asyncio.Event().wait()
        return "never"

    async def cancelled(running: Awaitable[Any]) -> None:
        begun.append(asyncio.Event())
        task = asyncio.ensure_future(running)
        await begun[-1].wait()
        task.cancel()
        await asyncio.wait({task})

    class Limit(AgentMiddleware[Any, Any, Any]):
        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            await cancelled(handler(request))
            return ToolMessage("It took too long.", tool_call_id=request.tool_call["id"])

    async def node(_: Any) -> None:
        await cancelled(look.ainvoke({"query": "fog"}))

    model = ChatWeft(engine=scripted_engine(reply), name="model")
    async with weft.Program() as program:
        if limit == "a time-out in the node":
            await (model | node).ainvoke("Hello", program.config())
        else:
            agent = create_agent(model, [look], middleware=[Limit()])
            await agent.ainvoke({"messages": [HumanMessage("tool")]}, config=program.config())
        assert program.row is not None
        assert program.row.tools_running == ()
        await model.ainvoke("Hello", program.config(run_name="end"))
    text = "model>look look>end" if limit == "a time-out in the node" else "model>look look>model2 model2>end"
    assert edges(program.graph) == expected(text)
    assert len(program.graph.threads) == 1
