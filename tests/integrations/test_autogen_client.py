"""AutoGen's client interface, method by method, on the session's engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest

pytest.importorskip("autogen_core", reason="the AutoGen extra is not installed")

from autogen_core import EVENT_LOGGER_NAME, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelInfo,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_parts import asked, babbling, calling, saying, terse
from pydantic import BaseModel

import weft
from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    InvalidRequestError,
    OutputParsingError,
    ProgramEndedError,
    ProgramEngineError,
    WeftError,
)
from weft.integrations.autogen import ClientConfigError, WeftChatCompletionClient

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


class Ship(BaseModel):
    """The form of a structured answer."""

    kind: Literal["sail", "steam"]
    sunk: bool


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"sun in {city}"


def tides(hour: Literal["noon", "midnight"]) -> str:
    """Tides at an hour."""
    return f"high at {hour}"


WEATHER, TIDES = FunctionTool(weather, description="Weather"), FunctionTool(tides, description="Tides")

CALL = FunctionCall(id="call-1", name="weather", arguments='{"city": "Paris"}')
RESULT = FunctionExecutionResult(content="sun in Paris", name="weather", call_id="call-1")
CONVERSATIONS: dict[str, list[LLMMessage]] = {
    "first": asked(),
    "no system": [UserMessage(content="Hello", source="ann")],
    "parts": [UserMessage(content=["Hello", "there"], source="ann")],
    "answered": [*asked(), AssistantMessage(content="In the west.", source="bob"), *asked("Why?")[1:]],
    "tools": [
        *asked(),
        AssistantMessage(content=[CALL], source="bob"),
        FunctionExecutionResultMessage(content=[RESULT, RESULT]),
    ],
    "thought": [*asked(), AssistantMessage(content=[CALL], thought="I look.", source="bob")],
    "broken": [
        *asked(),
        AssistantMessage(content=[FunctionCall(id="x", name="weather", arguments='{"ci')], source="b"),
    ],
    "systems": [*asked(), SystemMessage(content="Now be brief.")],
}


async def stream_answer(client: ChatCompletionClient, *args: Any, **kwargs: Any) -> tuple[list[str], CreateResult]:
    """The pieces and the result of a stream."""
    items = [item async for item in client.create_stream(*args, **kwargs)]
    assert isinstance(items[-1], CreateResult)
    pieces = [item for item in items[:-1] if isinstance(item, str)]
    assert len(pieces) == len(items) - 1
    return pieces, items[-1]


async def get_answer(client: ChatCompletionClient, way: str, *args: Any, **kwargs: Any) -> CreateResult:
    """The answer of `create` or of `create_stream`."""
    if way == "create":
        return await client.create(*args, **kwargs)
    return (await stream_answer(client, *args, **kwargs))[1]


both_ways = pytest.mark.parametrize("way", ["create", "stream"])


# -- answers


async def test_a_text(engine: weft.Engine) -> None:
    """An answer has a text, its usage and its finish reason. A stream gives the same in pieces."""
    client = babbling(engine)
    whole = await client.create(asked())
    assert isinstance(whole.content, str)
    assert (whole.finish_reason, whole.usage.completion_tokens, whole.cached) == ("length", 12, False)
    pieces, joined = await stream_answer(client, asked())
    assert "".join(pieces) == joined.content == whole.content
    assert joined == whole
    stopped = await saying(engine, "The end.").create(asked())
    assert (stopped.content, stopped.finish_reason) == ("The end.", "stop")


@both_ways
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [[], [WEATHER], [WEATHER.schema, TIDES]], ids=["none", "one", "two"])
async def test_tokens_are_counted_as_the_engine_does(
    engine: weft.Engine, conversation: str, tools: list[Any], way: str
) -> None:
    """`count_tokens` gives exactly the prompt tokens of the call, for all kinds of messages and tools."""
    client = babbling(engine, tokens=2, add_name_prefixes=way == "stream")
    messages = CONVERSATIONS[conversation]
    count = client.count_tokens(messages, tools=tools)
    assert count == (await get_answer(client, way, messages, tools=tools)).usage.prompt_tokens
    assert client.remaining_tokens(messages, tools=tools) == engine.max_model_len - count


async def test_tokens_of_a_prompt_that_is_too_long(engine: weft.Engine) -> None:
    """A prompt that is too long can be counted, and the remaining tokens are negative."""
    client = babbling(engine)
    messages = asked("again " * engine.max_model_len)
    assert client.count_tokens(messages) > engine.max_model_len
    assert client.remaining_tokens(messages) < 0
    with pytest.raises(ContextLengthError):
        await client.create(messages)


async def test_a_template_that_refuses(engine: weft.Engine) -> None:
    """Messages that the chat template refuses cannot be counted. The client finds out whether the template renders
    several system messages."""
    picky = "{% if messages | length > 2 %}{{ raise_exception('one system message') }}{% endif %}{{ messages }}"
    with pytest.raises(InvalidRequestError, match="one system message"):
        babbling(engine, chat_template=picky).count_tokens(CONVERSATIONS["answered"])
    for template, several in ((picky, False), ("{{ messages[0] }}", False), ("{{ messages }}", True)):
        assert babbling(engine, chat_template=template).model_info.get("multiple_system_messages") is several


@both_ways
async def test_required_tools(engine: weft.Engine, way: str) -> None:
    """The answer is a call of one of the tools, with arguments that fit its schema."""
    client = terse(engine, parallel_tool_calls=False)
    result = await get_answer(client, way, asked(), tools=[WEATHER, TIDES], tool_choice="required")
    assert result.finish_reason == "function_calls"
    (call,) = result.content
    assert isinstance(call, FunctionCall)
    assert call.id
    assert json.loads(call.arguments) in (
        [{"city": city} for city in ("Paris", "Rome")]
        if call.name == "weather"
        else [{"hour": hour} for hour in ("noon", "midnight")]
    )


@both_ways
@pytest.mark.parametrize("tool", [WEATHER, TIDES], ids=lambda tool: str(tool.name))
async def test_one_tool(engine: weft.Engine, tool: FunctionTool, way: str) -> None:
    """The answer calls the tool that `tool_choice` names."""
    result = await get_answer(terse(engine), way, asked(), tools=[WEATHER, TIDES], tool_choice=tool)
    assert {call.name for call in result.content if isinstance(call, FunctionCall)} == {tool.name}


@both_ways
async def test_several_calls_and_a_thought(engine: weft.Engine, way: str) -> None:
    """Under "auto", tool calls come in their order, each with an id, and the text before them is a thought."""
    client = calling(engine, ("tides", {"hour": "noon"}), ("weather", {"city": "Rome"}))
    result = await get_answer(client, way, asked(), tools=[WEATHER, TIDES])
    calls = [call for call in result.content if isinstance(call, FunctionCall)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("tides", {"hour": "noon"}),
        ("weather", {"city": "Rome"}),
    ]
    assert len({call.id for call in calls}) == 2
    assert (result.thought or "").strip() == "I ask."


@both_ways
async def test_no_tools(engine: weft.Engine, way: str) -> None:
    """tool_choice="none" leaves the text of a tool call as it is, and is allowed without tools."""
    client = calling(engine, ("tides", {"hour": "noon"}))
    for tools in ([TIDES], []):
        result = await get_answer(client, way, asked(), tools=tools, tool_choice="none")
        assert str(result.content).startswith("I ask.\n<tool_call>")


async def test_the_clients_own_tool_choice(engine: weft.Engine) -> None:
    """The client's tool_choice applies to calls without one of their own, and is ignored without tools."""
    client = terse(engine, tool_choice="required")
    assert (await client.create(asked(), tools=[WEATHER])).finish_reason == "function_calls"
    assert isinstance((await client.create(asked(), tools=[WEATHER], tool_choice="none")).content, str)
    assert isinstance((await client.create(asked())).content, str)


