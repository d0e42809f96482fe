"""Shapes of programs in LangChain and LangGraph: how each is made, and its calls, edges and threads."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import anyio
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
)
from langchain_core.tools import tool
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import RetryPolicy, Send
from shapes import edges, expected
from typing_extensions import TypedDict

import weft
from weft.core.program.graph import CallState, ProgramGraph
from weft.integrations.langchain import ChatWeft

TEXT = StrOutputParser()
SYNC = ("invoke", "stream")
ASYNC = ("ainvoke", "astream", "events v1", "events v2", "log")
GRAPH_SYNC = ("invoke", "stream messages", "stream updates", "stream all")
GRAPH_ASYNC = ("ainvoke", "astream messages", "astream updates", "astream all", "events v1", "events v2", "events v3")
MODES = {"messages": "messages", "updates": "updates", "all": ["messages", "updates", "values", "debug", "custom"]}


async def drive(runnable: Any, given: Any, config: RunnableConfig, how: str) -> None:
    """Run a runnable to its end, by one of LangChain's methods."""
    kind, _, mode = how.partition(" ")
    modes: dict[str, Any] = {"stream_mode": MODES[mode], "subgraphs": True} if mode in MODES else {}
    if kind == "invoke":
        runnable.invoke(given, config)
    elif kind == "ainvoke":
        await runnable.ainvoke(given, config)
    elif kind == "stream":
        list(runnable.stream(given, config, **modes))
    elif how == "events v3":
        events = await runnable.astream_events(given, config, version="v3")
        await events.output()
    else:
        items = {
            "astream": lambda: runnable.astream(given, config, **modes),
            "events": lambda: runnable.astream_events(given, config, version=mode),
            "log": lambda: runnable.astream_log(given, config),
        }
        _ = [item async for item in items[kind]()]


class Parts:
    """Makes the parts of a program: models with labels, and functions that are sync or async.

    Args:
        model: The model behind all parts.
        is_async: Whether functions are async.
    """

    def __init__(self, model: ChatWeft, is_async: bool) -> None:
        self.model = model
        self.is_async = is_async

    def gate(self, parties: int) -> Any:
        """A runnable that returns its input after `parties` runs have reached it, so that they overlap."""
        if self.is_async:
            barrier = asyncio.Barrier(parties)

            async def wait_async(given: Any) -> Any:
                await barrier.wait()
                return given

            return RunnableLambda(wait_async)
        gate = threading.Barrier(parties)

        def wait(given: Any) -> Any:
            gate.wait(60)
            return given

        return RunnableLambda(wait)

    def __call__(self, name: str) -> Runnable[Any, AIMessage]:
        """The model, whose calls have this label."""
        return self.model.with_config(run_name=name)

    def asks(self, name: str, prompt: Callable[[Any], Any] = lambda given: given) -> Callable[[Any], Any]:
        """A function that calls the model and returns its message."""

        async def ask_async(given: Any) -> AIMessage:
            return await self(name).ainvoke(prompt(given))

        def ask(given: Any) -> AIMessage:
            return self(name).invoke(prompt(given))

        return ask_async if self.is_async else ask


class Shape(NamedTuple):
    """A program and its DAG."""

    build: Callable[[Parts], tuple[Any, Any]]  # returns a runnable and its input
    edges: str
    threads: int
    methods: tuple[str, ...]  # by which the program is run


SHAPES: dict[str, Shape] = {}


def shape(text: str, threads: int = 1, methods: tuple[str, ...] = SYNC + ASYNC) -> Any:
    """Add a program to the table, under the name of its function."""

    def enter(build: Callable[[Parts], tuple[Any, Any]]) -> Callable[[Parts], tuple[Any, Any]]:
        SHAPES[build.__name__] = Shape(build, text, threads, methods)
        return build

    return enter


# -- expressions


@shape("a")
def model_alone(m: Parts) -> tuple[Any, Any]:
    return m("a"), "Hello"


@shape("a>b b>c")
def sequence(m: Parts) -> tuple[Any, Any]:
    return m("a") | TEXT | m("b") | TEXT | m("c"), "Hello"


@shape("a>b a>c c>d b>e d>e", threads=2)
def fork_and_join(m: Parts) -> tuple[Any, Any]:
    fork: Any = RunnableParallel(left=m("b"), right=m("c") | TEXT | m("d"))
    return m("a") | TEXT | fork | (lambda _: "Sum up") | m("e"), "Hello"


