"""Random programs of nested parts, with the truth about their calls.

A part is a call, or it holds other parts. It is built in one of many styles, which must not change the truth: a
sequence may be an expression, code, a graph or a branch. Every part takes a text and returns one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from autogen_core.models import UserMessage
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import START, StateGraph
from langgraph.types import RetryPolicy, Send
from typing_extensions import TypedDict

import weft
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import openai_client
from weft.testing import Reply

# The styles of each kind of part.
STYLES: Final[Mapping[str, tuple[str, ...]]] = {
    "call": ("model", "bound", "tools", "own config", "bound own config", "stream", "openai", "autogen", "callbacks"),
    "sequence": ("expression", "code", "code with config", "own config", "graph", "branch", "entrypoint", "task"),
    "parallel": ("map keys", "each", "batch", "gather", "branches", "entrypoints", "graph", "send", "assign"),
    "judge": ("first", "second", "default"),  # the judge's answer and the branch that it leads to
    "retry": ("with_retry", "loop", "policy", "fallbacks"),
    "agent": ("agent", "bound agent", "own config"),
    "bind": ("config", "bind", "passthrough", "types"),
    "inner": ("program", "entrypoint"),
}
_WEIGHTS: Final = {"call": 5, "sequence": 5, "parallel": 4, "judge": 2, "retry": 2, "agent": 1, "bind": 2, "inner": 1}


@dataclass
class Part:
    """A part of a program.

    A judge is a call that chooses between branches, and its parts are the judge and the branch. A retry makes its part
    twice, because it fails the first time after its last call. An agent calls its model, its tools, which are the
    parts, and its model again. An inner part is a program of its own.
    """

    kind: str
    style: str
    name: str
    parts: list[Part] = field(default_factory=list)
    passes_text: bool = True  # the input reaches the calls, so that lineage says something
    pauses: int = 0  # of the event loop before a call, so that calls overlap in many ways

    def __str__(self) -> str:
        text = "" if self.passes_text else "-"
        return f"{text}{self.style} {self.kind} {self.name}" + (
            f"({', '.join(map(str, self.parts))})" if self.parts else ""
        )


def random_part(rng: random.Random, kinds: frozenset[str] = frozenset(STYLES)) -> Part:
    """A random part of up to some twenty calls."""
    names = iter(range(1_000_000))

    def make(depth: int, *, inside_parallel: bool = False) -> Part:
        choice = [kind for kind in _WEIGHTS if kind in kinds and (depth > 0 or kind == "call")]
        kind = rng.choices(choice, [_WEIGHTS[each] if depth < 3 or each != "call" else 0 for each in choice])[0]
        count = {"call": 0, "sequence": rng.randint(2, 3), "parallel": rng.randint(2, 3), "agent": rng.randint(1, 2)}
        parts = [make(depth - 1) for _ in range(count.get(kind, 1))]
        if kind == "judge":
            parts = [make(0), *parts]
        return Part(
            kind,
            rng.choice(STYLES[kind]),
            f"c{next(names)}",
            parts,
            passes_text=rng.random() < 0.5,
            pauses=rng.choice((0, 0, 1, 3)),
        )

    return make(rng.randint(2, 3))


# -- the truth


class Truth:
    """The parents of each call, by program. A call is named by its label and its number among the calls with it."""

    def __init__(self, part: Part) -> None:
        self.programs: dict[str, dict[str, frozenset[str]]] = {"": {}}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._pasts: dict[str, frozenset[str]] = {}  # the names of calls are unique within a program
        self._visit(part, "", frozenset())

    def _call(self, name: str, program: str, before: frozenset[str]) -> frozenset[str]:
        self._counts[program, name] += 1
        call = f"{name}.{self._counts[program, name]}"
        self.programs[program][call] = before
        self._pasts[call] = before.union(*(self._pasts[each] for each in before))
        return frozenset({call})

    def _visit(self, part: Part, program: str, before: frozenset[str]) -> frozenset[str]:
        if part.kind == "call":
            return self._call(part.name, program, before)
        if part.kind == "parallel":
            return self._join(self._visit(each, program, before) for each in part.parts)
        if part.kind == "agent":
            asked = self._call(part.name, program, before)
            return self._call(part.name, program, self._join(self._visit(each, program, asked) for each in part.parts))
        if part.kind == "inner":
            inner = f"{part.name}.{sum(name.startswith(f'{part.name}.') for name in self.programs)}"
            self.programs[inner] = {}
            self._visit(part.parts[0], inner, frozenset())
            return before
        for each in part.parts * (2 if part.kind == "retry" else 1):
            before = self._visit(each, program, before)
        return before

    def _join(self, ends: Any) -> frozenset[str]:
        calls: frozenset[str] = frozenset().union(*ends)
        return calls - frozenset().union(*(self._pasts[call] for call in calls))


# -- the program


def reply(body: Mapping[str, Any]) -> Any:
    """The scripted answers: tool calls if the message asks for them, otherwise a text that no other call gives."""
    last = body["messages"][-1]
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if tools and last["role"] == "user":
        return Reply(tool_calls=[(tool, {"text": f"for the tool {tool}"}) for tool in tools])
    return f"answer {random.getrandbits(64):x} to it"


class _State(TypedDict, total=False):
    texts: Annotated[list[str], lambda old, new: [*old, *new]]
    text: str


async def _pause(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


class Builder:
    """Builds the runnables of parts for one handle of a program."""

    def __init__(
        self, engine: Any, handle: weft.Program, opened: dict[str, weft.Program], names: dict[str, str]
    ) -> None:
        self.engine, self.handle, self.opened, self.names = engine, handle, opened, names

    def build(self, part: Part) -> Runnable[Any, str]:
        """The runnable of a part, from a text to a text."""
        made: Runnable[Any, str] = getattr(self, f"_{part.kind}")(part)
        return made

    def run(self, part: Part, text: str, config: RunnableConfig | None = None) -> Any:
        """Run a part from code; the config is LangChain's own if none is given."""
        return self.build(part).ainvoke(text, config)

    def _under(self, handle: weft.Program) -> Builder:
        return Builder(self.engine, handle, self.opened, self.names)

    # -- calls

    def _call(self, part: Part) -> Runnable[Any, str]:
        style, name = part.style, part.name
        model = ChatWeft(engine=self.engine, name=name)

        async def pausing(text: Any) -> Any:
            await _pause(part.pauses)
            return text if part.passes_text else "go on"

        async def own(text: str) -> str:
            used: Any = model.bind(stop=["."]) if style == "bound own config" else model
            if style == "callbacks":
                bare = ChatWeft(engine=self.engine, name=name, callbacks=self.handle.callbacks)
                return (await bare.ainvoke(text)).text
            return str((await used.ainvoke(text, config=self.handle.config())).text)

        async def stream(text: str) -> str:
            return "".join([chunk.text async for chunk in model.astream(text)])

        async def openai(text: str) -> str:
            chat: Any = openai_client(self.engine, self.handle).chat.completions
            messages = [{"role": "user", "content": text}]
            answer = await chat.with_raw_response.create(model="scripted", messages=messages)
            self.names[answer.headers["x-request-id"]] = name
            return str(answer.parse().choices[0].message.content)

        async def autogen(text: str) -> str:
            client = WeftChatCompletionClient(self.engine).bind(self.handle, agent=name)
            return str((await client.create([UserMessage(content=text, source="user")])).content)

        parser = StrOutputParser()
        last: Any = {
            "model": model | parser,
            "bound": model.bind(stop=["."]).with_config(tags=["tag"]) | parser,
            "tools": model.bind_tools([]) | parser,
            "stream": stream,
            "openai": openai,
            "autogen": autogen,
        }.get(style, own)
        return RunnableLambda(pausing) | last

    # -- parts one after another

    def _sequence(self, part: Part) -> Runnable[Any, str]:
        style, parts = part.style, part.parts
        if style == "expression":
            steps = [self.build(each) for each in parts]
            made: Any = steps[0]
            for step in steps[1:]:
                made = made | step
            return made

        async def code(text: str) -> str:
            for each in parts:
                text = await self.run(each, text)
            return text

        async def with_config(text: str, config: RunnableConfig) -> str:
            for each in parts:
                text = await self.run(each, text, config)
            return text

        async def own_config(text: str) -> str:
            for each in parts:
                text = await self.run(each, text, self._config())
            return text

        async def branch(text: str) -> str:
            async with self.handle.branch() as handle:
                for each in parts:
                    text = await self._under(handle).run(each, text, handle.config())  # type: ignore[arg-type]
            return text

        @weft.program
        async def nested(text: str, program: weft.Program) -> str:
            for each in parts:
                text = await self._under(program).run(each, text, program.config())  # type: ignore[arg-type]
            return text

        async def entrypoint(text: str) -> str:
            return await nested(text, program=self.handle)

        async def task(text: str) -> str:
            return await asyncio.create_task(code(text))

        if style == "graph":
            return self._graph([[each] for each in parts])
        functions = {"code with config": with_config, "own config": own_config, "branch": branch, "task": task}
        functions["entrypoint"] = entrypoint
        return RunnableLambda(functions.get(style, code))

    def _config(self) -> Any:
        return self.handle.config()

    def _graph(self, stages: list[list[Part]]) -> Runnable[Any, str]:
        """A graph in which the parts of a stage are parallel nodes."""
        graph: Any = StateGraph(_State)
        before: list[str] = [START]
        for number, stage in enumerate(stages):
            names = [f"{number}-{index}" for index in range(len(stage))]
            for name, each in zip(names, stage, strict=True):
                graph.add_node(name, self._node(each))
                graph.add_edge(before if len(before) > 1 else before[0], name)
            before = names
        return self._texts(graph)

    @staticmethod
    def _texts(graph: Any) -> Runnable[Any, str]:
        """A graph as a runnable from a text to a text."""
        return RunnableLambda(lambda text: {"texts": [text]}) | graph.compile() | (lambda state: state["texts"][-1])

    def _node(self, part: Part) -> Any:
        runnable = self.build(part)

        async def node(state: Any) -> Any:
            return {"texts": [await runnable.ainvoke(state["texts"][-1])]}

        return node

    # -- parts side by side

    def _parallel(self, part: Part) -> Runnable[Any, str]:
        style, parts = part.style, part.parts
        join = RunnableLambda(" and ".join)
        keys: dict[str, Any] = {}
        if style in ("map keys", "assign"):
            keys = {f"k{index}": self.build(each) for index, each in enumerate(parts)}
        if style == "map keys":
            return RunnableParallel(**keys) | (lambda found: list(found.values())) | join
        if style == "assign":
            assigned = RunnablePassthrough.assign(
                **{key: RunnableLambda(lambda state: state["text"]) | each for key, each in keys.items()}
            )
            texts = RunnableLambda(lambda text: {"text": text}) | assigned
            return texts | (lambda found: [found[key] for key in keys]) | join

        async def item(given: tuple[int, str]) -> str:
            return str(await self.run(parts[given[0]], given[1]))

        if style == "each":
            return (
                RunnableLambda(lambda text: [(n, text) for n in range(len(parts))]) | RunnableLambda(item).map() | join
            )

        async def batch(text: str) -> str:
            return " and ".join(await RunnableLambda(item).abatch([(n, text) for n in range(len(parts))]))

        async def gather(text: str) -> str:
            return " and ".join(await asyncio.gather(*(self.run(each, text) for each in parts)))

        async def branches(text: str) -> str:
            async def run(handle: weft.Program, each: Part) -> str:
                async with handle:
                    return str(await self._under(handle).run(each, text, handle.config()))  # type: ignore[arg-type]

            return " and ".join(await asyncio.gather(*(run(self.handle.branch(), each) for each in parts)))

        @weft.program
        async def nested(each: Part, text: str, program: weft.Program) -> str:
            return str(await self._under(program).run(each, text, program.config()))  # type: ignore[arg-type]

        async def entrypoints(text: str) -> str:
            return " and ".join(await asyncio.gather(*(nested(each, text, program=self.handle) for each in parts)))

        if style == "graph":
            return self._graph([parts])
        if style == "send":
            return self._send(parts)
        functions = {"batch": batch, "branches": branches, "entrypoints": entrypoints}
        return RunnableLambda(functions.get(style, gather))

    def _send(self, parts: list[Part]) -> Runnable[Any, str]:
        async def work(state: Any) -> Any:
            number, text = state["item"]
            return {"texts": [await self.run(parts[number], text)]}

        graph: Any = StateGraph(_State).add_node("work", work)
        graph.add_conditional_edges(
            START, lambda state: [Send("work", {"item": (n, state["texts"][-1])}) for n in range(len(parts))], ["work"]
        )
        return self._texts(graph)

    # -- choices, repetitions, agents

    def _judge(self, part: Part) -> Runnable[Any, str]:
        judge, chosen = (self.build(each) for each in part.parts)
        other = RunnableLambda(lambda text: text)
        yes, no = judge | (lambda _: True), judge | (lambda _: False)
        if part.style == "first":
            return RunnableBranch((yes, chosen), other)
        if part.style == "second":
            return RunnableBranch((lambda _: False, other), (yes, chosen), other)
        return RunnableBranch((no, other), chosen)

    def _retry(self, part: Part) -> Runnable[Any, str]:
        style, runnable, tries = part.style, self.build(part.parts[0]), list[str]()

        def fail(text: str) -> str:
            tries.append(text)
            if len(tries) % 2 == 1 or style == "fallbacks":
                raise ConnectionError
            return text

        async def loop(text: str) -> str:
            while True:
                try:
                    return fail(await runnable.ainvoke(text))
                except ConnectionError:
                    continue

        async def node(state: Any) -> Any:
            return {"texts": [fail(await runnable.ainvoke(state["texts"][-1]))]}

        if style == "loop":
            return RunnableLambda(loop)
        if style == "policy":
            policy = RetryPolicy(initial_interval=0.0, jitter=False)
            graph: Any = StateGraph(_State).add_node("node", node, retry_policy=policy).add_edge(START, "node")
            return self._texts(graph)
        failing = runnable | RunnableLambda(fail)
        if style == "fallbacks":
            return failing.with_fallbacks([runnable])
        return failing.with_retry(retry_if_exception_type=(ConnectionError,), wait_exponential_jitter=False)

    def _agent(self, part: Part) -> Runnable[Any, str]:
        tools = [self._tool(f"{part.name}_{number}", each) for number, each in enumerate(part.parts)]
        agent: Any = create_agent(ChatWeft(engine=self.engine, name=part.name), tools)
        if part.style == "bound agent":
            agent = agent.with_config(tags=["tag"])
        ask = RunnableLambda(lambda text: {"messages": [HumanMessage(text)]})
        if part.style == "own config":

            async def own(state: Any) -> Any:
                return await agent.ainvoke(state, config=self.handle.config())

            return ask | own | (lambda state: state["messages"][-1].text)
        return ask | agent | (lambda state: state["messages"][-1].text)

    def _tool(self, name: str, part: Part) -> BaseTool:
        async def use(text: str) -> str:
            return str(await self.run(part, text))

        return StructuredTool.from_function(coroutine=use, name=name, description="A tool.")

    def _bind(self, part: Part) -> Runnable[Any, str]:
        inner = self.build(part.parts[0])
        if part.style == "config":
            return inner.with_config(tags=["tag"], metadata={"a": "b"})
        if part.style == "types":
            return inner.with_types(input_type=str).with_config(tags=["other"])
        return RunnablePassthrough() | inner if part.style == "passthrough" else inner.bind()

    # -- programs

    def _inner(self, part: Part) -> Runnable[Any, str]:
        async def inside(text: str, program: weft.Program) -> str:
            number = sum(name.startswith(f"{part.name}.") for name in self.opened)
            self.opened[f"{part.name}.{number}"] = program
            return str(await self._under(program).run(part.parts[0], text, program.config()))  # type: ignore[arg-type]

        async def opened(text: str) -> str:
            with weft.Program(part.name) as program:
                return await inside(text, program)

        return RunnableLambda(opened if part.style == "program" else weft.program(inside))


