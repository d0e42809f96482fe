"""LangChain and LangGraph: on every public path, each call belongs to its program and has the right parents.

test_langchain_shapes.py tests the shapes of programs.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, NamedTuple

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableConfig, RunnableLambda, RunnableParallel, chain
from langchain_core.tools import tool
from langchain_parts import CallRecorder, report
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from observers import EndedPrograms, levels, resolve
from pydantic import BaseModel
from typing_extensions import TypedDict

import weft
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

PROMPT = ChatPromptTemplate.from_messages([("user", "Tell me about {topic}.")])
TEXT = StrOutputParser()
TOPICS: list[Any] = [{"topic": name} for name in ("ships", "fog", "gulls", "herring")]

# -- the table: every way in which a user can call a model through LangChain


class CallPath(NamedTuple):
    """One way to call the model, and the program that it should make."""

    run: Callable[[ChatWeft, RunnableConfig], Any]
    levels: list[list[int]]  # see `observers.levels`
    threads: int
    rejected: int = 0  # calls that the engine rejects, which count in the row and have no report


PATHS: dict[str, CallPath] = {}
AGENT_PATHS: dict[str, CallPath] = {}  # paths that need the model `structured`


def path(dag: list[list[int]], threads: int = 1, *, rejected: int = 0, table: dict[str, CallPath] = PATHS) -> Any:
    """Add a function to the table, under its name."""

    def enter(function: Callable[[ChatWeft, RunnableConfig], Any]) -> Callable[[ChatWeft, RunnableConfig], Any]:
        table[function.__name__] = CallPath(function, dag, threads, rejected)
        return function

    return enter


async def drain(stream: Any) -> list[Any]:
    return [item async for item in stream]


# -- paths: the model itself


@path([[0]])
def invoke(model: ChatWeft, config: RunnableConfig) -> None:
    model.invoke("Hello", config)


@path([[0]])
async def ainvoke(model: ChatWeft, config: RunnableConfig) -> None:
    await model.ainvoke("Hello", config)


@path([[0]])
def stream(model: ChatWeft, config: RunnableConfig) -> None:
    list(model.stream("Hello", config))


@path([[0]])
async def astream(model: ChatWeft, config: RunnableConfig) -> None:
    await drain(model.astream("Hello", config))


@path([[0]])
def stream_switched_off(model: ChatWeft, config: RunnableConfig) -> None:
    list(model.model_copy(update={"disable_streaming": True}).stream("Hello", config))


@path([[0]])
def transform(model: ChatWeft, config: RunnableConfig) -> None:
    list(model.transform(iter(["Hel", "lo"]), config))


@path([[0]])
async def atransform(model: ChatWeft, config: RunnableConfig) -> None:
    async def words() -> Any:
        yield "Hel"
        yield "lo"

    await drain(model.atransform(words(), config))


@path([[0, 0, 0, 0]], threads=4)
def batch(model: ChatWeft, config: RunnableConfig) -> None:
    model.batch(["a", "b", "c", "d"], config)


@path([[0, 0, 0, 0]], threads=4)
async def abatch(model: ChatWeft, config: RunnableConfig) -> None:
    await model.abatch(["a", "b", "c", "d"], config)


@path([[0], [1], [1], [1]])
async def abatch_one_at_a_time(model: ChatWeft, config: RunnableConfig) -> None:
    await model.abatch(["a", "b", "c", "d"], {**config, "max_concurrency": 1})


@path([[0, 0, 0]], threads=3)
def batch_as_completed(model: ChatWeft, config: RunnableConfig) -> None:
    list(model.batch_as_completed(["a", "b", "c"], config))


@path([[0, 0, 0]], threads=3)
async def abatch_as_completed(model: ChatWeft, config: RunnableConfig) -> None:
    await drain(model.abatch_as_completed(["a", "b", "c"], config))


@path([[0, 0]], threads=2)
def generate(model: ChatWeft, config: RunnableConfig) -> None:
    model.generate([[HumanMessage("a")], [HumanMessage("b")]], callbacks=config["callbacks"])


@path([[0, 0]], threads=2)
async def agenerate(model: ChatWeft, config: RunnableConfig) -> None:
    await model.agenerate([[HumanMessage("a")], [HumanMessage("b")]], callbacks=config["callbacks"])


@path([[0, 0]], threads=2)
def generate_by_streaming(model: ChatWeft, config: RunnableConfig) -> None:
    model.generate([[HumanMessage("a")], [HumanMessage("b")]], callbacks=config["callbacks"], stream=True)


@path([[0, 0]], threads=2)
async def agenerate_by_streaming(model: ChatWeft, config: RunnableConfig) -> None:
    await model.agenerate([[HumanMessage("a")], [HumanMessage("b")]], callbacks=config["callbacks"], stream=True)


@path([[0], [1]])
def bound_and_configured(model: ChatWeft, config: RunnableConfig) -> None:
    model.bind(stop=["xyz"]).invoke("Hello", config)
    model.with_config(tags=["mine"]).bind(top_k=5).with_config(run_name="named").invoke("Hello", config)


@path([[0], [1]])
async def program_in_with_config(model: ChatWeft, config: RunnableConfig) -> None:
    await model.with_config(config).ainvoke("Hello")
    await drain(model.with_config(callbacks=config["callbacks"]).astream("Hello"))


@path([[0], [1]])
async def program_in_the_model(model: ChatWeft, config: RunnableConfig) -> None:
    mine = model.model_copy(update={"callbacks": config["callbacks"]})
    await mine.ainvoke("Hello")
    list(mine.stream("Hello"))


@path([[0], [1]])
def configurable_fields(model: ChatWeft, config: RunnableConfig) -> None:
    from langchain_core.runnables import ConfigurableField

    configurable = model.configurable_fields(temperature=ConfigurableField(id="heat"))
    configurable.invoke("Hello", {**config, "configurable": {"heat": 0.5}})
    list(configurable.stream("Hello", {**config, "configurable": {"heat": 0.5}}))


@path([[0]])
async def configurable_alternatives(model: ChatWeft, config: RunnableConfig) -> None:
    from langchain_core.runnables import ConfigurableField

    configurable = model.configurable_alternatives(
        ConfigurableField(id="which"), other=ChatWeft(engine=model.engine, max_tokens=3)
    )
    message = await configurable.ainvoke("Hello", {**config, "configurable": {"which": "other"}})
    assert report(message)["output_tokens"] <= 3


# -- paths: expressions of runnables


@path([[0]])
def expression(model: ChatWeft, config: RunnableConfig) -> None:
    (PROMPT | model | TEXT).invoke(TOPICS[0], config)


@path([[0]])
async def expression_async(model: ChatWeft, config: RunnableConfig) -> None:
    await (PROMPT | model | TEXT).ainvoke(TOPICS[0], config)


@path([[0]])
def expression_stream(model: ChatWeft, config: RunnableConfig) -> None:
    list((PROMPT | model | TEXT).stream(TOPICS[0], config))


@path([[0]])
async def expression_astream(model: ChatWeft, config: RunnableConfig) -> None:
    await drain((PROMPT | model | TEXT).astream(TOPICS[0], config))


@path([[0, 0, 0, 0]], threads=4)
async def expression_abatch(model: ChatWeft, config: RunnableConfig) -> None:
    await (PROMPT | model | TEXT).abatch(TOPICS, config)


@path([[0, 0, 0]], threads=3)
def parallel(model: ChatWeft, config: RunnableConfig) -> None:
    RunnableParallel(a=model, b=model, c=PROMPT | model).invoke(TOPICS[0]["topic"], config)


@path([[0, 0, 0]], threads=3)
async def parallel_async(model: ChatWeft, config: RunnableConfig) -> None:
    await RunnableParallel(a=model, b=model, c=model | TEXT).ainvoke("Hello", config)


@path([[0, 0]], threads=2)
async def parallel_astream(model: ChatWeft, config: RunnableConfig) -> None:
    await drain(RunnableParallel(a=model, b=model).astream("Hello", config))


@path([[0]])
def branch_on_a_condition(model: ChatWeft, config: RunnableConfig) -> None:
    RunnableBranch((lambda text: len(text) > 100, model | TEXT | model), model).invoke("Hello", config)


@path([[0], [1]])
def function_given_no_config(model: ChatWeft, config: RunnableConfig) -> None:
    RunnableLambda(lambda text: model.invoke(model.invoke(text).text)).invoke("Hello", config)


@path([[0], [1]])
async def function_given_the_config(model: ChatWeft, config: RunnableConfig) -> None:
    @chain
    async def twice(text: str, config: RunnableConfig) -> str:
        first = await model.ainvoke(text, config)
        return (await model.ainvoke(first.text, config)).text

    await twice.ainvoke("Hello", config)


@path([[0, 0]], threads=2)
async def function_that_gathers(model: ChatWeft, config: RunnableConfig) -> None:
    async def both(text: str) -> None:
        await asyncio.gather(model.ainvoke(text), asyncio.create_task(model.ainvoke(text)))

    await RunnableLambda(both).ainvoke("Hello", config)


@path([[0]])
async def function_in_a_thread(model: ChatWeft, config: RunnableConfig) -> None:
    async def hop(text: str) -> None:
        await asyncio.to_thread(model.invoke, text)

    await RunnableLambda(hop).ainvoke("Hello", config)


@path([[0]])
def fallback_from_a_malformed_call(model: ChatWeft, config: RunnableConfig) -> None:
    model.bind(max_tokens="many").with_fallbacks([model]).invoke("Hello", config)


@path([[0]], rejected=1)
async def fallback_from_a_rejected_call(model: ChatWeft, config: RunnableConfig) -> None:
    longer = model.bind(max_tokens=1_000_000)
    await longer.with_fallbacks([model]).ainvoke("Hello", config)


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Paris", "London"]
    warm: bool


@path([[0], [1], [1]])
async def structured_output(model: ChatWeft, config: RunnableConfig) -> None:
    roomy = model.model_copy(update={"max_tokens": 400, "model_kwargs": {}})
    await roomy.with_structured_output(Weather, include_raw=True).ainvoke("Hello", config)
    roomy.with_structured_output(Weather, method="function_calling", include_raw=True).invoke("Hello", config)
    await drain(roomy.with_structured_output(Weather, method="json_schema").astream("Hello", config))


# -- paths: streams of events


@path([[0]])
async def astream_events_of_a_model(model: ChatWeft, config: RunnableConfig) -> None:
    events = await drain(model.astream_events("Hello", config, version="v2"))
    assert {event["event"] for event in events} >= {"on_chat_model_start", "on_chat_model_stream", "on_chat_model_end"}


@path([[0], [1]])
async def astream_events_of_an_expression(model: ChatWeft, config: RunnableConfig) -> None:
    events = await drain((PROMPT | model | TEXT | model).astream_events(TOPICS[0], config, version="v2"))
    assert sum(event["event"] == "on_chat_model_end" for event in events) == 2


@path([[0, 0]], threads=2)
async def astream_events_around_agenerate(model: ChatWeft, config: RunnableConfig) -> None:
    async def two(text: str, config: RunnableConfig) -> None:
        # Without callbacks, LangChain would start a root run here, since (a)generate takes no config.
        await model.agenerate([[HumanMessage(text)], [HumanMessage("again")]], callbacks=config["callbacks"])

    await drain(RunnableLambda(two).astream_events("Hello", config, version="v2"))


@path([[0]])
async def astream_events_v1(model: ChatWeft, config: RunnableConfig) -> None:
    await drain((PROMPT | model).astream_events(TOPICS[0], config, version="v1"))


@path([[0]])
async def astream_log(model: ChatWeft, config: RunnableConfig) -> None:
    await drain((PROMPT | model).astream_log(TOPICS[0], config))


@path([[0]])
def stream_events_v3_of_a_model(model: ChatWeft, config: RunnableConfig) -> None:
    assert model.stream_events("Hello", config, version="v3").output.usage_metadata


@path([[0]])
async def astream_events_v3_of_a_model(model: ChatWeft, config: RunnableConfig) -> None:
    events = await model.astream_events("Hello", config, version="v3")
    assert (await events.output).usage_metadata
    await asyncio.sleep(0.05)  # LangChain reports the end of the run in a task of its own.


@path([[0], [1]])
async def astream_events_v3_of_a_graph(model: ChatWeft, config: RunnableConfig) -> None:
    events = await two_nodes(model).astream_events(QUESTION, config, version="v3")
    assert len((await events.output())["messages"]) == 3


# -- paths: graphs

QUESTION: Any = {"messages": [HumanMessage("Hello")]}


def two_nodes(model: ChatWeft) -> Any:
    """A graph of a node that passes its config to the model, and a node that does not."""

    async def given(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"], config)]}

    async def not_given(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_sequence([("given", given), ("not_given", not_given)])
    return graph.add_edge(START, "given").compile()


@path([[0], [1]])
async def graph_ainvoke(model: ChatWeft, config: RunnableConfig) -> None:
    await two_nodes(model).ainvoke(QUESTION, config)


@path([[0], [1]])
def graph_invoke(model: ChatWeft, config: RunnableConfig) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_sequence([("one", node), ("two", node)]).add_edge(START, "one")
    graph.compile().invoke(QUESTION, config)


@path([[0], [1]])
def graph_stream_messages(model: ChatWeft, config: RunnableConfig) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_sequence([("one", node), ("two", node)]).add_edge(START, "one")
    assert len(list(graph.compile().stream(QUESTION, config, stream_mode="messages"))) > 4


@path([[0], [1]])
async def graph_astream_messages(model: ChatWeft, config: RunnableConfig) -> None:
    chunks = await drain(two_nodes(model).astream(QUESTION, config, stream_mode="messages"))
    assert len(chunks) > 4


@path([[0], [1]])
async def graph_astream_updates(model: ChatWeft, config: RunnableConfig) -> None:
    assert len(await drain(two_nodes(model).astream(QUESTION, config, stream_mode="updates"))) == 2


@path([[0], [1]])
async def graph_astream_values(model: ChatWeft, config: RunnableConfig) -> None:
    assert len(await drain(two_nodes(model).astream(QUESTION, config, stream_mode="values"))) == 3


@path([[0], [1]])
async def graph_astream_of_several_modes(model: ChatWeft, config: RunnableConfig) -> None:
    modes = ["messages", "updates", "values", "debug"]
    await drain(two_nodes(model).astream(QUESTION, config, stream_mode=modes, subgraphs=True))


@path([[0], [1]])
async def graph_astream_events(model: ChatWeft, config: RunnableConfig) -> None:
    await drain(two_nodes(model).astream_events(QUESTION, config, version="v2"))


@path([[0, 0], [1, 1]], threads=2)
async def graph_abatch(model: ChatWeft, config: RunnableConfig) -> None:
    await two_nodes(model).abatch([QUESTION, QUESTION], config)


@path([[0], [1], [1]])
async def graph_loop_by_command(model: ChatWeft, config: RunnableConfig) -> None:
    async def node(state: MessagesState) -> Command[Literal["node", "__end__"]]:
        answer = await model.ainvoke(state["messages"])
        return Command(update={"messages": [answer]}, goto="node" if len(state["messages"]) < 3 else END)

    await StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile().ainvoke(QUESTION, config)


# -- paths: tools and agents


@path([[0], [1]])
async def tool_that_asks_the_model(model: ChatWeft, config: RunnableConfig) -> None:
    @tool
    async def ask(question: str) -> str:
        """Ask."""
        return (await model.ainvoke(question)).text

    @tool
    def ask_sync(question: str) -> str:
        """Ask."""
        return model.invoke(question).text

    await ask.ainvoke({"question": "Hello"}, config)
    ask_sync.invoke({"question": "Hello"}, config)


class OneToolFirst(AgentMiddleware[Any, Any, Any]):
    """Makes a random model call a tool for a question, and answer in words afterwards."""

    def _set(self, request: Any) -> Any:
        if isinstance(request.messages[-1], HumanMessage):
            return request.override(tool_choice="any", model_settings={"parallel_tool_calls": False})
        return request.override(tools=[], model_settings={"max_tokens": 8})

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """The hook of `agent.invoke`."""
        return handler(self._set(request))

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """The hook of `agent.ainvoke`."""
        return await handler(self._set(request))


def agent(model: ChatWeft, tools: list[Any]) -> Any:
    """A ReAct agent that calls one tool, then answers."""
    return create_agent(model, tools, system_prompt="Use a tool.", middleware=[OneToolFirst()])


@tool
def weather(city: Literal["Paris", "London"]) -> str:
    """Look up the weather."""
    return f"It is raining in {city}."


@path([[0], [1]], table=AGENT_PATHS)
def agent_invoke(structured: ChatWeft, config: RunnableConfig) -> None:
    messages = agent(structured, [weather]).invoke(QUESTION, config)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]


@path([[0], [1]], table=AGENT_PATHS)
async def agent_ainvoke(structured: ChatWeft, config: RunnableConfig) -> None:
    messages = (await agent(structured, [weather]).ainvoke(QUESTION, config))["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert "raining" in messages[2].text


@path([[0], [1]], table=AGENT_PATHS)
async def agent_astream_messages(structured: ChatWeft, config: RunnableConfig) -> None:
    chunks = await drain(agent(structured, [weather]).astream(QUESTION, config, stream_mode="messages"))
    assert any(message.type == "tool" for message, _ in chunks)


@path([[0], [1]], table=AGENT_PATHS)
async def agent_astream_updates(structured: ChatWeft, config: RunnableConfig) -> None:
    updates = await drain(agent(structured, [weather]).astream(QUESTION, config, stream_mode="updates"))
    assert [next(iter(update)) for update in updates] == ["model", "tools", "model"]


@path([[0], [1]], table=AGENT_PATHS)
async def agent_astream_events(structured: ChatWeft, config: RunnableConfig) -> None:
    await drain(agent(structured, [weather]).astream_events(QUESTION, config, version="v2"))


@path([[0], [1], [1]], table=AGENT_PATHS)
async def agent_whose_tool_asks_the_model(structured: ChatWeft, config: RunnableConfig) -> None:
    @tool
    async def expert(city: Literal["Paris", "London"]) -> str:
        """Ask an expert."""
        return (await structured.ainvoke(city, max_tokens=8)).text

    await agent(structured, [expert]).ainvoke(QUESTION, config)


@path([[0], [1], [1], [1]], table=AGENT_PATHS)
async def agent_whose_tool_is_an_agent(structured: ChatWeft, config: RunnableConfig) -> None:
    inner = agent(structured, [weather])

    @tool
    async def colleague(city: Literal["Paris", "London"]) -> str:
        """Ask a colleague."""
        return str((await inner.ainvoke({"messages": [("user", city)]}))["messages"][-1].text)

    await agent(structured, [colleague]).ainvoke(QUESTION, config)


def check(
    engine: weft.Engine, ended: EndedPrograms, program: weft.Program, recorder: CallRecorder, expected: CallPath
) -> None:
    """Check that the program has exactly the recorded calls, in the expected DAG, and no other program has a call."""
    assert [row.info.program_id for row in ended.rows] == [program.program_id], "a call belongs to another program"
    row = program.row
    assert row is not None
    assert {call["program_id"] for call in recorder.calls} == {program.program_id}
    assert levels(recorder.calls) == expected.levels
    count = sum(map(len, expected.levels))
    assert len({call["call_id"] for call in recorder.calls}) == count
    assert row.calls == count + expected.rejected
    assert sum(thread.calls for thread in row.threads.values()) == row.calls
    assert len(row.threads) == expected.threads
    assert {call["thread_id"] for call in recorder.calls} <= set(row.threads)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens", "preemptions"):
        assert getattr(row.account, name) == sum(call[name] for call in recorder.calls), name
    for name in ("service_s", "wait_s"):
        assert getattr(row.account, name) == pytest.approx(sum(call[name] for call in recorder.calls)), name
        assert min(call[name] for call in recorder.calls) > 0
    assert row.attained.total_service_s == pytest.approx(row.account.service_s)
    assert row.engine_ids == [engine.engine_id]


async def run_path(engine: weft.Engine, model: ChatWeft, expected: CallPath) -> None:
    """Run a path in a program, sync or async as the path is, and check the program."""
    ended, recorder = EndedPrograms(engine), CallRecorder()
    handles: list[weft.Program] = []

    @weft.program
    async def main_async(program: weft.Program) -> None:
        handles.append(program)
        await expected.run(model, program.config(callbacks=[recorder]))

    @weft.program
    def main(program: weft.Program) -> None:
        handles.append(program)
        expected.run(model, program.config(callbacks=[recorder]))

    await resolve((main_async if inspect.iscoroutinefunction(expected.run) else main)())
    check(engine, ended, handles[0], recorder, expected)


# LangChain warns of interfaces that users still call: astream_log and events v1 are deprecated, events v3 is beta.
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
@pytest.mark.parametrize("name", PATHS)
async def test_path(engine: weft.Engine, model: ChatWeft, name: str) -> None:
    """Every call on this path belongs to the program once, and its parents are the calls before it."""
    await run_path(engine, model, PATHS[name])


@pytest.mark.parametrize("name", AGENT_PATHS)
async def test_agent_path(engine: weft.Engine, structured: ChatWeft, name: str) -> None:
    """Every call of an agent, of its tools and of agents that are its tools belongs to the program once."""
    await run_path(engine, structured, AGENT_PATHS[name])


@pytest.mark.parametrize("mode", ["given config", "ambient config"])
async def test_branches(engine: weft.Engine, model: ChatWeft, mode: str) -> None:
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


async def test_ids_on_the_message(engine: weft.Engine, model: ChatWeft) -> None:
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


async def test_programs_share_a_graph(engine: weft.Engine, model: ChatWeft) -> None:
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


async def test_programs_share_an_agent(engine: weft.Engine, structured: ChatWeft) -> None:
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


async def test_worker_task_of_another_program(engine: weft.Engine, model: ChatWeft) -> None:
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


async def test_config_of_another_program_wins(engine: weft.Engine, model: ChatWeft) -> None:
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


async def test_each_root_run_is_a_program(engine: weft.Engine, model: ChatWeft) -> None:
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
    engine: weft.Engine, model: ChatWeft, run: Any, name: str, shape: tuple[int, int]
) -> None:
    """A program has LangChain's name of its root run, and all calls under this run."""
    ended = EndedPrograms(engine)
    await resolve(run(model, {"callbacks": [ProgramCallbackHandler()]}))
    (row,) = ended.rows
    assert (row.info.name, str(row.state)) == (name, "finished")
    assert (row.calls, len(row.threads)) == shape


