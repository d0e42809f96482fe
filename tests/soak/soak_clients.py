"""The clients of a soak: well-behaved ones, and those that leave, break off, time out or send nonsense."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from soak_tally import Tally

import weft
from weft.core.errors import WeftError
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

SYSTEM: Final = "You keep a lighthouse, and you answer in one short sentence. " * 6  # a prefix that many calls share
WORDS: Final = ["ship", "fog", "bell", "harbour", "west", "lamp", "keeper", "gull", "tide", "rope", "storm", "market"]
MOST_BRANCHES: Final = 400
NONSENSE: Final[tuple[dict[str, Any], ...]] = (
    {"max_tokens": -1},
    {"max_tokens": 10**9},
    {"temperature": -3},
    {"top_p": 7},
    {"n": 0},
    {"messages": []},
    {"messages": "hello"},
    {"model": "no such model"},
    {"timeout_s": -1},
    {"timeout_s": "soon"},
    {"response_format": {"type": "no such type"}},
    {"structured_outputs": {"regex": "("}},
    {"tools": [{"type": "function"}]},
    {"logprobs": True, "top_logprobs": 10**6},
    {"stop": [""]},
    {"vllm_xargs": {"parents": {"a": 1}}},
    {"messages": [{"role": "user", "content": "word " * 20_000}]},
)
HOSTILE_IDS: Final[tuple[Any, ...]] = (
    "a\nb",
    "\x00",
    "",
    "x" * 100_000,
    "\ud800",
    "\u202eevil",
    "../../etc/passwd",
    "'; DROP TABLE programs; --",
    7,
    ["list"],
    "sess-0",
    "é" * 256,
)


def idle_timeout(seconds: float) -> dict[str, float]:
    """The argument of a `ProgramCallbackHandler` that ends programs whose client has left, if it has one."""
    parameters = inspect.signature(ProgramCallbackHandler.__init__).parameters
    return {"idle_timeout_s": seconds} if "idle_timeout_s" in parameters else {}


@weft.program
async def decorated(work: Callable[[weft.Program], Awaitable[None]], program: weft.Program) -> None:
    """A program around some work."""
    await work(program)


@dataclass
class Client:
    """One client, which makes one program after another.

    Args:
        engine: The engine that it calls.
        rng: All of its decisions.
        tally: Counts its calls.
        idle_timeout_s: After how many seconds a program ends whose client has left.

    Attributes:
        doing: The kind of its program.
    """

    engine: weft.Engine
    rng: random.Random
    tally: Tally
    idle_timeout_s: float
    doing: str = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Make programs until told to stop."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        while not stop.is_set():
            (kind,) = self.rng.choices(kinds, weights)
            self.doing = kind.__name__
            try:
                await kind(self)
            except WeftError:
                self.tally.outcomes["program ended by a typed error"] += 1
            except Exception as error:
                self.tally.fail(self.doing, repr(error))
            await asyncio.sleep(self.rng.uniform(0, 0.05))

    # -- what the kinds below are made of

    def question(self) -> list[tuple[str, str]]:
        """A prompt of 20 to 200 tokens, often with the system prompt of others."""
        text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(5, 100)))
        return [("system", SYSTEM)] * (self.rng.random() < 0.5) + [("user", text)]

    def model(self, most_tokens: int = 24, **fields: Any) -> ChatWeft:
        """A model that answers with some tokens."""
        tokens = self.rng.randint(1, most_tokens)
        fields = {"ignore_eos": True, **fields}
        return ChatWeft(engine=self.engine, max_tokens=tokens, temperature=1.0, model_kwargs=fields)

    def handler(self) -> dict[str, Any]:
        """A config without a program."""
        return {"callbacks": [ProgramCallbackHandler(**idle_timeout(self.idle_timeout_s))]}

    async def ask(self, kind: str, config: Any, **fields: Any) -> None:
        """One call."""
        with self.tally.call(kind):
            await self.model(**fields).ainvoke(self.question(), config)

    async def tool(self) -> None:
        """A tool that takes some time."""
        await asyncio.sleep(self.rng.uniform(0, 0.1))


async def chain(client: Client) -> None:
    """A decorated program: calls and tools in turn, some of them streamed or on a thread."""

    async def work(program: weft.Program) -> None:
        for _ in range(client.rng.randint(1, 4)):
            how = client.rng.choice(["async", "stream", "thread"])
            if how == "async":
                await client.ask("chain", program.config())
            elif how == "thread":
                model, question = client.model(), client.question()
                with client.tally.call("chain"):
                    await asyncio.to_thread(model.invoke, question, program.config())
            else:
                with client.tally.call("chain"):
                    async for _ in client.model().astream(client.question(), program.config()):
                        pass
            await client.tool()

    await decorated(work)


async def leaves_during_a_tool(client: Client) -> None:
    """An undecorated agent whose stream is left while a tool works: LangChain reports no end of such a run."""
    in_tool = asyncio.Event()

    @tool
    async def count_ships() -> str:
        """Counts ships, and takes its time."""
        in_tool.set()
        await asyncio.sleep(3600)
        return "never"

    async def think(state: MessagesState) -> dict[str, Any]:
        with client.tally.call("leaves during a tool"):
            await client.model().ainvoke(state["messages"])
        return {"messages": [AIMessage("", tool_calls=[{"name": "count_ships", "args": {}, "id": "1"}])]}

    graph = StateGraph(MessagesState).add_node(think).add_node("tools", ToolNode([count_ships]))
    agent: Any = graph.add_edge(START, "think").add_edge("think", "tools").compile()
    question = {"messages": [HumanMessage("ship?")]}
    if client.rng.random() < 0.5:
        stream = agent.astream_events(question, client.handler(), version="v2")
    else:
        stream = agent.astream(question, client.handler(), stream_mode=client.rng.choice(["updates", "messages"]))

    async def read() -> None:
        async for _ in stream:
            pass

    tasks = [asyncio.create_task(read()), asyncio.create_task(in_tool.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()  # as a server does with the task of a client that has left
    await asyncio.wait(tasks)
    if client.rng.random() < 0.5:
        await stream.aclose()


async def drops_the_stream(client: Client) -> None:
    """An undecorated chain whose stream is left after the first answer, and closed or collected as garbage."""

    async def agent(_question: str) -> Any:
        await client.ask("drops the stream", None)
        yield "answer"
        await asyncio.sleep(3600)

    stream: Any = RunnableLambda(agent).astream("ship?", client.handler())
    async for _ in stream:
        break
    if client.rng.random() < 0.5:
        await stream.aclose()


async def stop_strings(client: Client) -> None:
    """Calls that end by a stop string: vLLM's front end aborts them in the scheduler process."""

    async def work(program: weft.Program) -> None:
        for _ in range(client.rng.randint(1, 3)):
            await client.ask("stop string", program.config(), most_tokens=200, stop=["e", "a", "t", " "])

    await decorated(work)


