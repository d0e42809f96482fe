"""`ChatWeft` as a chat model: parameters, usage, tools, structured output, cache and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from langchain_parts import CallRecorder, report
from observers import EndedPrograms, wait_until_idle
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

import weft
from weft.core.errors import CallError, ContextLengthError, InvalidRequestError, OutputParsingError, ProgramEndedError
from weft.integrations.langchain import ChatWeft, ProgramCallbackHandler

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

City = Literal["Paris", "London"]


class Weather(BaseModel):
    """The weather somewhere."""

    city: City
    degrees: int = Field(ge=0, le=40)
    warm: bool


class WeatherDict(TypedDict):
    """The weather somewhere."""

    city: City
    warm: bool


WEATHER_SCHEMA: dict[str, Any] = {
    "title": "Weather",
    "description": "The weather somewhere.",
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


@tool
def weather(city: City, warm: bool) -> str:
    """Look up the weather."""
    return f"{city}: {'warm' if warm else 'cold'}"


@tool
def ferry(to: Literal["Dover", "Calais"]) -> str:
    """Book a ferry."""
    return to


ARGUMENTS = {
    "weather": TypeAdapter(WeatherDict),
    "ferry": TypeAdapter(TypedDict("Ferry", {"to": Literal["Dover", "Calais"]})),  # type: ignore[operator]
}


async def ask(model: Any, question: Any, how: str, config: Any = None, **kwargs: Any) -> AIMessage:
    """The whole answer of the model, by one of its four methods."""
    if how == "invoke":
        return model.invoke(question, config, **kwargs)  # type: ignore[no-any-return]
    if how == "ainvoke":
        return await model.ainvoke(question, config, **kwargs)  # type: ignore[no-any-return]
    if how == "stream":
        chunks = list(model.stream(question, config, **kwargs))
    else:
        chunks = [chunk async for chunk in model.astream(question, config, **kwargs)]
    whole: AIMessageChunk = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


every_method = pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])

# -- answers


@every_method
async def test_usage_and_metadata(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """An answer has its usage, finish reason and call, and so have the joined chunks of a stream."""
    prompt = [SystemMessage("You count ships."), HumanMessage(f"How many ships are there? ({how})" + " fog" * 300)]
    async with weft.Program() as program:
        first = await ask(model, prompt, how, program.config())
        again = await ask(model, prompt, how, program.config())
    for answer in (first, again):
        usage, account = answer.usage_metadata, report(answer)
        assert usage is not None
        assert usage["output_tokens"] == account["output_tokens"] == 12
        assert usage["input_tokens"] == account["prompt_tokens"] > 300
        assert usage["total_tokens"] == usage["input_tokens"] + 12
        assert usage["input_token_details"]["cache_read"] == account["cached_tokens"]
        assert answer.response_metadata["finish_reason"] == "length"
        assert answer.response_metadata["model_name"] == engine.model
        assert answer.response_metadata["model_provider"] == "weft"
        assert answer.id is not None
        assert answer.id.startswith("lc_run--")
    assert report(again)["cached_tokens"] > 0
    assert again.text == first.text != ""


async def test_the_four_methods_agree(engine: weft.Engine, model: ChatWeft) -> None:
    """At temperature 0, the four methods give the same answer."""
    answers = {(await ask(model, "Tell me about the lighthouse.", how)).text for how in ("invoke", "ainvoke")}
    answers |= {(await ask(model, "Tell me about the lighthouse.", how)).text for how in ("stream", "astream")}
    assert len(answers) == 1


async def test_stream_comes_in_pieces(engine: weft.Engine, model: ChatWeft) -> None:
    """A stream yields tokens as they are generated. All chunks have one message id, and one has the usage."""
    chunks = [chunk async for chunk in model.astream("Hello")]
    assert len([chunk for chunk in chunks if chunk.text]) > 6
    assert len({chunk.id for chunk in chunks}) == 1
    assert len([chunk for chunk in chunks if chunk.usage_metadata]) == 1
    assert chunks[-1].chunk_position == "last"


async def test_temperature_and_seed(engine: weft.Engine, model: ChatWeft) -> None:
    """The same seed gives the same answer, and another seed gives another answer."""
    hot = model.model_copy(update={"temperature": 1.5, "seed": 1})
    first, same = hot.invoke("Hello").text, (await hot.ainvoke("Hello")).text
    assert first == same
    assert hot.invoke("Hello", seed=2).text != first
    assert hot.bind(temperature=0).invoke("Hello").text == model.invoke("Hello").text != first


@every_method
async def test_stop(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """Stop strings can be a field, bound, or an argument of the call, which overrides the field."""
    whole = model.invoke("Hello").text
    word = next(
        whole[n : n + 2]
        for n in range(3, len(whole))
        if whole[n : n + 2].isascii() and whole.find(whole[n : n + 2]) == n
    )
    expected = whole[: whole.index(word)]
    for answer in (
        await ask(model, "Hello", how, stop=[word]),
        await ask(model.bind(stop=[word]), "Hello", how),
        await ask(model.model_copy(update={"stop": [word]}), "Hello", how),
        await ask(model.model_copy(update={"stop": ["never generated"]}), "Hello", how, stop=[word]),
    ):
        assert answer.text == expected
        assert answer.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "ask_for",
    [
        lambda model: model.model_copy(update={"max_tokens": 5}).invoke("Hello"),
        lambda model: model.bind(max_tokens=5).invoke("Hello"),
        lambda model: model.invoke("Hello", max_tokens=5),
        lambda model: model.bind(max_completion_tokens=5).invoke("Hello"),
    ],
    ids=["field", "bind", "invoke", "OpenAI's newer name"],
)
async def test_max_tokens(engine: weft.Engine, model: ChatWeft, ask_for: Callable[[ChatWeft], AIMessage]) -> None:
    """The maximum length of an answer can be given in four ways."""
    assert report(ask_for(model))["output_tokens"] == 5


async def test_model_kwargs(engine: weft.Engine, model: ChatWeft) -> None:
    """Any field of vLLM's chat request can be set, on the model or on one call."""
    token = engine.tokenize("ship")[0]
    only = model.model_copy(update={"model_kwargs": {"ignore_eos": True, "allowed_token_ids": [token]}})
    assert len(set(engine.tokenize(only.invoke("Hello").text))) == 1
    plain = model.invoke("Hello")
    open_ended = model.invoke(
        "Hello", chat_template_kwargs={"add_generation_prompt": False}, add_generation_prompt=False
    )
    assert report(open_ended)["prompt_tokens"] < report(plain)["prompt_tokens"]