@shape("a>b a>c a>d b>e c>e d>e e>f", threads=3)
def forks_in_forks(m: Parts) -> tuple[Any, Any]:
    inner: Any = RunnableParallel(one=m("c"), two=m("d"))
    fork: Any = RunnableParallel(left=m("b"), right=inner)
    return m("a") | TEXT | fork | (lambda _: "Sum up") | m("e") | TEXT | m("f"), "Hello"


@shape("a>b a>b2 a>b3 b>c b2>c b3>c", threads=3)
def map_over_a_list(m: Parts) -> tuple[Any, Any]:
    return m("a") | (lambda _: ["x", "y", "z"]) | m("b").map() | (lambda _: "Sum up") | m("c"), "Hello"


@shape("a>b")
def function_behind_a_stream(m: Parts) -> tuple[Any, Any]:
    return m("a") | RunnableLambda(m.asks("b", lambda message: [message])), "Hello"


@shape("a>b")
def function_that_ignores_the_stream(m: Parts) -> tuple[Any, Any]:
    return m("a") | TEXT | RunnableLambda(m.asks("b", lambda _: "unrelated")), "Hello"


@shape("a>b a>c b>d c>d", threads=2)
def parallel_functions_behind_a_stream(m: Parts) -> tuple[Any, Any]:
    both: Any = RunnableParallel(left=m.asks("b"), right=m.asks("c"))
    return m("a") | TEXT | both | RunnableLambda(m.asks("d", lambda _: "Sum up")), "Hello"


@shape("a>c b>c", threads=2, methods=("astream",))
def function_that_calls_during_the_stream(m: Parts) -> tuple[Any, Any]:
    async def meanwhile(chunks: Any) -> Any:
        first = True
        async for chunk in chunks:
            if first:
                await m("b").bind(max_tokens=1).ainvoke("while the other one streams")
                first = False
            yield chunk

    return m("a").bind(max_tokens=200) | TEXT | RunnableGenerator(meanwhile) | m("c"), "Hello"


@shape("a>b b>c")
def function_of_two_calls(m: Parts) -> tuple[Any, Any]:
    if m.is_async:

        async def twice_async(message: AIMessage) -> Any:
            return await m("c").ainvoke([await m("b").ainvoke([message])])

        return m("a") | RunnableLambda(twice_async), "Hello"
    return m("a") | RunnableLambda(lambda message: m("c").invoke([m("b").invoke([message])])), "Hello"


# -- retries, which LangChain does not make for streams


@shape("a>bad a>good good>b", methods=("invoke", "ainvoke"))
def retry_after_a_failed_call(m: Parts) -> tuple[Any, Any]:
    tries = iter([m("bad").bind(max_tokens=1_000_000), m("good")])

    async def flaky_async(text: str) -> Any:
        return await next(tries).ainvoke(text)

    def flaky(text: str) -> Any:
        return next(tries).invoke(text)

    steady = RunnableLambda(flaky_async if m.is_async else flaky).with_retry(wait_exponential_jitter=False)
    return m("a") | TEXT | steady | TEXT | m("b"), "Hello"


@shape("a>b b>b2 b2>c", methods=("invoke", "ainvoke"))
def retry_of_what_follows_a_call(m: Parts) -> tuple[Any, Any]:
    tries: list[Any] = []

    def parse(message: AIMessage) -> str:
        tries.append(message)
        if len(tries) == 1:
            raise ValueError("not what was asked for")
        return message.text

    return m("a") | TEXT | (m("b") | parse).with_retry(wait_exponential_jitter=False) | m("c"), "Hello"


@shape("a>bad a>worse a>good good>b")
def fallbacks(m: Parts) -> tuple[Any, Any]:
    bad, worse = m("bad").bind(max_tokens=1_000_000), m("worse").bind(max_tokens="many")
    return m("a") | TEXT | bad.with_fallbacks([worse, m("good")]) | TEXT | m("b"), "Hello"


@shape("a>judge judge>b b>c", methods=SYNC + ASYNC)
def bound_branch_after_a_judge(m: Parts) -> tuple[Any, Any]:
    choice: Any = RunnableBranch((m("judge") | (lambda _: True), m("b")), m("b"))
    return m("a") | TEXT | choice | TEXT | m("c"), "Hello"


