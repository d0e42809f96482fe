"""The ways in which a user can call a model through LangChain, each with the program that it should make."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableConfig, RunnableLambda, RunnableParallel, chain
from langchain_core.tools import tool
from langchain_parts import CallRecorder, report
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command
from observers import EndedPrograms, levels, resolve
from pydantic import BaseModel

import weft
from weft.integrations.langchain import ChatWeft
from weft.testing import ScriptedEngine

AnyEngine = weft.Engine | ScriptedEngine

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
NEED_VLLM = {"structured_output"}  # the output must have a form that vLLM enforces
OVERLAPPING = {"batch": 4, "batch_as_completed": 3}  # calls on threads, that only their times show to be parallel


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
    before = asyncio.all_tasks()
    events = await model.astream_events("Hello", config, version="v3")
    assert (await events.output).usage_metadata
    await asyncio.gather(*(asyncio.all_tasks() - before))  # LangChain reports the end of the run in one of them


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
    assert len(list(graph.compile().stream(QUESTION, config, stream_mode="messages"))) > 2


@path([[0], [1]])
async def graph_astream_messages(model: ChatWeft, config: RunnableConfig) -> None:
    chunks = await drain(two_nodes(model).astream(QUESTION, config, stream_mode="messages"))
    assert len(chunks) > 2


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


# -- running a path


def check(
    engine: AnyEngine, ended: EndedPrograms, program: weft.Program, recorder: CallRecorder, expected: CallPath
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
    assert min(call["service_s"] for call in recorder.calls) > 0
    assert row.attained.total_service_s == pytest.approx(row.account.service_s)
    assert row.engine_ids == [engine.engine_id]


async def run_path(engine: AnyEngine, model: ChatWeft, expected: CallPath) -> list[dict[str, Any]]:
    """Run a path in a program, sync or async as the path is, check the program, and return the calls' reports."""
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
    return recorder.calls