@both_ways
async def test_json(engine: weft.Engine, way: str) -> None:
    """`json_output` is True for any object, a class for its schema, or False for text where JSON is the default."""
    ship = await get_answer(terse(engine), way, asked(), json_output=Ship)
    Ship.model_validate_json(str(ship.content))
    some = await get_answer(saying_json(engine), way, asked(), json_output=True)
    assert isinstance(json.loads(str(some.content)), dict)
    default = babbling(engine, response_format={"type": "json_object"})
    assert not str((await get_answer(default, way, asked(), json_output=False)).content).startswith("{")


def saying_json(engine: weft.Engine) -> WeftChatCompletionClient:
    """A client that generates `{}`. Unconstrained, a random model would open a string and fill it without end."""
    tokenizer: Any = engine._llm.renderer.tokenizer
    bias = {str(tokenizer.encode(mark, add_special_tokens=False)[0]): 100 for mark in "{}"}
    return WeftChatCompletionClient(engine, temperature=0, max_tokens=60, logit_bias=bias)


@both_ways
async def test_json_with_tools(engine: weft.Engine, way: str) -> None:
    """With JSON and tools, the answer is complete JSON or a tool call."""
    result = await get_answer(terse(engine), way, asked(), tools=[WEATHER], json_output=Ship)
    if isinstance(result.content, str):
        Ship.model_validate_json(result.content)
    else:
        assert {call.name for call in result.content} == {"weather"}


