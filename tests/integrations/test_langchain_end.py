"""However LangChain's runs end, the program ends in the right state, and no call stays on the engine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_parts import report
from langgraph.graph import START, MessagesState, StateGraph
from observers import (
    TIMEOUT_S,
    EndedPrograms,
    assert_aborted,
    calls_in_flight,
    cancel_while_generating,
    expiring_timeouts,
    wait_until_generating,
    wait_until_idle,
)
from polling import until
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.errors import CallError, ProgramEndedError
from weft.core.process_rows import ProgramRow
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

QUESTION: Any = {"messages": [HumanMessage("Hello")]}


def graph_of(model: ChatWeft) -> Any:
    """A graph of one node that calls the model."""

    async def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()


# The runnables that are called, and their inputs. With the model `endless`, their calls last for seconds.
RUNNABLES: dict[str, Any] = {
    "model": lambda model: (model, "Hello"),
    "bound": lambda model: (model.bind(stop=["xyz"]), "Hello"),
    "expression": lambda model: (RunnableLambda(str) | model, "Hello"),
    "parallel": lambda model: (RunnableParallel(a=model, b=model), "Hello"),
    "graph": lambda model: (graph_of(model), QUESTION),
}

on_every_runnable = pytest.mark.parametrize("what", RUNNABLES)


def cut_short(row: ProgramRow) -> bool:
    """Whether a row has calls, all of which were aborted."""
    return row.calls > 0 and row.account.output_tokens < ENDLESS_TOKENS and not row.active


# -- cancelled


@on_every_runnable
@pytest.mark.parametrize("how", ["task", "wait_for", "move_on_after"])
async def test_cancelled_program(engine: weft.Engine, endless: ChatWeft, what: str, how: str) -> None:
    """Cancelling the entrypoint while it waits for LangChain aborts its calls and ends it as cancelled."""
    runnable, question = RUNNABLES[what](endless)
    ended = EndedPrograms(engine)

    @weft.program
    async def main(program: weft.Program) -> None:
        await runnable.ainvoke(question, program.config())

    await cancel_while_generating(engine, how, main, requests=2 if what == "parallel" else 1)
    (row,) = ended.rows
    assert str(row.state) == "cancelled"
    assert cut_short(row)
    assert row.calls == (2 if what == "parallel" else 1)


@on_every_runnable
@pytest.mark.parametrize("how", ["task", "move_on_after"])
async def test_cancelled_root_run(engine: weft.Engine, endless: ChatWeft, what: str, how: str) -> None:
    """Without the decorator, a cancelled root run ends its program as cancelled, even if the run is the model's."""
    runnable, question = RUNNABLES[what](endless)
    ended, handler = EndedPrograms(engine), ProgramCallbackHandler()
    if how == "task":
        task = asyncio.create_task(runnable.ainvoke(question, {"callbacks": [handler]}))
        records = await wait_until_generating(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_aborted(records)
    else:
        async with expiring_timeouts(engine):
            with anyio.move_on_after(TIMEOUT_S):
                await runnable.ainvoke(question, {"callbacks": [handler]})
    await wait_until_idle(engine)
    await until(lambda: len(engine.table) == 0)
    (row,) = ended.rows
    assert str(row.state) == "cancelled"
    assert cut_short(row)
    assert len(handler._root_runs) == 0
    assert len(handler._open_runs) == 0


async def test_cancelled_call_without_handler(engine: weft.Engine, endless: ChatWeft) -> None:
    """A cancelled call without a handler is a program that ends as cancelled."""
    ended = EndedPrograms(engine)
    async with expiring_timeouts(engine):
        with anyio.move_on_after(TIMEOUT_S):
            await endless.ainvoke("Hello")
    await wait_until_idle(engine)
    assert ended.states == {"chat": "cancelled"}


async def test_timeout_inside_a_program(engine: weft.Engine, endless: ChatWeft, model: ChatWeft) -> None:
    """A program may stop waiting for a call and go on. The call is aborted, and the next call continues its thread."""
    async with weft.Program("patient") as program:
        async with expiring_timeouts(engine):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(endless.ainvoke("Hello", program.config()), TIMEOUT_S)
        await wait_until_idle(engine)
        assert str(program.state) == "idle"
        answer = await model.ainvoke("Hello", program.config())
    assert report(answer)["parents"] == ()
    assert str(program.state) == "finished"
    assert program.row is not None
    assert (program.row.calls, len(program.row.threads)) == (2, 1)


@pytest.mark.parametrize("streamed", [True, False])
async def test_cost_of_an_aborted_call(engine: weft.Engine, endless: ChatWeft, streamed: bool) -> None:
    """An aborted call counts in its program. The scheduler tells its cost without a further call."""

    async def call(config: Any) -> None:
        if streamed:
            _ = [chunk async for chunk in endless.astream("Hello", config)]
        else:
            await endless.ainvoke("Hello", config)

    async with weft.Program() as program:
        async with expiring_timeouts(engine):
            with anyio.move_on_after(TIMEOUT_S):
                await call(program.config())
        await wait_until_idle(engine)
        await until(lambda: engine.programs.messages.is_idle)
        engine.table.check_integrity()
    assert program.row is not None
    assert program.row.calls == 1
    assert program.row.account.service_s > 0
    assert program.attained.service_s == program.row.account.service_s


async def test_cancelling_one_of_two(engine: weft.Engine, endless: ChatWeft, model: ChatWeft) -> None:
    """Cancelling a program does not affect another one."""
    ended = EndedPrograms(engine)

    @weft.program(name="cancelled")
    async def first(program: weft.Program) -> None:
        await endless.ainvoke("Hello", program.config())

    @weft.program(name="left alone")
    async def second(program: weft.Program) -> str:
        return (await model.bind(max_tokens=200).ainvoke("Hello", program.config())).text

    task, other = asyncio.create_task(first()), asyncio.create_task(second())
    await wait_until_generating(engine)
    task.cancel()
    assert await other
    await wait_until_idle(engine)
    assert ended.states == {"cancelled": "cancelled", "left alone": "finished"}


# -- streams that are not read to the end


@on_every_runnable
@pytest.mark.parametrize("decorated", [True, False])
async def test_closed_async_stream(engine: weft.Engine, endless: ChatWeft, what: str, decorated: bool) -> None:
    """Closing an async stream early aborts the call and ends the program as cancelled."""
    runnable, question = RUNNABLES[what](endless)
    ended = EndedPrograms(engine)
    mode: dict[str, Any] = {"stream_mode": "messages"} if what == "graph" else {}

    @weft.program
    async def main(program: weft.Program) -> AsyncIterator[Any]:
        async for chunk in runnable.astream(question, program.config(), **mode):
            yield chunk

    config: Any = {"callbacks": [ProgramCallbackHandler()]}
    chunks: Any = main() if decorated else runnable.astream(question, config, **mode)
    before = asyncio.all_tasks()
    await anext(chunks)
    await anext(chunks)
    assert calls_in_flight(engine)
    await chunks.aclose()
    # RunnableParallel does not cancel the tasks that wait for the next chunk of each branch.
    errors = await asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True)
    assert all(isinstance(error, ProgramEndedError) for error in errors if isinstance(error, Exception))
    await wait_until_idle(engine)
    await until(lambda: len(engine.table) == 0)
    (row,) = ended.rows
    assert str(row.state) == "cancelled"
    assert cut_short(row)