async def test_batch_of_root_runs(engine: weft.Engine, model: ChatWeft) -> None:
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
    engine: weft.Engine, model: ChatWeft, extra: dict[str, Any], session: str | None
) -> None:
    """A root run has the session that its metadata names, in LangSmith's order, or else a session of its own."""
    ended = EndedPrograms(engine)
    for _ in range(2):
        await two_nodes(model).ainvoke(QUESTION, {"callbacks": [ProgramCallbackHandler()], **extra})
    first, second = (row.info.session_id for row in ended.rows)
    assert (first == second) == (session is not None)
    assert session is None or first == session


async def test_an_unusable_session_of_a_root_run(
    engine: weft.Engine, model: ChatWeft, caplog: pytest.LogCaptureFixture
) -> None:
    """A root run whose session id is not usable is one program in a session of its own, and a warning says so."""
    ended = EndedPrograms(engine)
    config: RunnableConfig = {"callbacks": [ProgramCallbackHandler()], "metadata": {"session_id": "x" * 300}}
    await two_nodes(model).ainvoke(QUESTION, config)
    (row,) = ended.rows
    assert row.calls == 2
    assert row.info.session_id.startswith("sess-")
    assert "session id is not usable" in caplog.text


async def test_root_runs_at_once(engine: weft.Engine, model: ChatWeft) -> None:
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
async def test_failing_root_run(engine: weft.Engine, model: ChatWeft, run_name: str | None) -> None:
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


async def test_without_any_handler(engine: weft.Engine, model: ChatWeft) -> None:
    """Without a handler, each call is a program with the model's name."""
    ended = EndedPrograms(engine)
    named = model.model_copy(update={"name": "clerk"})
    await (named | TEXT | named).ainvoke("Hello")
    list(model.stream("Hello"))
    await drain(model.astream("Hello"))
    model.batch(["Hello", "Hello"])
    assert [row.info.name for row in ended.rows] == ["clerk"] * 2 + ["chat"] * 4
    assert {(row.calls, str(row.state)) for row in ended.rows} == {(1, "finished")}
