"""Programs put together at random from LangChain's and LangGraph's parts, each with its structure's DAG."""

from __future__ import annotations

import asyncio
import operator
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Annotated, Any, Final, NamedTuple

import anyio
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from weft.integrations.langchain import ChatWeft
from weft.testing import Reply, ScriptedCall

MOST_CALLS: Final = 16  # a program gets no new parts beyond these
_TAG: Final = re.compile(r"<(m\d+)(?: tools ([\w ]+))?>")

Frontier = frozenset[str]
Edges = set[tuple[str, str]]


class Notes(TypedDict):
    """The state of all graphs."""

    notes: Annotated[list[Any], operator.add]


class Part(NamedTuple):
    """A part of a program."""

    run: Runnable[Any, Any]
    after: Callable[[Frontier, Edges], Frontier]  # from the calls before the part to its last ones; adds its edges
    text: str


def texts(given: Any) -> list[str]:
    """All texts in what a part was given."""
    if isinstance(given, AIMessage):
        return [given.text]
    if isinstance(given, Mapping):
        given = list(given.values())
    return [text for each in given for text in texts(each)] if isinstance(given, list | tuple) else [str(given)]


def answers(rng: random.Random) -> Callable[[Mapping[str, Any]], Reply]:
    """A model whose answers all differ. It calls the tools that the request's tag names, once."""
    numbers = count()

    def answer(body: Mapping[str, Any]) -> Reply:
        _, tools = _tag(body)
        if tools and not _results(body):
            return Reply("", [(name, {"question": f"question {next(numbers)}"}) for name in tools.split()])
        return Reply(f"answer {next(numbers)} is {rng.random():.9f}")

    return answer


def name_of(call: ScriptedCall) -> str:
    """The call's name in the structure. An agent's call after its tools has a prime."""
    return _tag(call.body)[0] + ("'" if _results(call.body) else "")


def _tag(body: Mapping[str, Any]) -> tuple[str, str]:
    found = _TAG.search(str(body["messages"][0]["content"]))
    assert found is not None, body["messages"]
    return found[1], found[2] or ""


def _results(body: Mapping[str, Any]) -> bool:
    return any(message["role"] == "tool" for message in body["messages"])