@pytest.mark.parametrize("what", ["model", "bound", "expression"])
@pytest.mark.parametrize("owner", ["program", "root run", "no handler"])
async def test_abandoned_stream(engine: weft.Engine, endless: ChatWeft, what: str, owner: str) -> None:
    """Leaving a sync stream early aborts the call and ends the program, as soon as the stream is garbage-collected."""
    runnable, question = RUNNABLES[what](endless)
    ended = EndedPrograms(engine)

    @weft.program
    def main(program: weft.Program) -> Iterator[Any]:
        yield from runnable.stream(question, program.config())

    def chunks() -> Any:
        if owner == "program":
            return main()
        return runnable.stream(question, {"callbacks": [ProgramCallbackHandler()]} if owner == "root run" else None)

    for n, _chunk in enumerate(chunks()):
        if n == 2:
            break
    gc.collect()
    await wait_until_idle(engine)
    (row,) = ended.rows
    assert str(row.state) == "cancelled"
    assert cut_short(row)


@pytest.mark.parametrize("what", ["model", "expression", "graph"])
@pytest.mark.parametrize("decorated", [True, False])
async def test_closed_event_stream(engine: weft.Engine, endless: ChatWeft, what: str, decorated: bool) -> None:
    """Closing a stream of events early aborts the call and ends the program as cancelled."""
    runnable, question = RUNNABLES[what](endless)
    ended = EndedPrograms(engine)

    @weft.program
    async def main(program: weft.Program) -> AsyncIterator[Any]:
        async for event in runnable.astream_events(question, program.config(), version="v2"):
            yield event

    config: Any = {"callbacks": [ProgramCallbackHandler()]}
    events: Any = main() if decorated else runnable.astream_events(question, config, version="v2")
    async for event in events:
        if event["event"] == "on_chat_model_stream":
            break
    await events.aclose()
    await wait_until_idle(engine)
    await until(lambda: len(engine.table) == 0)
    (row,) = ended.rows
    assert str(row.state) == "cancelled"
    assert cut_short(row)