@every_method
async def test_logprobs(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """An answer has log probabilities, and so have the joined chunks of a stream."""
    answer = await ask(model.bind(logprobs=True), "Hello", how)
    assert len(answer.response_metadata["logprobs"]["content"]) == 12


async def test_several_answers(engine: weft.Engine, model: ChatWeft) -> None:
    """With `n`, one call has several generations, and counts as one call in the process table."""
    ended = EndedPrograms(engine)
    warm = model.model_copy(update={"temperature": 1.0, "seed": 3})
    result = await warm.agenerate([[HumanMessage("Hello")]], callbacks=[ProgramCallbackHandler()], n=3)
    assert len({generation.text for generation in result.generations[0]}) == 3
    assert [row.calls for row in ended.rows] == [1]


async def test_conversation(engine: weft.Engine, model: ChatWeft) -> None:
    """Every kind of message reaches the chat template, including a message whose content is a list of blocks."""
    call: Any = {"name": "weather", "args": {"city": "Paris"}, "id": "call_1"}
    answer = await model.ainvoke(
        [
            SystemMessage("You look up the weather."),
            HumanMessage([{"type": "text", "text": "How is"}, {"type": "text", "text": " the weather in Paris?"}]),
            AIMessage("", tool_calls=[call]),
            ToolMessage("It is raining.", tool_call_id="call_1"),
            AIMessage("It is raining in Paris."),
            HumanMessage("And in London?"),
        ]
    )
    assert report(answer)["prompt_tokens"] > len(engine.tokenize("You look up the weather. It is raining in Paris."))


# -- tools


@pytest.mark.parametrize("how", ["ainvoke", "astream", "stream"])
@pytest.mark.parametrize("choice", ["any", "required", True])
async def test_some_tool(engine: weft.Engine, structured: ChatWeft, choice: str | bool, how: str) -> None:
    """The model must call one of the tools, with arguments that fit its schema, in a stream as well."""
    bound = structured.bind_tools([weather, ferry], tool_choice=choice, parallel_tool_calls=False)
    answer = await ask(bound, "Take me to Paris.", how)
    (call,) = answer.tool_calls
    ARGUMENTS[call["name"]].validate_python(call["args"], strict=True)
    assert call["id"]
    assert answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", ["weather", "ferry"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
async def test_named_tool(engine: weft.Engine, structured: ChatWeft, name: str, how: str) -> None:
    """The name of a tool, or OpenAI's form of it, makes the model call that tool."""
    openai: Any = {"type": "function", "function": {"name": name}}
    for choice in (name, openai):
        answer = await ask(structured.bind_tools([weather, ferry], tool_choice=choice), "Hello", how)
        (call,) = answer.tool_calls
        assert call["name"] == name
        ARGUMENTS[name].validate_python(call["args"], strict=True)


@pytest.mark.parametrize("choice", ["none", "auto", None])
@pytest.mark.parametrize("how", ["ainvoke", "astream"])
async def test_no_required_tool(engine: weft.Engine, structured: ChatWeft, choice: str | None, how: str) -> None:
    """If no tool call is required, the model may answer in words."""
    bound = structured.bind_tools([weather], tool_choice=choice)
    answer = await ask(bound, "Hello", how, max_tokens=12)
    assert answer.tool_calls == answer.invalid_tool_calls == []
    assert answer.text


async def test_tool_stream_in_pieces(engine: weft.Engine, structured: ChatWeft) -> None:
    """The pieces of a streamed tool call have one index, the name once, and arguments that join to JSON."""
    bound = structured.bind_tools([weather], tool_choice="weather")
    pieces = [piece async for chunk in bound.astream("Hello") for piece in chunk.tool_call_chunks]
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["name"] for piece in pieces if piece["name"]] == ["weather"]
    ARGUMENTS["weather"].validate_json("".join(piece["args"] or "" for piece in pieces), strict=True)