@both_ways
async def test_cut_off(engine: weft.Engine, way: str) -> None:
    """JSON or a tool call that max_tokens cut off is an error. Its tokens count as usage."""
    client = terse(engine)
    few = {"extra_create_args": {"max_tokens": 3}}
    with pytest.raises(OutputParsingError, match="JSON was complete; allow more tokens"):
        await get_answer(client, way, asked(), json_output=Ship, **few)
    with pytest.raises(OutputParsingError, match="tool call was complete; allow more tokens"):
        await get_answer(client, way, asked(), tools=[WEATHER], tool_choice="required", **few)
    assert client.total_usage().completion_tokens == 6


async def test_log_probabilities(engine: weft.Engine) -> None:
    """Answers and streams have the log probability of each token, with alternatives."""
    client = babbling(engine, logprobs=True, top_logprobs=2)
    whole = await client.create(asked())
    assert whole.logprobs is not None
    assert len(whole.logprobs) == 12
    assert len(whole.logprobs[0].top_logprobs or ()) == 2
    _, joined = await stream_answer(client, asked())
    assert [token.token for token in joined.logprobs or ()] == [token.token for token in whole.logprobs]


# -- settings


async def test_settings_of_a_call(engine: weft.Engine) -> None:
    """For one call, `extra_create_args` override the client's settings."""
    client = babbling(engine)
    assert (await client.create(asked(), extra_create_args={"max_tokens": 3})).usage.completion_tokens == 3
    assert (await client.create(asked())).usage.completion_tokens == 12


@pytest.mark.parametrize("name", ["temprature", "messages", "stream", "n", "tools"])
async def test_unknown_settings(engine: weft.Engine, name: str) -> None:
    """An unknown or reserved setting raises an error that names it."""
    with pytest.raises(InvalidRequestError, match=name):
        WeftChatCompletionClient(engine, **{name: 1})
    with pytest.raises(InvalidRequestError, match=name):
        await babbling(engine).create(asked(), extra_create_args={name: 1})


@both_ways
@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 7}, {"max_tokens": "many"}, {"stop": 5}], ids=str)
async def test_settings_that_make_no_sense(engine: weft.Engine, wrong: dict[str, Any], way: str) -> None:
    """The error for a wrong value names the field."""
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        await get_answer(babbling(engine), way, asked(), extra_create_args=wrong)


async def test_abilities(engine: weft.Engine) -> None:
    """`model_info` has defaults. What it denies is rejected before the request reaches the engine."""
    client = babbling(engine)
    assert client.model_info == {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
        "multiple_system_messages": True,
    }
    assert client.capabilities == client.model_info
    info = ModelInfo(vision=False, function_calling=False, json_output=False, structured_output=False, family="llama")
    able = babbling(engine, model_info=info)
    assert able.model_info is info
    for wanted in ({"tools": [WEATHER]}, {"json_output": True}, {"json_output": Ship}):
        with pytest.raises(InvalidRequestError, match="model_info"):
            await able.create(asked(), **wanted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="family"):
        babbling(engine, model_info={"vision": False, "function_calling": False, "json_output": False})


@pytest.mark.filterwarnings("ignore:Internal module name:UserWarning")
async def test_no_configuration(engine: weft.Engine) -> None:
    """A client cannot be dumped, and the error says why. Closing a client does not close its engine."""
    client = babbling(engine)
    with pytest.raises(ClientConfigError, match="holds an engine") as caught:
        client.dump_component()
    assert isinstance(caught.value, WeftError | NotImplementedError)
    await client.close()
    assert (await client.create(asked())).content


# -- programs


async def test_usage(engine: weft.Engine) -> None:
    """A bound client counts its own tokens, and the client from which it was bound counts all of them."""
    client = babbling(engine)
    with weft.Program() as program:
        ann, bob = client.bind(program, agent="ann"), client.bind(program, agent="bob")
        await ann.create(asked())
        await stream_answer(bob, asked())
        await bob.create(asked("And the harbour?"))
        await client.create(asked())
    assert [each.total_usage().completion_tokens for each in (ann, bob, client)] == [12, 24, 48]
    assert client.actual_usage() == client.total_usage()
    assert isinstance(client.total_usage(), RequestUsage)
    row = program.row
    assert row is not None
    bound = [ann.total_usage(), bob.total_usage()]
    assert sum(usage.prompt_tokens for usage in bound) == row.account.prompt_tokens
    assert sum(usage.completion_tokens for usage in bound) == row.account.output_tokens


