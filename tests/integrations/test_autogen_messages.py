"""Conversions between AutoGen's messages and OpenAI's format, without an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

pytest.importorskip("autogen_core", reason="the AutoGen extra is not installed")

import PIL.Image
from autogen_core import FunctionCall, Image
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool, ToolSchema
from pydantic import BaseModel

import weft
from weft.core.errors import InvalidRequestError, OutputParsingError
from weft.integrations.autogen import WeftChatCompletionClient
from weft.integrations.autogen.messages import (
    ReasonedCalls,
    StreamedResponse,
    check_complete,
    to_messages,
    to_response_format,
    to_result,
    to_tool_choice,
    to_tools,
)
from weft.testing import Reply, ScriptedEngine

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    family=ModelFamily.UNKNOWN,
    multiple_system_messages=True,
)
CALL = FunctionCall(id="call-1", name="weather", arguments='{"city": "Paris"}')


def written(*messages: LLMMessage, name_prefixes: bool = False, **info: Any) -> list[dict[str, Any]]:
    return to_messages(messages, ModelInfo(**{**INFO, **info}), ReasonedCalls(), name_prefixes=name_prefixes)


def weather(city: str) -> str:
    """Weather of a city."""
    return f"sun in {city}"


# -- from AutoGen to OpenAI


def test_every_kind_of_message() -> None:
    """System, user and assistant messages, tool calls with and without a thought, and tool results are converted."""
    results = [
        FunctionExecutionResult(content="sun", name="weather", call_id="call-1"),
        FunctionExecutionResult(content="rain", name="weather", call_id="call-2", is_error=False),
    ]
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert written(
        SystemMessage(content="Be kind."),
        UserMessage(content="Hello", source="ann"),
        AssistantMessage(content="Hi", source="bob", thought="Greet."),
        AssistantMessage(content=[CALL], source="bob"),
        AssistantMessage(content=[CALL], source="bob", thought="I look."),
        FunctionExecutionResultMessage(content=results),
    ) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "name": "ann", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "reasoning": "Greet."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "name": "weather", "content": "sun"},
        {"role": "tool", "tool_call_id": "call-2", "name": "weather", "content": "rain"},
    ]


class Thinking(ScriptedEngine):
    """An engine with a model that thinks before each answer."""

    async def chat(self, body: Mapping[str, Any], *identity: Any) -> dict[str, Any]:
        answer = await super().chat(body, *identity)
        answer["choices"][0]["message"]["reasoning"] = "I think."
        return answer

    async def chat_stream(self, body: Mapping[str, Any], *identity: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": [{"index": 0, "delta": {"reasoning": "I think."}}]}
        async for each in super().chat_stream(body, *identity):
            yield each


@pytest.mark.anyio
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("kind", "sent"), [(Thinking, ("I think.", None)), (ScriptedEngine, (None, "I say."))], ids=["thinks", "says"]
)
async def test_reasoning_goes_back_as_reasoning_and_the_text_before_tool_calls_as_text(
    kind: type[ScriptedEngine], sent: tuple[str | None, str | None], streams: bool
) -> None:
    """AutoGen keeps both as a thought. A client remembers which one it was, also for the clients bound from it."""
    replies = [Reply("" if kind is Thinking else "I say.", [("weather", {"city": "Paris"})]), "done"]
    with kind(replies) as engine, weft.Program() as program:
        client = WeftChatCompletionClient(engine)
        asked = UserMessage(content="Is it warm?", source="ann")
        if streams:
            answer = [each async for each in client.bind(program).create_stream([asked])][-1]
        else:
            answer = await client.bind(program).create([asked])
        assert isinstance(answer, CreateResult)
        assert isinstance(answer.content, list)
        message = AssistantMessage(content=answer.content, source="bob", thought=answer.thought)
        await client.bind(program).create([asked, message])
    back = engine.calls[1].body["messages"][1]
    assert (back.get("reasoning"), back["content"]) == sent


def test_names_as_prefixes() -> None:
    """With `name_prefixes`, a user message of one text or of several begins with its source."""
    texts = UserMessage(content=["Hello", "there"], source="ann")
    assert written(UserMessage(content="Hello", source="ann"), name_prefixes=True)[0]["content"] == "ann said:\nHello"
    parts = [{"type": "text", "text": text} for text in ("ann said:\n", "Hello", "there")]
    assert written(texts, name_prefixes=True)[0]["content"] == parts
    assert written(texts)[0]["content"] == parts[1:]


def test_images_need_a_model_with_vision() -> None:
    """An image is rejected, unless model_info says that the model has vision."""
    message = UserMessage(content=["What is it?", Image(PIL.Image.new("RGB", (2, 2)))], source="ann")
    with pytest.raises(InvalidRequestError, match="vision"):
        written(message)
    text, image = written(message, vision=True)[0]["content"]
    assert (text["type"], image["type"]) == ("text", "image_url")
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


def test_system_messages_for_a_template_that_takes_one() -> None:
    """Consecutive system messages become one. Others are rejected with an error that says what to do."""
    user = UserMessage(content="Hello", source="ann")
    first, second = SystemMessage(content="Be kind."), SystemMessage(content="Be brief.")
    one = {"multiple_system_messages": False}
    assert written(first, second, user, **one)[0] == {"role": "system", "content": "Be kind.\nBe brief."}
    assert [message["role"] for message in written(user, first, second, **one)] == ["user", "system"]
    assert [message["role"] for message in written(user, **one)] == ["user"]
    with pytest.raises(InvalidRequestError, match="multiple_system_messages=True"):
        written(first, user, second, **one)
    assert len(written(first, user, second)) == 3


def test_tools_and_their_choice() -> None:
    """Tools and schemas are converted to OpenAI's form. A choice is a word or one of the tools."""
    tool = FunctionTool(weather, description="Weather")
    tools = to_tools([tool, ToolSchema(name="bare")])
    assert [each["function"]["name"] for each in tools] == ["weather", "bare"]
    assert tools[0]["function"]["parameters"]["properties"]["city"]["type"] == "string"
    assert tools[1]["function"] == {"name": "bare", "description": "", "parameters": {}}
    for word in ("auto", "required", "none"):
        assert to_tool_choice(word, tools) == word  # type: ignore[arg-type]
    assert to_tool_choice(tool, tools) == {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(InvalidRequestError, match=r"'weather'.*\['bare'\]"):
        to_tool_choice(tool, tools[1:])
    with pytest.raises(InvalidRequestError, match="'some'"):
        to_tool_choice("some", tools)  # type: ignore[arg-type]


def test_response_formats() -> None:
    """`json_output` is True, False or a class, whose schema is sent."""

    class City(BaseModel):
        name: str

    assert to_response_format(True) == {"type": "json_object"}
    assert to_response_format(False) == {"type": "text"}
    schema = to_response_format(City)["json_schema"]
    assert schema == {"name": "City", "schema": City.model_json_schema(), "strict": True}
    with pytest.raises(InvalidRequestError, match="'City'"):
        to_response_format("City")  # type: ignore[arg-type]


# -- from OpenAI to AutoGen


def response(finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"finish_reason": finish_reason, "message": {"role": "assistant", **message}}
    return {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


def tool_calls(*arguments: str) -> list[dict[str, Any]]:
    return [
        {"id": f"call-{n}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for n, each in enumerate(arguments, 1)
    ]


def test_text_and_why_it_ended() -> None:
    """A result has the text, its usage, and AutoGen's name of the finish reason."""
    result = to_result(response("stop", content="Hi"), "unknown")
    assert (result.content, result.finish_reason, result.thought, result.cached) == ("Hi", "stop", None, False)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 2)
    reasons = [to_result(response(reason, content="Hi"), "unknown").finish_reason for reason in ("length", "abort")]
    assert reasons == ["length", "unknown"]
    assert to_result(response(content=None), "unknown").content == ""


@pytest.mark.parametrize("reason", ["tool_calls", "stop", "length"])
def test_tool_calls(reason: str) -> None:
    """Tool calls are function calls whatever the finish reason is, and their text is a thought."""
    result = to_result(response(reason, content="I look.", tool_calls=tool_calls('{"city": "Paris"}')), "unknown")
    assert (result.content, result.finish_reason, result.thought) == ([CALL], "function_calls", "I look.")
    assert to_result(response(content="", tool_calls=tool_calls("{}")), "unknown").thought is None


def test_thoughts() -> None:
    """Reasoning is a thought, whether vLLM parsed it or an R1 model wrote it into its text."""
    assert to_result(response(content="Hi", reasoning="Greet."), "unknown").thought == "Greet."
    r1 = to_result(response(content="<think>Greet.</think>\nHi"), ModelFamily.R1)
    assert (r1.thought, r1.content) == ("Greet.", "Hi")
    other = to_result(response(content="<think>Greet.</think>\nHi"), "unknown")
    assert (other.thought, other.content) == (None, "<think>Greet.</think>\nHi")


def test_log_probabilities() -> None:
    """Log probabilities are converted with their alternatives."""
    whole = response(content="Hi")
    top = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}, {"token": "Ho", "logprob": -1.5}]
    whole["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    (token,) = to_result(whole, "unknown").logprobs or ()
    assert (token.token, token.logprob, token.bytes) == ("Hi", -0.5, [72, 105])
    assert [each.logprob for each in token.top_logprobs or ()] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("body", "answer", "is_complete"),
    [
        ({}, {"content": "Once upon"}, True),
        ({"response_format": {"type": "text"}}, {"content": "Once upon"}, True),
        ({"response_format": {"type": "json_object"}}, {"content": '{"a": 1}'}, True),
        ({"response_format": {"type": "json_object"}}, {"content": '{"a": '}, False),
        ({"response_format": {"type": "json_schema"}}, {"content": '{"a": '}, False),
        ({"response_format": {"type": "json_schema"}}, {"tool_calls": tool_calls("{}")}, True),
        ({"tool_choice": "auto"}, {"content": "Once upon"}, True),
        ({"tool_choice": "none"}, {"content": "Once upon"}, True),
        ({"tool_choice": "required"}, {"content": "<tool_call>"}, False),
        ({"tool_choice": {"type": "function"}}, {"tool_calls": tool_calls("{}", '{"city": "Pa')}, False),
        ({"tool_choice": "required"}, {"tool_calls": tool_calls("{}")}, True),
    ],
    ids=str,
)
def test_cut_off_answers(body: dict[str, Any], answer: dict[str, Any], is_complete: bool) -> None:
    """A text may be cut off. Requested JSON and a required tool call may not."""
    for reason in ("stop", "length"):
        whole = response(reason, **answer)
        if reason == "stop" or is_complete:
            check_complete(body, whole, to_result(whole, "unknown"))
        else:
            with pytest.raises(OutputParsingError, match="max_tokens"):
                check_complete(body, whole, to_result(whole, "unknown"))


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_a_streamed_text() -> None:
    """Adding a chunk returns its text, and all chunks together make the response."""
    streamed = StreamedResponse()
    stream = [chunk(role="assistant", content=""), chunk(content="Hello"), chunk(content=" you"), chunk("stop")]
    stream[-1]["weft"] = {"call_id": "c"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    assert [streamed.add(each) for each in [*stream, {"choices": [], "usage": usage}]] == ["", "Hello", " you", "", ""]
    result = to_result(streamed.joined(), "unknown")
    assert (result.content, result.finish_reason, result.usage.prompt_tokens) == ("Hello you", "stop", 3)
    assert (streamed.joined()["weft"], result.logprobs) == ({"call_id": "c"}, None)


def test_streamed_tool_calls() -> None:
    """Two tool calls, one after the other, have arguments that come in pieces."""
    streamed = StreamedResponse()
    for index, city in enumerate(("Paris", "Rome")):
        opening = {"index": index, "id": f"call-{index}", "type": "function", "function": {"name": "weather"}}
        streamed.add(chunk(tool_calls=[opening]))
        for part in ('{"city": ', f'"{city}"', "}"):
            streamed.add(chunk(tool_calls=[{"index": index, "function": {"arguments": part}}]))
    streamed.add({**chunk("tool_calls"), "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    result = to_result(streamed.joined(), "unknown")
    assert [
        (call.id, call.name, json.loads(call.arguments)) for call in result.content if not isinstance(call, str)
    ] == [("call-0", "weather", {"city": "Paris"}), ("call-1", "weather", {"city": "Rome"})]