# -- the check


async def wrong_edges(engine: Any, part: Part) -> list[str]:
    """Run a part as a program, and describe each call whose edges claim what is not true.

    An edge that is marked exact is one of the truth. An edge of the truth that is missing is implied by a guess.
    """
    truth, opened, names = Truth(part), dict[str, weft.Program](), dict[str, str]()
    async with weft.Program("outer") as program:
        opened[""] = program
        await Builder(engine, program, opened, names).run(part, "the beginning", program.config())  # type: ignore[arg-type]
    found = []
    for key, calls in truth.programs.items():
        counts, named = Counter[str](), dict[str, str]()
        for node in opened[key].graph.calls:
            label = names.get(node.call_id, node.label)
            counts[label] += 1
            named[node.call_id] = f"{label}.{counts[label]}"
        if set(named.values()) != set(calls):
            found.append(f"program {key!r} has the calls {sorted(named.values())}, not {sorted(calls)}")
            continue
        certain: dict[str, set[str]] = {}  # the ancestors of each call, and those by way of a guess
        doubtful: dict[str, set[str]] = {}
        for node in opened[key].graph.calls:
            name, true = named[node.call_id], calls[named[node.call_id]]
            exact = {named[edge.parent] for edge in node.parents if edge.exact}
            guesses = {named[edge.parent] for edge in node.parents if not edge.exact}
            certain[name] = exact.union(*(certain[each] for each in exact))
            doubtful[name] = guesses.union(*(certain[each] for each in guesses))
            doubtful[name] |= set().union(*(doubtful[each] for each in exact | guesses))
            if not exact <= true or not true <= exact | guesses | doubtful[name]:
                found.append(f"{name} after {sorted(true)}: {sorted(exact)}, guesses {sorted(guesses)}")
    return found