async def cancelled(client: Client) -> None:
    """Calls that are cancelled while they wait or run."""

    async def work(program: weft.Program) -> None:
        for _ in range(client.rng.randint(1, 3)):
            task = asyncio.create_task(client.ask("cancelled", program.config(), most_tokens=400))
            await asyncio.wait([task], timeout=client.rng.uniform(0, 0.3))
            task.cancel()
            await asyncio.wait([task])

    await decorated(work)


async def closes_the_stream(client: Client) -> None:
    """Streams that are closed after some chunks."""

    async def work(program: weft.Program) -> None:
        chunks, model, question = client.rng.randint(0, 5), client.model(most_tokens=400), client.question()
        with client.tally.call("closed stream") as call:
            if client.rng.random() < 0.3:
                await asyncio.to_thread(_read_some, model.stream(question, program.config()), chunks)
            else:
                async with aclosing(model.astream(question, program.config())) as stream:  # type: ignore[type-var]
                    for _ in range(chunks):
                        await anext(stream, None)
            call.outcome = "left"

    await decorated(work)


def _read_some(stream: Any, chunks: int) -> None:
    with closing(stream):
        for _ in range(chunks):
            next(stream, None)


async def deadlines(client: Client) -> None:
    """Calls and programs whose time is too short."""

    async def work(program: weft.Program) -> None:
        for _ in range(client.rng.randint(1, 3)):
            short_s = client.rng.uniform(0.001, 0.2)
            await client.ask("deadline", program.config(), most_tokens=400, timeout_s=short_s)

    if client.rng.random() < 0.5:
        await decorated(work)
    else:
        await decorated.options(metadata={"timeout_s": client.rng.uniform(0.01, 0.5)})(work)