@both_ways
async def test_a_bound_client(engine: weft.Engine, way: str) -> None:
    """The calls of a bound client belong to its program, form a chain, and carry the agent's name. It keeps the
    settings of the client from which it was bound."""
    client = babbling(engine)
    with weft.Program("talk") as program:
        bound = client.bind(program, agent="ann")
        assert client.binding is None
        for text in ("Where?", "When?", "Why?"):
            assert (await get_answer(bound, way, asked(text))).usage.completion_tokens == 12
        calls = program.graph.calls
        assert program.row is not None
        assert program.row.calls == 3
        assert len(engine.table) == 1
    assert [call.label for call in calls] == ["ann"] * 3
    assert [[edge.parent for edge in call.parents] for call in calls] == [[], [calls[0].call_id], [calls[1].call_id]]
    assert {str(call.state) for call in calls} == {"finished"}
    with pytest.raises(ProgramEndedError, match="talk"):
        await get_answer(bound, way, asked())


@both_ways
async def test_an_unbound_client(engine: weft.Engine, way: str) -> None:
    """Each call of an unbound client is a program, which ends with the call, finished or failed."""
    client = babbling(engine)
    before = len(engine.table.ended())
    await get_answer(client, way, asked())
    with pytest.raises(ContextLengthError):
        await get_answer(client, way, asked("again " * engine.max_model_len))
    rows = engine.table.ended()[: len(engine.table.ended()) - before]
    assert [(row.info.name, str(row.state), row.calls) for row in rows] == [
        ("chat", "failed", 1),
        ("chat", "finished", 1),
    ]


async def test_another_engines_program(engine: weft.Engine) -> None:
    """A call of a program that runs on another engine is rejected."""

    class Other:
        """A backend of a program."""

        def start_session(self, info: Any) -> None: ...

        def end_session(self, program_id: Any, state: Any) -> None: ...

        def tool_started(self, program_id: Any, run: Any, tool: str) -> None: ...

        def tools_ended(self, program_id: Any, runs: Any) -> None: ...

        def call_announced(self, program_id: Any) -> None: ...

        def row(self, program_id: Any) -> None: ...

    with weft.Program() as program:
        program.reports.bind(Other())
        with pytest.raises(ProgramEngineError):
            await babbling(engine).bind(program).create(asked())


async def test_a_grammar_that_does_not_compile(engine: weft.Engine) -> None:
    """A failure inside the engine is an error of its call, and the next call succeeds."""
    client = babbling(engine)
    with pytest.raises((CallFailedError, InvalidRequestError)):
        await client.create(asked(), extra_create_args={"structured_outputs": {"regex": "("}})
    assert (await client.create(asked())).content


# -- AutoGen's event log


@pytest.fixture
def events() -> Iterator[list[Any]]:
    """The events that clients write to AutoGen's event logger."""
    recorded: list[Any] = []

    class EventRecorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            recorded.append(record.msg)

    logger, handler = logging.getLogger(EVENT_LOGGER_NAME), EventRecorder()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield recorded
    logger.removeHandler(handler)
    logger.setLevel(level)


async def test_event_log(engine: weft.Engine, events: list[Any]) -> None:
    """Clients log their calls as AutoGen's own clients do, as JSON, and add Weft's ids and account."""
    with weft.Program() as program:
        client = babbling(engine).bind(program, agent="ann")
        await client.create(asked(), tools=[WEATHER], tool_choice="none")
        await stream_answer(client, asked())
    whole, start, end = (json.loads(str(event)) for event in events)
    assert [event["type"] for event in (whole, start, end)] == ["LLMCall", "LLMStreamStart", "LLMStreamEnd"]
    assert whole["messages"][1]["content"] == start["messages"][1]["content"] == "Where is the lighthouse?"
    assert whole["tools"][0]["function"]["name"] == "weather"
    for event, call in zip((whole, end), program.graph.calls, strict=True):
        assert event["weft"]["call_id"] == call.call_id
        assert event["weft"]["program_id"] == program.program_id
        assert event["completion_tokens"] == event["weft"]["output_tokens"] == 12
