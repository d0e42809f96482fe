"""The OpenAI SDK on the session's engine: answers and streams."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

import anyio
import httpx2
import openai
import pytest
from observers import EndedPrograms, calls_in_flight, wait_until_generating, wait_until_idle
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai_parts import QUESTION, Answer, ask, endless, every_method, short
from polling import until
from pydantic import BaseModel, Field
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.integrations.openai import AsyncTransport, Transport, openai_client, sync_openai_client

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.fixture
def structured(engine: weft.Engine) -> dict[str, Any]:
    """Arguments for tool calls and JSON.

    White space is excluded, because schemas allow any amount of it and a random model would generate it without end.
    """
    tokenizer: Any = engine._llm.renderer.tokenizer
    blank = {str(token): -100 for token in tokenizer.get_vocab().values() if not tokenizer.decode([token]).strip()}
    return {"model": engine.model, "messages": QUESTION, "temperature": 0, "max_tokens": 160, "logit_bias": blank}


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Paris", "London"]
    degrees: int = Field(ge=0, le=40)
    warm: bool


# -- answers


@every_method
async def test_answer(engine: weft.Engine, how: str) -> None:
    """By every method, an answer has the ids and the account of its call, and the call belongs to the program."""
    async with weft.Program("asker", session_id="s1") as program:
        answer = await ask(engine, program, how)
    assert answer.text
    assert answer.finish_reason == "length"
    assert answer.usage.completion_tokens == answer.weft["output_tokens"] == 12
    assert answer.usage.prompt_tokens == answer.weft["prompt_tokens"] > 0
    assert answer.weft["service_s"] > 0
    assert answer.weft["program_id"] == program.program_id
    assert program.row is not None
    assert (program.row.calls, str(program.row.state)) == (1, "finished")
    assert program.row.account.service_s == answer.weft["service_s"]


async def test_the_four_methods_agree(engine: weft.Engine) -> None:
    """At temperature 0, the four methods give the same answer."""
    methods = ("create", "create sync", "stream", "stream sync")
    assert len({(await ask(engine, None, how)).text for how in methods}) == 1


async def test_several_choices(engine: weft.Engine) -> None:
    """An answer of several choices is one call, streamed or not."""
    async with weft.Program() as program:
        client = openai_client(engine, program)
        request = {"model": engine.model, "messages": QUESTION, **short(n=3, seed=1), "temperature": 1.0}
        whole = await client.chat.completions.create(**request)
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **request)]
    assert len(whole.choices) == 3
    texts = ["", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(program.graph) == 2
    assert program.row is not None
    assert program.row.calls == 2


async def test_the_lazy_name(engine: weft.Engine) -> None:
    """`weft.openai_client` is the integration's function, and makes a client of OpenAI's class."""
    assert weft.openai_client is openai_client
    assert type(weft.openai_client(engine)) is AsyncOpenAI
    assert type(sync_openai_client(engine)) is OpenAI


@pytest.mark.parametrize("stream", [True, False])
async def test_raw_response(engine: weft.Engine, stream: bool) -> None:
    """A raw response has a status, and its request id is the id of the call."""
    client = openai_client(engine)
    request: dict[str, Any] = {"model": engine.model, "messages": QUESTION, "stream": stream, **short()}
    raw = await client.chat.completions.with_raw_response.create(**request)
    assert raw.status_code == 200
    parsed: Any = raw.parse()
    parts = [part async for part in parsed] if stream else [parsed]
    assert raw.headers["x-request-id"] == raw.request_id == Answer([*parts, UsageChunk()]).weft["call_id"]
    async with client.chat.completions.with_streaming_response.create(**request) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert (lines[-1] == "data: [DONE]") is stream
    assert len(lines) > 2 if stream else len(lines) == 1


class UsageChunk:
    """Stands for the chunk with the usage, which the test does not request."""

    choices = ()
    usage = True


async def test_request_id(engine: weft.Engine) -> None:
    """The SDK's `_request_id` is the call's id."""
    completion: Any = await openai_client(engine).chat.completions.create(
        model=engine.model, messages=QUESTION, **short()
    )
    assert completion._request_id == completion.weft["call_id"]


async def test_models(engine: weft.Engine) -> None:
    """Both kinds of client list the engine's model."""
    assert [model.id async for model in openai_client(engine).models.list()] == [engine.model]
    models = await asyncio.to_thread(lambda: list(sync_openai_client(engine).models.list()))
    assert [model.id for model in models] == [engine.model]