async def test_kinds_of_tools(engine: weft.Engine, structured: ChatWeft) -> None:
    """Functions, pydantic classes, TypedDicts and OpenAI's dictionaries can be tools."""

    def plain(city: City) -> str:
        """Look up a city."""
        return city

    openai = {"type": "function", "function": {"name": "by_dict", "parameters": WEATHER_SCHEMA}}
    for kind, name in ((plain, "plain"), (Weather, "Weather"), (WeatherDict, "WeatherDict"), (openai, "by_dict")):
        answer = structured.bind_tools([kind], tool_choice=name).invoke("Hello")  # type: ignore[list-item]
        assert [call["name"] for call in answer.tool_calls] == [name]
        assert answer.tool_calls[0]["args"]["city"] in ("Paris", "London")


@pytest.mark.parametrize("how", ["ainvoke", "astream"])
async def test_tool_call_cut_off(engine: weft.Engine, structured: ChatWeft, how: str) -> None:
    """A tool call that max_tokens cuts off has the finish reason "length", and is not a valid call."""
    bound = structured.bind_tools([weather], tool_choice="any").bind(max_tokens=18)
    answer = await ask(bound, "Hello", how)
    assert answer.response_metadata["finish_reason"] == "length"
    for call in answer.tool_calls:  # LangChain completes the JSON of a streamed call.
        with pytest.raises(ValidationError):
            ARGUMENTS["weather"].validate_python(call["args"], strict=True)
    assert how == "astream" or answer.tool_calls == []


