"""What LangChain's messages become in a request, and what becomes of the chunks of an answer, without an engine."""

from __future__ import annotations

import functools
from operator import add
from typing import Any

import jinja2
import pytest

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage

from weft.core.errors import InvalidRequestError
from weft.integrations.langchain import ChatWeft
from weft.integrations.langchain.messages import to_chunk, to_messages, to_result
from weft.testing import ScriptedEngine

# Renders the reasoning of answers after the last question of the user, as the templates of Qwen 3 and others do.
TEMPLATE = jinja2.Template(
    "{% set last = namespace(user=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning and loop.index0 > last.user %}<think>{{ m.reasoning }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or () %}<call>{{ call.function.name }}</call>{% endfor %}<|end|>"
    "{% endfor %}"
)
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
REPORT = {"call_id": "c-1", "service_s": 0.25}


def response(**message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
        "weft": REPORT,
    }


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    head = {"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return {**head, "weft": REPORT} if finish else head


def streamed(*chunks: dict[str, Any]) -> AIMessageChunk:
    """The message that LangChain makes of a stream."""
    whole = functools.reduce(add, map(to_chunk, chunks))
    message = whole.message
    assert isinstance(message, AIMessageChunk)
    return message


THINKING = {
    "whole": to_result(response(content=None, reasoning="I look.", tool_calls=[CALL])).generations[0].message,
    "streamed": streamed(
        chunk(reasoning="I "), chunk(reasoning="look."), chunk(tool_calls=[{"index": 0, **CALL}]), chunk("tool_calls")
    ),
    "blocks": AIMessage(
        content=[{"type": "reasoning", "reasoning": "I look."}],
        tool_calls=[{"id": "call-1", "name": "weather", "args": {"city": "Paris"}}],
    ),
}


@pytest.mark.parametrize("how", THINKING)
def test_the_prompt_of_the_next_call_in_a_tool_loop_begins_with_prompt_and_answer_of_the_last(how: str) -> None:
    """Models that think between tool calls need their reasoning, and the engine has these tokens in its cache."""
    question: list[BaseMessage] = [HumanMessage("Is it warm?")]
    engine = ScriptedEngine(["It is warm."])
    with engine:
        ChatWeft(engine=engine).invoke([*question, THINKING[how], ToolMessage("20 degrees", tool_call_id="call-1")])
    before = TEMPLATE.render(messages=to_messages(question)) + "<|assistant|>"
    answer = "<think>I look.</think><call>weather</call><|end|>"
    after = TEMPLATE.render(messages=engine.calls[0].body["messages"])
    assert after == f"{before}{answer}<|tool|>20 degrees<|end|>"


def test_an_answer_without_reasoning_has_no_field_for_it() -> None:
    """A template may render a reasoning that is empty as an empty thought."""
    assert all("reasoning" not in message for message in to_messages([HumanMessage("Hi"), AIMessage("Hello")]))


def test_finished_chunks_of_two_answers_add_up() -> None:
    """LangChain adds whatever chunks a chain yields; the reports stand side by side then."""
    with ScriptedEngine(["One", "Two"]) as engine:
        model = ChatWeft(engine=engine)
        both = functools.reduce(add, [*model.stream("Hi"), *model.stream("Hi")])
    assert both.content == "OneTwo"
    reports = both.response_metadata["weft"]
    assert len({report["call_id"] for report in reports}) == len(reports) == 2
    assert all(isinstance(report["service_s"], float) for report in reports)


async def ask(model: ChatWeft, how: str) -> None:
    if how == "astream":
        _ = [each async for each in model.astream("Hi")]
    elif how == "stream":
        _ = list(model.stream("Hi"))
    else:
        model.invoke("Hi")


@pytest.mark.parametrize("how", ["stream", "astream", "invoke"])
@pytest.mark.anyio
async def test_a_stream_of_several_choices_is_refused(how: str) -> None:
    """LangChain would join the pieces of all choices into one text."""
    with ScriptedEngine([]) as engine, pytest.raises(InvalidRequestError, match=r"n is 2.*generate"):
        await ask(ChatWeft(engine=engine, n=2, streaming=True), how)
    assert not engine.calls


def test_a_single_stop_string_is_taken_by_the_constructor_as_by_bind() -> None:
    """vLLM's chat request takes a text or a list of texts."""
    with ScriptedEngine(["a", "b", "c"]) as engine:
        ChatWeft(engine=engine, stop="X").invoke("Hi")
        ChatWeft(engine=engine, stop_sequences="X").invoke("Hi")
        ChatWeft(engine=engine).bind(stop="X").invoke("Hi")
    assert [call.body["stop"] for call in engine.calls] == ["X", "X", "X"]