class Maker:
    """Makes parts at random.

    Args:
        rng: Decides.
        model: Behind all calls.
        is_async: Whether functions are async.
        streams: Whether the program is run by a method that streams.
        quotes: Whether each call's input has the outputs of the calls before it.
    """

    def __init__(self, rng: random.Random, model: ChatWeft, *, is_async: bool, streams: bool, quotes: bool) -> None:
        self._rng, self._model, self._numbers = rng, model, count(1)
        self._is_async, self._streams, self._quotes = is_async, streams, quotes
        self.calls: list[str] = []
        kinds = [self._sequence, self._parallel, self._function, self._graph, self._map, self._tool, self._loop]
        kinds += [self._fork, self._branch, self._agent, self._retry, self._commands]
        kinds += [self._subgraphs, self._interrupt, self._fallback]
        if not streams:  # LangChain streams what `assign` adds without waiting for it
            kinds.append(self._assign)
        if is_async:  # on threads a call may end before the next one begins, and then looks like the one before it
            kinds += [self._gather, self._task_group, self._tasks, self._as_completed, self._background, self._batch]
        else:
            kinds.append(self._thread)
        self._kinds = kinds

    def part(self, depth: int) -> Part:
        """Make a part that contains parts, to some depth."""
        if depth <= 0 or len(self.calls) >= MOST_CALLS:
            return self._call()
        return self._rng.choice(self._kinds)(depth - 1)

    def _parts(self, depth: int, most: int = 3) -> list[Part]:
        return [self.part(depth) for _ in range(self._rng.randint(2, most))]

    def _name(self) -> str:
        self.calls.append(f"m{next(self._numbers)}")
        return self.calls[-1]

    def _call(self) -> Part:
        name = self._name()

        def prompt(given: Any) -> str:
            return " ".join([f"<{name}>", *(texts(given) if self._quotes else ())])

        def after(before: Frontier, edges: Edges) -> Frontier:
            edges |= {(each, name) for each in before}
            return frozenset([name])

        return Part(RunnableLambda(prompt) | self._model, after, name)

    def _either(self, code: Callable[[Any], Any], code_async: Callable[[Any], Awaitable[Any]]) -> Runnable[Any, Any]:
        return RunnableLambda(code_async if self._is_async else code)

    def _calling(self, part: Runnable[Any, Any]) -> Runnable[Any, Any]:
        """A function that runs a part whole, however the program is run."""

        async def code_async(given: Any) -> Any:
            return await part.ainvoke(given)

        return self._either(part.invoke, code_async)

    # -- LangChain

    def _sequence(self, depth: int) -> Part:
        parts = self._parts(depth)
        run = parts[0].run
        for part in parts[1:]:
            run = run | part.run
        return _one_by_one("sequence", run, parts)

    def _parallel(self, depth: int) -> Part:
        parts = self._parts(depth)
        return _at_once("parallel", RunnableParallel({str(n): part.run for n, part in enumerate(parts)}), parts)

    def _assign(self, depth: int) -> Part:
        parts = self._parts(depth)
        runs: Any = {str(number): part.run for number, part in enumerate(parts)}
        run = RunnableLambda(lambda given: {"given": given}) | RunnablePassthrough.assign(**runs)
        return _at_once("assign", run | (lambda all_: [all_[name] for name in runs]), parts)

    def _branch(self, depth: int) -> Part:
        part = self.part(depth)
        return Part(RunnableBranch((lambda _: True, part.run), self._model), part.after, f"branch({part.text})")

    def _retry(self, depth: int) -> Part:
        part, failed = self.part(depth), []

        def check(given: Any) -> Any:
            if not failed:
                failed.append(given)
                raise ValueError("the first attempt fails before its first call")
            return given

        again: Any = {"stop_after_attempt": 2, "wait_exponential_jitter": False}
        run = self._calling(RunnableLambda(check) | part.run).with_retry(**again)
        return Part(self._calling(run), part.after, f"retry({part.text})")

    def _fallback(self, depth: int) -> Part:
        part = self.part(depth)

        def fail(given: Any) -> Any:
            raise ValueError("it fails before its first call")

        run = RunnableLambda(fail).with_fallbacks([self._calling(part.run)])
        return Part(self._calling(run), part.after, f"fallback({part.text})")

    def _tool(self, depth: int) -> Part:
        made, part = self._asking(depth)
        return Part(RunnableLambda(lambda given: {"question": " ".join(texts(given))}) | made, part.after, part.text)

    def _asking(self, depth: int) -> tuple[Any, Part]:
        part = self.part(depth)
        name = f"look_{len(self.calls)}_{self._rng.randrange(10**6)}"

        @tool(name)
        async def look_async(question: str) -> str:
            """Look."""
            return " ".join(texts(await part.run.ainvoke(question)))

        @tool(name)
        def look(question: str) -> str:
            """Look."""
            return " ".join(texts(part.run.invoke(question)))

        return look_async if self._is_async else look, part._replace(text=f"tool({part.text})")

    def _agent(self, depth: int) -> Part:
        name = self._name()
        tools, parts = zip(*(self._asking(depth) for _ in range(self._rng.randint(1, 3))), strict=True)
        prompt = f"<{name} tools {' '.join(each.name for each in tools)}>"
        agent: Any = create_agent(self._model, list(tools), system_prompt=prompt)
        self.calls.append(f"{name}'")

        def after(before: Frontier, edges: Edges) -> Frontier:
            edges |= {(each, name) for each in before}
            found = frozenset[str]().union(*(part.after(frozenset([name]), edges) for part in parts))
            edges |= {(each, f"{name}'") for each in found}
            return frozenset([f"{name}'"])

        ask = RunnableLambda(lambda given: {"messages": [("user", " ".join(texts(given)))]})
        run = self._calling(ask | agent | (lambda state: state["messages"][-1]))
        return Part(run, after, f"agent {name}({', '.join(part.text for part in parts)})")

    # -- code

    def _function(self, depth: int) -> Part:
        parts = self._parts(depth)

        async def code_async(given: Any) -> Any:
            for part in parts:
                given = await part.run.ainvoke(given)
            return given

        def code(given: Any) -> Any:
            for part in parts:
                given = part.run.invoke(given)
            return given

        return _one_by_one("function", self._either(code, code_async), parts)

    def _gather(self, depth: int) -> Part:
        parts = self._parts(depth)

        async def code(given: Any, config: RunnableConfig) -> Any:
            return await asyncio.gather(*(part.run.ainvoke(given, config) for part in parts))

        return _at_once("gather", RunnableLambda(code), parts)

    def _task_group(self, depth: int) -> Part:
        parts = self._parts(depth)

        async def code(given: Any) -> Any:
            found = {}

            async def run(part: Part) -> None:
                found[part.text] = await part.run.ainvoke(given)

            async with anyio.create_task_group() as group:
                for part in parts:
                    group.start_soon(run, part)
            return found

        return _at_once("task group", RunnableLambda(code), parts)

    def _as_completed(self, depth: int) -> Part:
        parts, last = self._parts(depth), self.part(depth)

        async def code(given: Any) -> Any:
            runs = [part.run.ainvoke(given) for part in parts]
            return await last.run.ainvoke([await each for each in asyncio.as_completed(runs)])

        return _joined("as completed", RunnableLambda(code), parts, last)

    def _background(self, depth: int) -> Part:
        first, second, last = self.part(depth), self.part(depth), self.part(depth)

        async def code(given: Any) -> Any:
            started = asyncio.create_task(first.run.ainvoke(given))
            found = await second.run.ainvoke(given)
            return await last.run.ainvoke([found, await started])

        return _joined("background", RunnableLambda(code), [first, second], last)

    def _batch(self, depth: int) -> Part:
        parts = self._parts(depth)

        async def choose(asked: tuple[int, Any]) -> Any:
            return await parts[asked[0]].run.ainvoke(asked[1])

        async def code(given: Any) -> Any:
            return await RunnableLambda(choose).abatch([(number, given) for number in range(len(parts))])

        return _at_once("batch", RunnableLambda(code), parts)

    def _thread(self, depth: int) -> Part:
        parts = self._parts(depth)

        def code(given: Any, config: RunnableConfig) -> Any:
            with ThreadPoolExecutor(1) as pool:
                for part in parts:
                    given = pool.submit(part.run.invoke, given, config).result()
            return given

        return _one_by_one("thread", RunnableLambda(code), parts)

    # -- LangGraph

    def _node(self, part: Part, *, of_all: bool = False) -> Any:
        async def node_async(state: Notes) -> Any:
            return {"notes": [await part.run.ainvoke(state["notes"] if of_all else state["notes"][-1])]}

        def node(state: Notes) -> Any:
            return {"notes": [part.run.invoke(state["notes"] if of_all else state["notes"][-1])]}

        return node_async if self._is_async else node

    def _compiled(self, graph: Any) -> Runnable[Any, Any]:
        return self._calling(
            RunnableLambda(lambda given: {"notes": [given]}) | graph.compile() | (lambda state: state["notes"][-1])
        )

    def _graph(self, depth: int) -> Part:
        parts, graph = self._parts(depth), StateGraph(Notes)
        for number, part in enumerate(parts):
            graph.add_node(str(number), self._node(part))
            graph.add_edge(str(number - 1) if number else START, str(number))
        return _one_by_one("graph", self._compiled(graph), parts)

    def _subgraphs(self, depth: int) -> Part:
        parts, graph = self._parts(depth), StateGraph(Notes)
        for number, part in enumerate(parts):
            inner = StateGraph(Notes).add_node("part", self._node(part)).add_edge(START, "part")
            graph.add_node(str(number), inner.compile())
            graph.add_edge(str(number - 1) if number else START, str(number))
        return _one_by_one("subgraphs", self._compiled(graph), parts)

    def _interrupt(self, depth: int) -> Part:
        parts, graph = self._parts(depth), StateGraph(Notes)
        for number, part in enumerate(parts):
            graph.add_node(str(number), self._node(part))
            graph.add_edge(str(number - 1) if number else START, str(number))
        stopping = graph.compile(checkpointer=InMemorySaver(), interrupt_before=[str(len(parts) - 1)])
        config: Any = {"configurable": {"thread_id": "t"}}

        async def code_async(given: Any) -> Any:
            await stopping.ainvoke({"notes": [given]}, config)
            return (await stopping.ainvoke(None, config))["notes"][-1]

        def code(given: Any) -> Any:
            stopping.invoke({"notes": [given]}, config)
            return stopping.invoke(None, config)["notes"][-1]

        return _one_by_one("interrupt", self._either(code, code_async), parts)

    def _fork(self, depth: int) -> Part:
        parts, last, graph = self._parts(depth), self.part(depth), StateGraph(Notes)
        for number, part in enumerate(parts):
            graph.add_node(str(number), self._node(part)).add_edge(START, str(number))
        graph.add_node("last", self._node(last, of_all=True))
        graph.add_edge([str(number) for number in range(len(parts))], "last")
        return _joined("fork", self._compiled(graph), parts, last)

    def _map(self, depth: int) -> Part:
        parts, last, graph = self._parts(depth), self.part(depth), StateGraph(Notes)

        async def work_async(state: dict[str, Any]) -> Any:
            return {"notes": [await parts[state["number"]].run.ainvoke(state["given"])]}

        def work(state: dict[str, Any]) -> Any:
            return {"notes": [parts[state["number"]].run.invoke(state["given"])]}

        def sends(state: Notes) -> list[Send]:
            return [Send("work", {"number": n, "given": state["notes"][-1]}) for n in range(len(parts))]

        code: Any = work_async if self._is_async else work
        graph.add_node("work", code).add_node("last", self._node(last, of_all=True))
        graph.add_conditional_edges(START, sends, ["work"]).add_edge("work", "last")
        return _joined("map", self._compiled(graph), parts, last)

    def _loop(self, depth: int) -> Part:
        parts, graph = self._parts(depth), StateGraph(Notes)

        async def turn_async(state: Notes) -> Any:
            return {"notes": [await parts[len(state["notes"]) - 1].run.ainvoke(state["notes"][-1])]}

        def turn(state: Notes) -> Any:
            return {"notes": [parts[len(state["notes"]) - 1].run.invoke(state["notes"][-1])]}

        code: Any = turn_async if self._is_async else turn
        graph.add_node("turn", code).add_edge(START, "turn")
        graph.add_conditional_edges("turn", lambda state: END if len(state["notes"]) > len(parts) else "turn")
        return _one_by_one("loop", self._compiled(graph), parts)

    def _commands(self, depth: int) -> Part:
        parts, graph = self._parts(depth), StateGraph(Notes)
        for number, part in enumerate(parts):
            node, goto = self._node(part), str(number + 1) if number + 1 < len(parts) else END

            async def step_async(state: Notes, node: Any = node, goto: str = goto) -> Command[str]:
                return Command(goto=goto, update=await node(state))

            def step(state: Notes, node: Any = node, goto: str = goto) -> Command[str]:
                return Command(goto=goto, update=node(state))

            code: Any = step_async if self._is_async else step
            graph.add_node(str(number), code, destinations=(goto,))
        return _one_by_one("commands", self._compiled(graph.add_edge(START, "0")), parts)

    def _tasks(self, depth: int) -> Part:
        parts, last = self._parts(depth), self.part(depth)

        @task
        async def work(number: int, given: Any) -> Any:
            return await parts[number].run.ainvoke(given)

        @entrypoint()
        async def main(given: Any) -> Any:
            return await last.run.ainvoke(await asyncio.gather(*(work(n, given[0]) for n in range(len(parts)))))

        return _joined("tasks", self._calling(RunnableLambda(lambda given: [given]) | main), parts, last)