async def malformed(client: Client) -> None:
    """Requests that the engine must refuse."""
    with weft.Program("malformed") as program:
        body = {"messages": [{"role": "user", "content": "ship?"}], "max_tokens": 2, **client.rng.choice(NONSENSE)}
        with client.tally.call("malformed"):
            await client.engine.chat(body, program, program.reports.start_call(object()))


async def wide(client: Client) -> None:
    """A program of hundreds of branches."""

    async def work(program: weft.Program) -> None:
        branches = client.rng.randint(50, MOST_BRANCHES)
        await asyncio.gather(*(client.ask("wide", program.config(), most_tokens=2) for _ in range(branches)))
        await client.ask("wide", program.config())

    await decorated(work)


async def session(client: Client) -> None:
    """Programs of one session, one after another and at once."""
    name = f"session-{client.rng.getrandbits(32)}"

    async def work(program: weft.Program) -> None:
        await client.ask("session", program.config())

    run = decorated.options(session_id=name, tenant=client.rng.choice(WORDS))
    await run(work)
    await asyncio.gather(run(work), run(work))


async def hostile_ids(client: Client) -> None:
    """Ids that cannot travel, ids of others, and header fields that a client has no business to set."""
    hostile = client.rng.choice(HOSTILE_IDS)
    with client.tally.call("hostile id"):
        weft.Program("hostile", session_id=hostile, tenant=client.rng.choice(HOSTILE_IDS)).end()
    with weft.Program("hostile") as program:
        claims = {"program_id": hostile, "service_s": 1e12, "session_id": "sess-0", "program_end": 1}
        body = {"messages": [{"role": "user", "content": "ship?"}], "max_tokens": 2, "vllm_xargs": claims}
        with client.tally.call("hostile id"):
            await client.engine.chat(body, program, program.reports.start_call(object()))
    with client.tally.call("hostile id"):
        config: Any = {**client.handler(), "metadata": {"session_id": hostile}}
        await client.model().ainvoke(client.question(), config)


async def outlived(client: Client) -> None:
    """Calls that still run when their program ends, and a call that comes after the end."""
    tasks: list[asyncio.Task[None]] = []

    async def work(program: weft.Program) -> None:
        tasks.extend(asyncio.create_task(client.ask("outlived", program.config(), most_tokens=400)) for _ in range(2))
        await asyncio.sleep(client.rng.uniform(0, 0.2))
        config.update(program.config())

    config: dict[str, Any] = {}
    await decorated(work)
    await asyncio.wait(tasks)
    await client.ask("outlived", config)


async def bare(client: Client) -> None:
    """A call without handler or program, and one under a handler that answers as it should."""
    await client.ask("bare", None)
    await client.ask("bare", client.handler())


KINDS: Final[dict[Callable[[Client], Awaitable[None]], float]] = {
    chain: 20,
    leaves_during_a_tool: 10,
    drops_the_stream: 5,
    stop_strings: 15,
    cancelled: 10,
    closes_the_stream: 10,
    deadlines: 8,
    malformed: 8,
    wide: 1,
    session: 5,
    hostile_ids: 4,
    outlived: 4,
    bare: 5,
}
