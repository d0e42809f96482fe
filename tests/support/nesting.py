"""Builds programs of nested parts, and checks their edges against the truth.

A part is a call, or it holds other parts. It is built in one of many styles, which must not change the truth: a
sequence may be an expression, code, a graph or a branch. Every part takes a text and returns one.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from autogen_core.models import UserMessage
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
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
from nesting_parts import INPUTS, Part, Truth
from nesting_teams import run_team
from typing_extensions import TypedDict

import weft
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.langchain import ChatWeft
from weft.integrations.openai import openai_client
from weft.testing import Reply

_MARK = re.compile(r" <\d+>$")  # of an input of a batch, at the end of texts


def _mark(text: str) -> str:
    found = _MARK.search(text)
    return found[0] if found is not None else ""


def reply(body: Mapping[str, Any]) -> Any:
    """The scripted answers: tool calls if the message asks for them, otherwise a text that no other call gives."""
    last = body["messages"][-1]
    tools = [tool["function"] for tool in body.get("tools") or ()]
    if tools and last["role"] == "user":
        names = {tool["name"]: next(iter(tool["parameters"]["properties"])) for tool in tools}
        return Reply(tool_calls=[(name, {argument: f"for the tool {name}"}) for name, argument in names.items()])
    return f"answer {random.getrandbits(64):x} to it{_mark(last['content'])}"


class _State(TypedDict, total=False):
    texts: Annotated[list[str], lambda old, new: [*old, *new]]
    text: str


async def _pause(steps: int) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


class Worker:
    """A task that starts a task for each job. These have the context of the code that starts the worker."""

    def __init__(self) -> None:
        self._jobs: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = asyncio.Queue()
        self.task = asyncio.create_task(self._work())

    async def do(self, job: Callable[[], Awaitable[Any]]) -> Any:
        """Give the worker a job, and wait for its result."""
        done = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((job, done))
        return await done

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                job, done = await self._jobs.get()
                group.create_task(self._do(job, done))

    async def _do(self, job: Callable[[], Awaitable[Any]], done: asyncio.Future[Any]) -> None:
        done.set_result(await job())


class Builder:
    """Builds the runnables of parts for one handle of a program.

    Args:
        engine: The engine.
        handle: The handle.
        opened: Gets the inner programs by name.
        names: Gets the names of calls by id, if they are not the labels.
        around: The handles around this one, the outermost last.
        workers: Get jobs from calls. The first was started before the program, and the others in calls.
    """

    def __init__(
        self,
        engine: Any,
        handle: weft.Program,
        opened: dict[str, weft.Program],
        names: dict[str, str],
        *,
        around: tuple[weft.Program, ...] = (),
        workers: list[Worker],
    ) -> None:
        self.engine, self.handle, self.opened, self.names, self.around = engine, handle, opened, names, around
        self.workers = workers

    def build(self, part: Part) -> Runnable[Any, str]:
        """The runnable of a part, from a text to a text."""
        made: Runnable[Any, str] = getattr(self, f"_{part.kind}")(part)
        return made

    def run(self, part: Part, text: str, config: RunnableConfig | None = None) -> Any:
        """Run a part from code; the config is LangChain's own if none is given."""
        return self.build(part).ainvoke(text, config)

    def _under(self, handle: weft.Program) -> Builder:
        around = (self.handle, *self.around) if handle.program_id == self.handle.program_id else ()
        return Builder(self.engine, handle, self.opened, self.names, around=around, workers=self.workers)

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

        async def on_a_thread(text: str) -> str:
            handle = (self.handle, *self.around)[-1 if style == "outer thread" else 0]

            def ask() -> str:
                if style == "branch thread":
                    with handle.branch() as branch:
                        return str(model.invoke(text, branch.config()).text)  # type: ignore[arg-type]
                return str(model.invoke(text, handle.config()).text)  # type: ignore[arg-type]

            return await asyncio.get_running_loop().run_in_executor(None, ask)  # without LangChain's context

        async def in_a_worker(text: str) -> str:
            handle = self.handle.branch() if style == "branch worker" else self.handle
            callbacks = handle.callbacks if style == "callbacks worker" else None

            async def job() -> str:
                if callbacks is not None:
                    bare = ChatWeft(engine=self.engine, name=name, callbacks=callbacks)
                    return (await bare.ainvoke(text)).text
                return str((await model.ainvoke(text, config)).text)

            config: Any = handle.config()
            worker = self.workers[int(name[1:]) % len(self.workers)]
            if style == "new worker":
                self.workers.append(Worker())
            result = await worker.do(job)
            if style == "branch worker":
                handle.end()
            return str(result)

        parser = StrOutputParser()
        last: Any = {
            "model": model | parser,
            "bound": model.bind(stop=["."]).with_config(tags=["tag"]) | parser,
            "tools": model.bind_tools([]) | parser,
            "stream": stream,
            "openai": openai,
            "autogen": autogen,
            "thread": on_a_thread,
            "outer thread": on_a_thread,
            "branch thread": on_a_thread,
            "worker": in_a_worker,
            "new worker": in_a_worker,
            "branch worker": in_a_worker,
            "callbacks worker": in_a_worker,
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

        async def left_streams(text: str) -> str:
            for each in parts:
                graph: Any = StateGraph(_State).add_node("one", self._node(each)).add_node("two", lambda _: {})
                graph.add_edge(START, "one").add_edge("one", "two")
                async for update in graph.compile().astream({"texts": [text]}):
                    text = update["one"]["texts"][-1]
                    break
            return text

        if style == "graph":
            return self._graph([[each] for each in parts])
        functions = {"code with config": with_config, "own config": own_config, "branch": branch, "task": task}
        functions["left streams"] = left_streams
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

        async def mixed(text: str) -> str:
            """Run every second part on a branch, and the calls of the others on the plain handle."""

            async def on_a_branch(handle: weft.Program, each: Part) -> str:
                async with handle:
                    return str(await self._under(handle).run(each, text, handle.config()))  # type: ignore[arg-type]

            async def plain(each: Part) -> str:
                said = text
                # A strand that begins without a call of the program looks like code after the branches.
                are_steps = each.kind == "sequence" and all(step.has_calls for step in each.parts)
                for step in each.parts if are_steps else [each]:
                    said = await self.run(step, said, self._config())
                return said

            return " and ".join(
                await asyncio.gather(
                    *(
                        plain(each) if number % 2 else on_a_branch(self.handle.branch(), each)
                        for number, each in enumerate(parts)
                    )
                )
            )

        @weft.program
        async def nested(each: Part, text: str, program: weft.Program) -> str:
            return str(await self._under(program).run(each, text, program.config()))  # type: ignore[arg-type]

        async def entrypoints(text: str) -> str:
            return " and ".join(await asyncio.gather(*(nested(each, text, program=self.handle) for each in parts)))

        if style == "graph":
            return self._graph([parts])
        if style == "send":
            return self._send(parts)
        functions = {"batch": batch, "branches": branches, "entrypoints": entrypoints, "mixed": mixed}
        return RunnableLambda(functions.get(style, gather))

    def _inputs(self, part: Part) -> Runnable[Any, str]:
        """A batch whose inputs go through the same sequence of models, without a run of code around each input."""
        steps: Any = RunnablePassthrough()
        for each in part.parts:
            steps = steps | self._marked_call(each)

        def split(text: str) -> list[str]:
            return [f"{text} <{number}>" for number in range(INPUTS)]

        join = RunnableLambda(" and ".join)
        if part.style == "map":
            return RunnableLambda(split) | steps.map() | join

        async def batch(text: str) -> list[str]:
            if part.style == "batch":
                return list(await asyncio.to_thread(steps.batch, split(text)))
            return list(await steps.abatch(split(text), self._config() if part.style == "own config" else None))

        return RunnableLambda(batch) | join

    def _marked_call(self, part: Part) -> Runnable[Any, str]:
        """A call that gets its name from the mark of the input."""

        def prepare(text: str) -> str:
            return text if part.passes_text else f"go on{_mark(text)}"

        def note(message: AIMessage) -> str:
            self.names[message.response_metadata["weft"][0]["call_id"]] = f"{part.name}#{_mark(message.text)[2:-1]}"
            return message.text

        model: Any = ChatWeft(engine=self.engine, name=part.name)
        if "bound" in part.style:
            model = model.bind(stop=["."]).with_config(tags=["tag"])
        return RunnableLambda(prepare) | model | RunnableLambda(note)

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
            if len(tries) % 2 == 1 or style.endswith("fallbacks"):
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
        if style.endswith("fallbacks"):
            last = runnable.with_config(tags=["tag"]) if style == "bound fallbacks" else runnable
            return failing.with_fallbacks([last]).with_config(run_name="attempts")
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

    def _team(self, part: Part) -> Runnable[Any, str]:
        async def team(text: str) -> str:
            return await run_team(self.engine, self.handle, part, text)

        return RunnableLambda(team)

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

    An edge that is marked exact is one of the truth, or it comes from an ancestor of the truth that is one by way of a
    guess as well. An edge of the truth that is missing is implied by a guess. After a call from a thread without
    context, lineage may also have dropped it in favour of an exact one.
    """
    truth, opened, names = Truth(part), dict[str, weft.Program](), dict[str, str]()
    workers = [Worker()]
    try:
        async with weft.Program("outer") as program:
            opened[""] = program
            builder = Builder(engine, program, opened, names, workers=workers)
            await builder.run(part, "the beginning", program.config())  # type: ignore[arg-type]
    finally:
        for each in workers:
            each.task.cancel()
        await asyncio.wait({each.task for each in workers})
    found, is_in_doubt = [], "thread call" in str(part)
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
            is_missing = not true <= exact | guesses | doubtful[name] and not (is_in_doubt and exact)
            ancestors = truth.past(name)
            if not exact <= true | (ancestors & doubtful[name]) or is_missing:
                found.append(f"{name} after {sorted(true)}: {sorted(exact)}, guesses {sorted(guesses)}")
    return found