def _listed(kind: str, parts: Sequence[Part]) -> str:
    return f"{kind}({', '.join(part.text for part in parts)})"


def _one_by_one(kind: str, run: Runnable[Any, Any], parts: Sequence[Part]) -> Part:
    def after(before: Frontier, edges: Edges) -> Frontier:
        for part in parts:
            before = part.after(before, edges)
        return before

    return Part(run, after, _listed(kind, parts))


def _at_once(kind: str, run: Runnable[Any, Any], parts: Sequence[Part]) -> Part:
    def after(before: Frontier, edges: Edges) -> Frontier:
        return frozenset[str]().union(*(part.after(before, edges) for part in parts))

    return Part(run, after, _listed(kind, parts))


def _joined(kind: str, run: Runnable[Any, Any], parts: Sequence[Part], last: Part) -> Part:
    return _one_by_one(kind, run, [_at_once("at once", run, parts), last])


def reachable(edges: Edges) -> Edges:
    """Which call comes after which, by way of others too."""
    below: dict[str, set[str]] = {}
    for parent, child in edges:
        below.setdefault(parent, set()).add(child)

    def visit(name: str, seen: set[str]) -> set[str]:
        for child in below.get(name, set()) - seen:
            seen.add(child)
            visit(child, seen)
        return seen

    return {(parent, child) for parent in below for child in visit(parent, set())}