async def test_stream_read_to_the_end(engine: weft.Engine, model: ChatWeft) -> None:
    """A stream that is read to its end ends its program as finished."""
    ended = EndedPrograms(engine)
    config: Any = {"callbacks": [ProgramCallbackHandler()]}
    assert [chunk async for chunk in model.astream("Hello", config)]
    assert list(model.stream("Hello", config))
    assert [chunk async for chunk in graph_of(model).astream(QUESTION, config, stream_mode="messages")]
    assert [str(row.state) for row in ended.rows] == ["finished"] * 3


# -- errors


class UserError(Exception):
    """An error of the user's code."""


@pytest.mark.parametrize("kind", ["sync", "async", "stream", "astream", "graph"])
@pytest.mark.parametrize("decorated", [True, False])
async def test_error_in_a_chain(engine: weft.Engine, model: ChatWeft, kind: str, decorated: bool) -> None:
    """An error of the user's code after a call is raised unchanged, and the program ends as failed."""
    ended = EndedPrograms(engine)

    def fail(_message: Any) -> Any:
        raise UserError

    async def node(_state: MessagesState) -> Any:
        fail(await model.ainvoke("Hello"))

    chain = model | fail

    async def run(config: Any) -> None:
        if kind == "sync":
            chain.invoke("Hello", config)
        elif kind == "async":
            await chain.ainvoke("Hello", config)
        elif kind == "stream":
            list(chain.stream("Hello", config))
        elif kind == "astream":
            _ = [chunk async for chunk in chain.astream("Hello", config)]
        else:
            await StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile().ainvoke(QUESTION, config)

    @weft.program
    async def main(program: weft.Program) -> None:
        await run(program.config())

    with pytest.raises(UserError):
        await (main() if decorated else run({"callbacks": [ProgramCallbackHandler()]}))
    await wait_until_idle(engine)
    assert [(str(row.state), row.calls) for row in ended.rows] == [("failed", 1)]


@pytest.mark.parametrize("kind", ["invoke", "ainvoke", "stream", "astream"])
@pytest.mark.parametrize("owner", ["program", "root run", "no handler"])
async def test_rejected_call(engine: weft.Engine, model: ChatWeft, kind: str, owner: str) -> None:
    """A call that the engine rejects raises a CallError, and the program ends as failed."""
    ended = EndedPrograms(engine)
    rejected = model.bind(max_tokens=1_000_000)

    async def run(config: Any) -> None:
        if kind == "invoke":
            rejected.invoke("Hello", config)
        elif kind == "ainvoke":
            await rejected.ainvoke("Hello", config)
        elif kind == "stream":
            list(rejected.stream("Hello", config))
        else:
            _ = [chunk async for chunk in rejected.astream("Hello", config)]

    @weft.program
    async def main(program: weft.Program) -> None:
        await run(program.config())

    config = {"callbacks": [ProgramCallbackHandler()]} if owner == "root run" else None
    with pytest.raises(CallError):
        await (main() if owner == "program" else run(config))
    await wait_until_idle(engine)
    assert [(str(row.state), row.calls) for row in ended.rows] == [("failed", 1)]


async def test_one_of_a_batch_fails(engine: weft.Engine, endless: ChatWeft) -> None:
    """If one input of a batch raises, the program fails, and the other calls of the batch are aborted."""
    ended = EndedPrograms(engine)

    async def one(text: str) -> str:
        if text == "bad":
            await wait_until_generating(engine)
            raise UserError
        return (await endless.ainvoke(text)).text

    @weft.program
    async def main(program: weft.Program) -> None:
        await RunnableLambda(one).abatch(["good", "bad", "good"], program.config())

    with pytest.raises(UserError):
        await main()
    await wait_until_idle(engine)
    (row,) = ended.rows
    assert str(row.state) == "failed"
    assert row.calls == 2
    assert cut_short(row)


async def test_result_that_is_not_awaited(engine: weft.Engine, endless: ChatWeft) -> None:
    """A call that still runs when the entrypoint returns is aborted, and awaiting it raises ProgramEndedError."""

    @weft.program
    async def main(program: weft.Program) -> asyncio.Task[Any]:
        task = asyncio.create_task(endless.ainvoke("Hello", program.config()))
        await wait_until_generating(engine)
        return task

    task = await main()
    with pytest.raises(ProgramEndedError, match="main"):
        await task
    await wait_until_idle(engine)


async def test_program_ends_while_a_thread_streams(engine: weft.Engine, endless: ChatWeft) -> None:
    """A stream that a thread reads raises ProgramEndedError when its program ends."""
    async with weft.Program("short") as program:
        task = asyncio.create_task(asyncio.to_thread(lambda: list(endless.stream("Hello", program.config()))))
        await wait_until_generating(engine)
    with pytest.raises(ProgramEndedError, match="short"):
        await task
    await wait_until_idle(engine)