@shape("a>b b>b2 b2>b3 b3>c", methods=GRAPH_SYNC + GRAPH_ASYNC)
def attempts_of_a_node(m: Parts) -> tuple[Any, Any]:
    tries: list[Any] = []

    def parse(message: AIMessage) -> AIMessage:
        tries.append(message)
        if len(tries) < 3:
            raise ConnectionError
        return message

    async def flaky_async(state: Any) -> Any:
        return {"messages": [parse(await m("b").ainvoke(state["messages"]))]}

    def flaky(state: Any) -> Any:
        return {"messages": [parse(m("b").invoke(state["messages"]))]}

    policy = RetryPolicy(initial_interval=0.0, jitter=False)
    graph = nodes(m, "a").add_node("flaky", flaky_async if m.is_async else flaky, retry_policy=policy)
    graph.add_node("c", updating(m, m.asks("c", operator.itemgetter("messages"))))
    return graph.add_edge("a", "flaky").add_edge("flaky", "c").compile(), QUESTION


# -- tools


def asking_tool(m: Parts, name: str = "ask", steps: int = 1, at_once: int = 1) -> Any:
    """A tool that calls the model `steps` times in a chain. `at_once` runs of it wait for each other first."""
    gate = m.gate(at_once)
    if m.is_async:

        @tool(name)
        async def ask_async(question: str) -> str:
            """Ask."""
            await gate.ainvoke(None)
            for _ in range(steps):
                question = (await m(name).ainvoke(question)).text
            return question

        return ask_async

    @tool(name)
    def ask(question: str) -> str:
        """Ask."""
        gate.invoke(None)
        for _ in range(steps):
            question = m(name).invoke(question).text
        return question

    return ask


@shape("a>ask ask>b")
def tool_that_asks_the_model(m: Parts) -> tuple[Any, Any]:
    return m("a") | (lambda message: {"question": message.text}) | asking_tool(m) | m("b"), "Hello"


class TwoToolCalls(AgentMiddleware[Any, Any, Any]):
    """Puts two calls of the tool into the first answer of a random model."""

    def _set(self, request: Any) -> Any:
        return request.override(tools=[])

    def _script(self, request: Any, response: Any) -> Any:
        if isinstance(request.messages[-1], HumanMessage):
            response.result[0].tool_calls = [
                {"name": "ask", "args": {"question": f"What of the {what}?"}, "id": what, "type": "tool_call"}
                for what in ("fog", "herring")
            ]
        return response

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """The hook of `agent.invoke`."""
        return self._script(request, handler(self._set(request)))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """The hook of `agent.ainvoke`."""
        return self._script(request, await handler(self._set(request)))


QUESTION: Any = {"messages": [HumanMessage("Hello")]}


def agent(m: Parts, steps: int = 1) -> Any:
    """An agent that calls its tool twice in parallel, then answers."""
    return create_agent(m.model, [asking_tool(m, steps=steps)], middleware=[TwoToolCalls()])


@shape("model>ask model>ask2 ask>model2 ask2>model2", threads=2, methods=GRAPH_SYNC + GRAPH_ASYNC)
def agent_with_two_tools_at_once(m: Parts) -> tuple[Any, Any]:
    return agent(m), QUESTION


@shape("ask ask2 ask>b ask2>b", threads=2, methods=GRAPH_SYNC + GRAPH_ASYNC)
def tool_node(m: Parts) -> tuple[Any, Any]:
    calls: Any = [{"name": "ask", "args": {"question": what}, "id": what} for what in ("fog", "herring")]
    graph = StateGraph(MessagesState).add_node("tools", ToolNode([asking_tool(m, at_once=2)]))
    graph.add_node("b", updating(m, m.asks("b", operator.itemgetter("messages"))))
    graph.add_edge(START, "tools").add_edge("tools", "b")
    return graph.compile(), {"messages": [AIMessage("", tool_calls=calls)]}


# -- graphs


def updating(m: Parts, ask: Callable[[Any], Any], key: str = "messages") -> Any:
    """A node that puts the result of a function into the state."""

    async def node_async(state: Any) -> Any:
        return {key: [await ask(state)]}

    def node(state: Any) -> Any:
        return {key: [ask(state)]}

    return node_async if m.is_async else node


def nodes(m: Parts, *names: str) -> Any:
    """A graph of nodes in a chain. Each makes one call, which has the node's name as its label."""
    parts: Any = [(name, updating(m, m.asks(name, operator.itemgetter("messages")))) for name in names]
    return StateGraph(MessagesState).add_sequence(parts).add_edge(START, names[0])