# -- structured output


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Weather, WeatherDict, WEATHER_SCHEMA], ids=["pydantic", "TypedDict", "dict"])
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_structured_output(engine: weft.Engine, structured: ChatWeft, method: Any, schema: Any, how: str) -> None:
    """An answer has the form of its schema, for each kind of schema."""
    answer: Any = await ask(structured.with_structured_output(schema, method=method), "How is it in Paris?", how)
    if schema is Weather:
        assert isinstance(answer, Weather)
    else:
        TypeAdapter(WeatherDict).validate_python(answer, strict=True)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output_raw(engine: weft.Engine, structured: ChatWeft, method: Any) -> None:
    """With include_raw, the result contains the message, whose call belongs to the program."""
    async with weft.Program() as program:
        asked = structured.with_structured_output(Weather, method=method, include_raw=True)
        answer: Any = await asked.ainvoke("Hello", program.config())
    assert isinstance(answer["parsed"], Weather)
    assert answer["parsing_error"] is None
    assert report(answer["raw"])["program_id"] == program.program_id


async def test_structured_output_stream(engine: weft.Engine, structured: ChatWeft) -> None:
    """A stream yields growing dictionaries, and the last one is complete."""
    parts: list[Any] = [part async for part in structured.with_structured_output(WEATHER_SCHEMA).astream("Hello")]
    assert all(earlier.keys() <= later.keys() for earlier, later in pairwise(parts))
    TypeAdapter(WeatherDict).validate_python(parts[-1], strict=True)


async def test_json_mode(engine: weft.Engine, structured: ChatWeft) -> None:
    """json_mode gives JSON of any form. Pydantic rejects JSON that does not fit the schema."""
    (brace,) = engine.tokenize("}")
    empty = structured.model_copy(
        update={"model_kwargs": {"logit_bias": {**structured.model_kwargs["logit_bias"], str(brace): 100}}}
    )
    assert empty.with_structured_output(WEATHER_SCHEMA, method="json_mode").invoke("Hello") == {}
    with pytest.raises(OutputParserException, match="city"):
        await empty.with_structured_output(Weather, method="json_mode").ainvoke("Hello")


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Weather, WeatherDict, WEATHER_SCHEMA], ids=["pydantic", "TypedDict", "dict"])
async def test_structured_output_cut_off(engine: weft.Engine, structured: ChatWeft, method: Any, schema: Any) -> None:
    """An answer that max_tokens cuts off raises an error, and is never a partial answer."""
    asked = structured.model_copy(update={"max_tokens": 8})
    with pytest.raises(OutputParsingError, match="max_tokens"):
        await asked.with_structured_output(schema, method=method).ainvoke("Hello")
    raw = asked.with_structured_output(schema, method=method, include_raw=True).invoke("Hello")
    assert raw["parsed"] is None
    assert isinstance(raw["parsing_error"], OutputParsingError)
    assert raw["raw"].response_metadata["finish_reason"] == "length"


async def test_structured_stream_cut_off(engine: weft.Engine, structured: ChatWeft) -> None:
    """A stream of dictionaries that is cut off ends with the error."""
    asked = structured.model_copy(update={"max_tokens": 8}).with_structured_output(WEATHER_SCHEMA)
    with pytest.raises(OutputParsingError, match="max_tokens"):
        list(asked.stream("Hello"))


# -- the rest of LangChain's interface


async def test_token_counts(engine: weft.Engine, model: ChatWeft) -> None:
    """Tokens are counted by the engine's tokenizer, without a download."""
    assert model.get_num_tokens("The lighthouse keeper") == len(engine.tokenize("The lighthouse keeper")) > 0
    assert model.get_token_ids("fog") == engine.tokenize("fog")
    messages = [SystemMessage("You count."), HumanMessage("The lighthouse keeper")]
    assert model.get_num_tokens_from_messages(messages) > model.get_num_tokens("The lighthouse keeper")


@pytest.mark.parametrize("decorated", [True, False])
@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
async def test_cache(engine: weft.Engine, model: ChatWeft, how: str, decorated: bool) -> None:
    """LangChain's cache answers an identical call of any run and program, and no other call."""
    cached = model.model_copy(update={"cache": InMemoryCache()})

    async def call(question: str, **kwargs: Any) -> tuple[AIMessage, int]:
        ended = EndedPrograms(engine)
        with weft.Program() as program:
            config: Any = program.config() if decorated else {"callbacks": [ProgramCallbackHandler()]}
            answer = await ask(cached, question, how, config, **kwargs)
        return answer, sum(row.calls for row in ended.rows)

    first, calls = await call("Hello")
    assert calls == 1
    again, calls = await call("Hello")
    assert calls == 0
    assert again.text == first.text
    assert (await call("Hello there"))[1] == 1
    assert (await call("Hello", max_tokens=3))[1] == 1
    assert (await call("Hello", stop=["x"]))[1] == 1