async def test_model_may_be_left_empty(engine: weft.Engine) -> None:
    """The SDK requires the name of a model. An empty name means the engine's model."""
    assert (await ask(engine, None, "create", model="")).text


@pytest.mark.parametrize("beta", [True, False])
async def test_parse(engine: weft.Engine, structured: dict[str, Any], beta: bool) -> None:
    """`parse` returns an object of the class, whose schema is enforced."""
    client = openai_client(engine)
    completions = client.beta.chat.completions if beta else client.chat.completions
    completion = await completions.parse(response_format=Weather, **structured)
    assert isinstance(completion.choices[0].message.parsed, Weather)


def test_parse_sync(engine: weft.Engine, structured: dict[str, Any]) -> None:
    """`parse` works without an event loop."""
    completion = sync_openai_client(engine).chat.completions.parse(response_format=Weather, **structured)
    assert isinstance(completion.choices[0].message.parsed, Weather)


async def test_parse_of_a_cut_off_answer(engine: weft.Engine, structured: dict[str, Any]) -> None:
    """An answer that max_tokens cut off raises the SDK's own error."""
    with pytest.raises(openai.LengthFinishReasonError):
        await openai_client(engine).chat.completions.parse(response_format=Weather, **{**structured, "max_tokens": 3})


async def test_parse_tools(engine: weft.Engine, structured: dict[str, Any]) -> None:
    """A tool that is a pydantic class has parsed arguments."""
    tools: Any = [pydantic_function_tool(Weather)]
    completion = await openai_client(engine).chat.completions.parse(
        tools=tools, tool_choice="required", parallel_tool_calls=False, **structured
    )
    calls = completion.choices[0].message.tool_calls
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)


@pytest.mark.parametrize("sync", [True, False])
async def test_stream_helper(engine: weft.Engine, structured: dict[str, Any], sync: bool) -> None:
    """`chat.completions.stream` gives events and the parsed answer. The account is on the last chunk of the answer."""
    if sync:

        def read() -> tuple[list[Any], Any]:
            with sync_openai_client(engine).chat.completions.stream(response_format=Weather, **structured) as stream:
                return list(stream), stream.get_final_completion()

        events, completion = await asyncio.to_thread(read)
    else:
        async with openai_client(engine).chat.completions.stream(response_format=Weather, **structured) as stream:
            events = [event async for event in stream]
            completion = await stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Weather)
    assert {"chunk", "content.delta", "content.done"} <= {event.type for event in events}
    assert [event.chunk.weft["service_s"] > 0 for event in events if hasattr(getattr(event, "chunk", None), "weft")]


@pytest.mark.parametrize("stream", [True, False])
async def test_tool_loop(engine: weft.Engine, structured: dict[str, Any], stream: bool) -> None:
    """The calls before and after a tool form a chain, and the second call names the tool."""
    tools: Any = [pydantic_function_tool(Weather, name="weather")]
    async with weft.Program() as program:
        client = openai_client(engine, program)
        request = {**structured, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**request)).choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "mild"}
        messages = [*QUESTION, message.model_dump(exclude_none=True), result]
        await ask(engine, program, "create", messages=messages)
    first, second = program.graph.calls
    assert [edge.parent for edge in second.parents] == [first.call_id]
    assert (first.tools, second.tools) == ((), ("weather",))


@pytest.mark.parametrize("make", [lambda client: client.copy(), lambda client: client.with_options(timeout=60.0)])
async def test_copies(engine: weft.Engine, make: Callable[[AsyncOpenAI], AsyncOpenAI]) -> None:
    """A copy of a client has its engine and its program, and closing the client closes nothing else."""
    async with weft.Program() as program:
        client = openai_client(engine, program)
        answer: Any = await make(client).chat.completions.create(model=engine.model, messages=QUESTION, **short())
        await client.close()
        await openai_client(engine, program).chat.completions.create(model=engine.model, messages=QUESTION, **short())
    assert answer.weft["program_id"] == program.program_id
    assert len(program.graph) == 2