@shape("a>b b>c", methods=GRAPH_SYNC + GRAPH_ASYNC)
def graph_of_nodes(m: Parts) -> tuple[Any, Any]:
    return nodes(m, "a", "b", "c").compile(), QUESTION


class Topics(TypedDict):
    """The state of the graphs that map and reduce."""

    notes: Annotated[list[AIMessage], operator.add]


@shape("plan>x plan>y plan>z x>x2 y>y2 z>z2 x2>sum y2>sum z2>sum", threads=3, methods=GRAPH_SYNC + GRAPH_ASYNC)
def send_map_reduce(m: Parts) -> tuple[Any, Any]:
    async def write_async(state: dict[str, str]) -> Any:
        first = await m(state["topic"]).ainvoke(state["topic"])
        return {"notes": [await m(state["topic"]).ainvoke(f"Improve: {first.text}")]}

    def write(state: dict[str, str]) -> Any:
        first = m(state["topic"]).invoke(state["topic"])
        return {"notes": [m(state["topic"]).invoke(f"Improve: {first.text}")]}

    graph = StateGraph(Topics).add_node("plan", updating(m, m.asks("plan", lambda _: "Plan"), "notes"))
    graph.add_node("write", write_async if m.is_async else write)
    graph.add_node("sum", updating(m, m.asks("sum", lambda _: "Sum up"), "notes")).add_edge(START, "plan")
    graph.add_conditional_edges("plan", lambda _: [Send("write", {"topic": name}) for name in "xyz"], ["write"])
    return graph.add_edge("write", "sum").compile(), {"notes": []}


@shape("a>c b>c a>d b>d c>e d>e", threads=2, methods=GRAPH_SYNC + GRAPH_ASYNC)
def supersteps(m: Parts) -> tuple[Any, Any]:
    graph = StateGraph(Topics)
    for name in "abcde":
        graph.add_node(name, updating(m, m.asks(name, lambda _: "Hello"), "notes"))
    for before, after in ((START, "a"), (START, "b"), ("a", "c"), ("b", "d"), (["c", "d"], "e")):
        graph.add_edge(before, after)
    return graph.compile(), {"notes": []}


@shape("before>one one>two two>after", methods=GRAPH_SYNC + GRAPH_ASYNC)
def graph_as_a_node(m: Parts) -> tuple[Any, Any]:
    graph = nodes(m, "before").add_node("inner", nodes(m, "one", "two").compile())
    graph.add_node("after", updating(m, m.asks("after", operator.itemgetter("messages"))))
    return graph.add_edge("before", "inner").add_edge("inner", "after").compile(), QUESTION


@shape("before>one before>three one>two two>after three>after", threads=2, methods=GRAPH_SYNC + GRAPH_ASYNC)
def graphs_in_parallel_nodes(m: Parts) -> tuple[Any, Any]:
    graph = nodes(m, "before")
    for name, inner in (("left", nodes(m, "one", "two").compile()), ("right", nodes(m, "three").compile())):

        async def by_hand_async(state: MessagesState, inner: Any = inner) -> Any:
            return {"messages": (await inner.ainvoke(state))["messages"][-1:]}

        def by_hand(state: MessagesState, inner: Any = inner) -> Any:
            return {"messages": inner.invoke(state)["messages"][-1:]}

        graph.add_node(name, by_hand_async if m.is_async else by_hand).add_edge("before", name)
    graph.add_node("after", updating(m, m.asks("after", lambda _: "Sum up")))
    return graph.add_edge(["left", "right"], "after").compile(), QUESTION


@shape("a b a>c b>c", threads=2, methods=GRAPH_SYNC + GRAPH_ASYNC)
def parallel_tasks(m: Parts) -> tuple[Any, Any]:
    gate = m.gate(2)
    if m.is_async:

        @task
        async def ask_async(name: str, given: Any) -> Any:
            return await m(name).ainvoke(await gate.ainvoke(given) if name in "ab" else given)

        @entrypoint()
        async def main_async(_: Any) -> Any:
            return await ask_async("c", await asyncio.gather(ask_async("a", "x"), ask_async("b", "y")))

        return main_async, "Hello"

    @task
    def ask(name: str, given: Any) -> Any:
        return m(name).invoke(gate.invoke(given) if name in "ab" else given)

    @entrypoint()
    def main(_: Any) -> Any:
        both = [ask("a", "x"), ask("b", "y")]
        return ask("c", [each.result() for each in both]).result()

    return main, "Hello"


# -- code that LangChain does not see: parallel helpers of several steps under one run