async def test_repr(engine: weft.Engine, model: ChatWeft) -> None:
    """A model's repr and trace show its parameters, and neither the engine nor the identity of the run."""
    assert "engine" not in repr(model)
    assert "temperature=0" in repr(model)
    assert model.asdict() == {
        "_type": "weft",
        "model_name": engine.model,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
    }

    class Tracer(CallRecorder):
        """Records what LangChain passes to tracers."""

        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            traces.append(repr((serialized, kwargs["invocation_params"], kwargs["options"], kwargs["metadata"])))

    traces: list[str] = []
    with weft.Program() as program:
        for how in ("invoke", "ainvoke", "stream", "astream"):
            await ask(model, "Hello", how, program.config(callbacks=[Tracer()]))
    assert len(traces) == 4
    for text in traces:
        assert "_weft_run" not in text
        assert "weft.Engine" not in text
        assert "'ls_provider': 'weft'" in text
        assert "'max_tokens': 12" in text


async def test_model_dump(engine: weft.Engine, model: ChatWeft) -> None:
    """A model's JSON has no engine, and copies of a model share its engine."""
    assert "engine" not in json.loads(model.model_dump_json(exclude={"callbacks"}))
    assert model.model_copy(deep=False).engine is engine
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="length"))
    answer = configurable.invoke("Hello", {"configurable": {"length": 3}})
    assert report(answer)["output_tokens"] == 3


# -- errors


@every_method
async def test_context_length(engine: weft.Engine, model: ChatWeft, how: str) -> None:
    """A prompt that is too long raises ContextLengthError by every method. The error is a ValueError as well."""
    with pytest.raises(ContextLengthError, match="max_model_len") as caught:
        await ask(model, "fog " * engine.max_model_len, how)
    assert isinstance(caught.value, ValueError)
    await wait_until_idle(engine)


@every_method
@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 7}, {"max_tokens": "many"}, {"n": 0}, {"tools": "hammer"}, {"stop": 5}],
    ids=str,
)
async def test_invalid_request(engine: weft.Engine, model: ChatWeft, wrong: dict[str, Any], how: str) -> None:
    """The error for a wrong parameter names it, by every method."""
    with pytest.raises(InvalidRequestError) as caught:
        await ask(model.bind(**wrong), "Hello", how)
    assert next(iter(wrong)) in str(caught.value)
    await wait_until_idle(engine)


@every_method
@pytest.mark.parametrize("kind", ["model", "expression"])
async def test_program_has_ended(engine: weft.Engine, model: ChatWeft, how: str, kind: str) -> None:
    """A call after the end of its program raises an error that names the program, and does not reach the engine."""
    ended = EndedPrograms(engine)
    with weft.Program("over") as program:
        model.invoke("Hello", program.config())
    runnable = model if kind == "model" else model.bind(stop=["x"]) | (lambda message: message)
    with pytest.raises(ProgramEndedError, match="over"):
        await ask(runnable, "Hello", how, program.config())
    assert [row.calls for row in ended.rows] == [1]


async def test_errors_are_call_errors(engine: weft.Engine, model: ChatWeft) -> None:
    """LangChain's retries and fallbacks can select Weft's errors by type."""
    rejected = model.bind(max_tokens=1_000_000)
    answer = rejected.with_fallbacks([model], exceptions_to_handle=(CallError,)).invoke("Hello")
    assert report(answer)["output_tokens"] == 12
    ended = EndedPrograms(engine)
    with weft.Program() as program:
        retrying = rejected.with_retry(
            retry_if_exception_type=(CallError,), stop_after_attempt=3, wait_exponential_jitter=False
        )
        with pytest.raises(ContextLengthError):
            await retrying.ainvoke("Hello", program.config())
    assert [row.calls for row in ended.rows] == [3]