async def test_transports_for_other_clients(engine: weft.Engine) -> None:
    """The transports answer any httpx2 client, under any base URL."""
    body = {"messages": QUESTION, "max_tokens": 3}
    async with httpx2.AsyncClient(transport=AsyncTransport(engine), base_url="http://somewhere/v7") as http:
        assert (await http.post("/chat/completions", json=body)).json()["weft"]["output_tokens"] == 3
    with httpx2.Client(transport=Transport(engine), base_url="https://elsewhere") as sync_http:
        response = await asyncio.to_thread(lambda: sync_http.post("/chat/completions", json=body))
    assert response.json()["weft"]["output_tokens"] == 3


# -- streams


async def test_streams_token_by_token(engine: weft.Engine) -> None:
    """Chunks arrive while the engine is still generating, with one token each."""
    async with weft.Program() as program:
        client = openai_client(engine, program)
        stream = await client.chat.completions.create(model=engine.model, messages=QUESTION, stream=True, **endless())
        chunks = [await anext(stream) for _ in range(100)]
        assert calls_in_flight(engine)
        assert max(len(chunk.choices[0].delta.content or "") for chunk in chunks) < 40
        await stream.close()


async def test_sync_streams_token_by_token(engine: weft.Engine) -> None:
    """Chunks of a sync stream arrive while the engine is generating, and closing the stream early aborts the call."""

    def read() -> int:
        request = {"model": engine.model, "messages": QUESTION, **endless()}
        with weft.Program() as program:
            stream = sync_openai_client(engine, program).chat.completions.create(stream=True, **request)
            next(stream)
            next(stream)
            busy = calls_in_flight(engine)
            stream.close()
            asyncio.run(wait_until_idle(engine))
        return busy

    assert await asyncio.to_thread(read)
    assert not calls_in_flight(engine)


@pytest.mark.parametrize("how", ["close", "context", "break", "generator"])
@pytest.mark.parametrize("owner", ["program", "no program"])
async def test_closed_stream(engine: weft.Engine, how: str, owner: str) -> None:
    """A stream that is not read to its end is aborted in the engine, however it is left."""
    ended = EndedPrograms(engine)
    async with weft.Program() as program:
        client = openai_client(engine, program if owner == "program" else None)
        request = {"model": engine.model, "messages": QUESTION, "stream": True, **endless()}
        stream: Any = await client.chat.completions.create(**request)
        if how == "context":
            async with stream:
                await anext(stream)
        elif how == "generator":
            async with aclosing(aiter(stream)) as chunks:
                await anext(chunks)
            await stream.close()
        else:
            async for _chunk in stream:
                break
        if how == "close":
            await stream.close()
        del stream
        await anyio.sleep(0.01)
        gc.collect()  # The SDK's streams are reference cycles.
        await wait_until_idle(engine)
    states = [(row.calls, row.account.output_tokens < ENDLESS_TOKENS, str(row.state)) for row in ended.rows]
    assert states == ([(1, True, "finished")] if owner == "program" else [(1, True, "cancelled")])


async def test_stream_never_read(engine: weft.Engine) -> None:
    """A stream that is dropped without being read is aborted."""
    ended = EndedPrograms(engine)
    await openai_client(engine).chat.completions.create(model=engine.model, messages=QUESTION, stream=True, **endless())
    gc.collect()
    await wait_until_idle(engine)
    await until(lambda: len(engine.table) == 0)
    assert [str(row.state) for row in ended.rows] == ["cancelled"]


async def test_closed_while_a_task_reads(engine: weft.Engine) -> None:
    """Closing a stream from another task aborts the call, and ends the loop that reads the stream."""
    async with weft.Program() as program:
        stream = await openai_client(engine, program).chat.completions.create(
            model=engine.model, messages=QUESTION, stream=True, **endless()
        )

        async def read() -> int:
            return len([chunk async for chunk in stream])

        task = asyncio.create_task(read())
        await wait_until_generating(engine)
        await stream.close()
        await wait_until_idle(engine)
        assert await task < ENDLESS_TOKENS
        assert task.cancelling() == 0


async def test_finished_at_the_finish_reason(engine: weft.Engine) -> None:
    """A client that stops reading at the chunk with the finish reason does not abort the call."""
    async with weft.Program() as program:
        stream = await openai_client(engine, program).chat.completions.create(
            model=engine.model, messages=QUESTION, stream=True, stream_options={"include_usage": True}, **short()
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].finish_reason:
                break
        await ask(engine, program, "create")
    assert [str(call.state) for call in program.graph.calls] == ["finished", "finished"]
    assert [len(call.parents) for call in program.graph.calls] == [0, 1]