def helpers(m: Parts, lineage: str, how: str) -> Callable[[Any], Any]:
    """A function that runs two helpers of two calls each in parallel, and then makes a call that joins them.

    The helpers' second calls begin when both first calls have ended, so the runs alone do not tell the helpers apart.

    Args:
        m: Makes the parts.
        lineage: How the input of a call contains the outputs of the calls before it: as "message", "text", "quote" or
            "nothing".
        how: How the helpers run in parallel: "gather", "anyio" or "threads".
    """

    def prompt(messages: list[AIMessage]) -> Any:
        if lineage == "message":
            return [HumanMessage("Improve"), *messages]
        if lineage == "text":
            return [HumanMessage(message.text) for message in messages]
        return " and ".join(["Improve", *(message.text for message in messages)]) if lineage == "quote" else "Go on"

    gates = [m.gate(2) for _ in range(3)]

    def first(name: str) -> Any:
        return gates[0] | m(f"{name}_first")

    def last(name: str) -> Any:
        return RunnableLambda(prompt) | gates[2] | m(f"{name}_last")

    async def main_async(_: Any) -> Any:
        async def helper(name: str) -> Any:
            answer = await gates[1].ainvoke(await first(name).ainvoke(f"What of the {name}?"))
            return await last(name).ainvoke([answer])

        if how == "gather":
            results = await asyncio.gather(helper("fog"), helper("herring"))
        else:
            results = []

            async def keep(name: str) -> None:
                results.append(await helper(name))

            async with anyio.create_task_group() as group:
                group.start_soon(keep, "fog")
                group.start_soon(keep, "herring")
        return await m("join").ainvoke(prompt(results))

    def main(_: Any, config: RunnableConfig) -> Any:
        def helper(name: str) -> Any:
            answer = gates[1].invoke(first(name).invoke(f"What of the {name}?", config), config)
            return last(name).invoke([answer], config)

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(helper, ("fog", "herring")))
        return m("join").invoke(prompt(results), config)

    return main_async if m.is_async else main


STRANDS = "fog_first>fog_last herring_first>herring_last fog_last>join herring_last>join"
TOLD_APART = STRANDS + " herring_first~fog_last fog_first~herring_last"  # by lineage, which cannot exclude a wait
GUESSES = (
    "fog_first~fog_last herring_first~fog_last fog_first~herring_last herring_first~herring_last "
    "fog_last~join herring_last~join"
)


def add_helpers() -> None:
    """Add the helpers to the table of shapes, directly under a run and inside a node of a graph."""
    for lineage in ("message", "text", "quote", "nothing"):
        for how in ("gather", "anyio", "threads"):
            methods = SYNC if how == "threads" else ASYNC
            text = GUESSES if lineage == "nothing" else TOLD_APART

            def build(m: Parts, lineage: str = lineage, how: str = how) -> tuple[Any, Any]:
                return RunnableLambda(helpers(m, lineage, how)), "Hello"

            SHAPES[f"helpers_by_{how}_with_{lineage}"] = Shape(build, text, 2, methods)

            def in_a_node(m: Parts, lineage: str = lineage, how: str = how) -> tuple[Any, Any]:
                main = helpers(m, lineage, how)

                async def node_async(state: MessagesState) -> Any:
                    return {"messages": [await main(state)]}

                def node(state: MessagesState, config: RunnableConfig) -> Any:
                    return {"messages": [main(state, config)]}

                graph = StateGraph(MessagesState).add_node("node", node_async if m.is_async else node)
                graph.add_node("after", updating(m, m.asks("after", lambda _: "Sum up")))
                return graph.add_edge(START, "node").add_edge("node", "after").compile(), QUESTION

            graph_methods = GRAPH_SYNC[:2] if how == "threads" else GRAPH_ASYNC[:2]
            name = f"helpers_by_{how}_with_{lineage}_in_a_node"
            SHAPES[name] = Shape(in_a_node, f"{text} join>after", 2, graph_methods)


add_helpers()


# -- running a shape

ROWS = [(name, how) for name, row in SHAPES.items() for how in row.methods]


def parts_for(model: ChatWeft, how: str) -> Parts:
    """Parts that are sync or async, as a method needs them."""
    return Parts(model, is_async=how.split(maxsplit=1)[0] not in ("invoke", "stream"))


async def check_shape(model: ChatWeft, name: str, how: str) -> None:
    """Check that a program has exactly its shape's calls, edges and threads, and that its row and graph agree."""
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
