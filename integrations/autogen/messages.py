"""Converts AutoGen's messages, tools and formats to OpenAI's format."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from autogen_core import EVENT_LOGGER_NAME, FunctionCall, Image
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionTokenLogprob,
    CreateResult,
    FinishReasons,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
    SystemMessage,
    TopLogprob,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from weft.core.errors import InvalidRequestError, OutputParsingError
from weft.core.locks import fork_safe
from weft.integrations.arguments import is_json

_KEPT: Final = 10_000  # tool calls, of conversations that go on
ToolChoice = Tool | Literal["auto", "required", "none"]


class ReasonedCalls:
    """The tool calls of answers whose thought was reasoning. Any thread may use it.

    AutoGen keeps one thought with tool calls: their reasoning, or the text before them. The chat template needs to know
    which one it is.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._lock = fork_safe(threading.Lock())

    def add(self, response: Mapping[str, Any]) -> None:
        """Take a whole answer, in OpenAI's format."""
        message = response["choices"][0]["message"]
        if not message.get("reasoning"):
            return
        with self._lock:
            self._ids.update(dict.fromkeys(call["id"] for call in message.get("tool_calls") or ()))
            while len(self._ids) > _KEPT:
                self._ids.popitem(last=False)

    def has(self, message: AssistantMessage) -> bool:
        """Whether the thought of a message is the model's reasoning. With text, it always is."""
        return isinstance(message.content, str) or any(call.id in self._ids for call in message.content)


def to_messages(
    messages: Sequence[LLMMessage], model_info: ModelInfo, reasoned: ReasonedCalls, *, name_prefixes: bool
) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format, with the reasoning of all answers, from which the chat template chooses.
    Raises InvalidRequestError if the model has no vision for an image, or its template cannot render the system
    messages."""
    if not model_info.get("multiple_system_messages"):
        messages = _one_system_message(messages)
    return [
        converted for message in messages for converted in _to_message(message, model_info, reasoned, name_prefixes)
    ]


def _one_system_message(messages: Sequence[LLMMessage]) -> list[LLMMessage]:
    """Join consecutive system messages into one, as AutoGen's own clients do."""
    indices = [index for index, message in enumerate(messages) if isinstance(message, SystemMessage)]
    if not indices:
        return list(messages)
    first, last = indices[0], indices[-1]
    if last - first >= len(indices):
        raise InvalidRequestError(
            "the model's chat template takes one system message, and there are other messages between the system "
            "messages. Send the later ones as user messages, or set multiple_system_messages=True in model_info."
        )
    text = "\n".join(str(messages[index].content) for index in indices)
    return [*messages[:first], SystemMessage(content=text), *messages[last + 1 :]]


def _to_message(
    message: LLMMessage, model_info: ModelInfo, reasoned: ReasonedCalls, name_prefixes: bool
) -> Iterator[dict[str, Any]]:
    if isinstance(message, SystemMessage):
        yield {"role": "system", "content": message.content}
    elif isinstance(message, UserMessage):
        prefix = f"{message.source} said:\n" if name_prefixes else ""
        yield {"role": "user", "name": message.source, "content": _user_content(message, prefix, model_info)}
    elif isinstance(message, FunctionExecutionResultMessage):
        for result in message.content:
            yield {"role": "tool", "tool_call_id": result.call_id, "name": result.name, "content": result.content}
    else:
        yield _to_assistant(message, is_reasoned=reasoned.has(message))


def _to_assistant(message: AssistantMessage, *, is_reasoned: bool) -> dict[str, Any]:
    reasoning = {"reasoning": message.thought} if message.thought and is_reasoned else {}
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content, **reasoning}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.content
    ]
    return {"role": "assistant", "content": None if reasoning else message.thought, **reasoning, "tool_calls": calls}


def _user_content(message: UserMessage, prefix: str, model_info: ModelInfo) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return prefix + message.content
    if not model_info["vision"] and any(isinstance(part, Image) for part in message.content):
        raise InvalidRequestError(
            "a message has an image, and the model takes none (model_info['vision'] is False). Remove the images, or "
            "give the client of a model with vision a model_info in which it is True."
        )
    texts = [prefix, *message.content] if prefix else message.content
    return [part.to_openai_format() if isinstance(part, Image) else {"type": "text", "text": part} for part in texts]


def to_tools(tools: Sequence[Tool | ToolSchema]) -> list[dict[str, Any]]:
    """Convert tools to OpenAI's format."""
    schemas = [tool.schema if isinstance(tool, Tool) else tool for tool in tools]
    return [
        {
            "type": "function",
            "function": {
                "name": schema["name"],
                "description": schema.get("description", ""),
                "parameters": schema.get("parameters", {}),
            },
        }
        for schema in schemas
    ]


def to_tool_choice(choice: ToolChoice, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Convert a tool choice to OpenAI's format. Raises InvalidRequestError if it is a tool that is not offered, or
    no choice of AutoGen's."""
    if isinstance(choice, str):
        if choice not in ("auto", "required", "none"):
            raise InvalidRequestError(f"tool_choice is 'auto', 'required', 'none' or a Tool, not {choice!r}.")
        return choice
    names = [tool["function"]["name"] for tool in tools]
    if choice.name not in names:
        raise InvalidRequestError(f"tool_choice names {choice.name!r}, which is not one of the offered tools {names}.")
    return {"type": "function", "function": {"name": choice.name}}


def to_response_format(json_output: bool | type[BaseModel]) -> dict[str, Any]:
    """Convert AutoGen's `json_output`, a bool or a class, to OpenAI's `response_format`."""
    if isinstance(json_output, bool):
        return {"type": "json_object" if json_output else "text"}
    if not isinstance(json_output, type):
        raise InvalidRequestError(f"json_output is True, False or a pydantic class, not {json_output!r}.")
    schema = {"name": json_output.__name__, "schema": json_output.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": schema}


# -- OpenAI's responses, whole or streamed, as AutoGen's results, and AutoGen's event log


_log = logging.getLogger(EVENT_LOGGER_NAME)

_FINISH_REASONS: Final[dict[str, FinishReasons]] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
}


def to_result(response: dict[str, Any], family: str) -> CreateResult:
    """Convert the first choice of an OpenAI response to AutoGen's result.

    Args:
        family: The model family. Models of the R1 family write their reasoning into the text, between think tags.
    """
    choice = response["choices"][0]
    message = choice["message"]
    text, thought = message.get("content") or "", message.get("reasoning")
    if thought is None and family == ModelFamily.R1 and "</think>" in text:
        before, _, text = text.partition("</think>")
        thought, text = before.partition("<think>")[2].strip(), text.strip()
    calls = [
        FunctionCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    usage = response["usage"]
    return CreateResult(
        finish_reason="function_calls" if calls else _FINISH_REASONS.get(choice.get("finish_reason"), "unknown"),
        content=calls or text,
        usage=RequestUsage(prompt_tokens=usage["prompt_tokens"], completion_tokens=usage.get("completion_tokens") or 0),
        cached=False,
        logprobs=_logprobs(choice),
        thought=(thought or text or None) if calls else thought,
    )


def _logprobs(choice: dict[str, Any]) -> list[ChatCompletionTokenLogprob] | None:
    tokens = (choice.get("logprobs") or {}).get("content")
    if not tokens:
        return None
    return [
        ChatCompletionTokenLogprob(
            token=token["token"],
            logprob=token["logprob"],
            top_logprobs=[TopLogprob(top["logprob"], top.get("bytes")) for top in token.get("top_logprobs") or ()],
            bytes=token.get("bytes"),
        )
        for token in tokens
    ]


def check_complete(body: dict[str, Any], response: dict[str, Any], result: CreateResult) -> None:
    """Raise OutputParsingError if `max_tokens` cut off JSON or a required tool call. An agent would take the rest for
    text."""
    if response["choices"][0].get("finish_reason") != "length":
        return
    must_call = body.get("tool_choice") not in (None, "auto", "none")
    must_be_json = (body.get("response_format") or {}).get("type") in ("json_object", "json_schema")
    if isinstance(result.content, str):
        is_complete = not must_call and (not must_be_json or is_json(result.content))
    else:
        is_complete = not must_call or all(is_json(call.arguments) for call in result.content)
    if not is_complete:
        raise OutputParsingError(
            f"the answer was cut off by max_tokens before its {'tool call' if must_call else 'JSON'} was complete; "
            f"allow more tokens. It begins {str(result.content)[:80]!r}."
        )


class StreamedResponse:
    """A response that is put together from the chunks of a stream."""

    def __init__(self) -> None:
        self._report: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []
        self._rest: dict[str, Any] = {"finish_reason": None}
        self._usage: dict[str, Any] = {}

    def add(self, chunk: dict[str, Any]) -> str:
        self._usage = chunk.get("usage") or self._usage
        self._report = chunk.get("weft", self._report)
        if not chunk["choices"]:
            return ""
        choice = chunk["choices"][0]
        delta = choice["delta"]
        self._rest["finish_reason"] = choice.get("finish_reason") or self._rest["finish_reason"]
        self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
        self._reasoning.append(delta.get("reasoning") or "")
        for part in delta.get("tool_calls") or ():
            call = self._calls.setdefault(part["index"], {"id": "", "function": {"name": "", "arguments": ""}})
            call["id"] += part.get("id") or ""
            for name, piece in (part.get("function") or {}).items():
                call["function"][name] = call["function"].get(name, "") + (piece or "")
        text: str = delta.get("content") or ""
        self._texts.append(text)
        return text

    def joined(self) -> dict[str, Any]:
        """Return the whole response, in OpenAI's format."""
        message = {
            "content": "".join(self._texts),
            "reasoning": "".join(self._reasoning) or None,
            "tool_calls": list(self._calls.values()),
        }
        choice = {**self._rest, "message": message, "logprobs": {"content": self._logprobs}}
        return {"choices": [choice], "usage": self._usage, "weft": self._report}


# -- AutoGen's event log, to which its own clients write their calls


def log_call(body: dict[str, Any], response: dict[str, Any], result: CreateResult) -> None:
    if _log.isEnabledFor(logging.INFO):
        fields = _event_fields(response, response, result)
        event = LLMCallEvent(messages=body["messages"], tools=body.get("tools", []), **fields)
        _log.info(event)


def log_stream_start(body: dict[str, Any]) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info(LLMStreamStartEvent(messages=body["messages"]))


def log_stream_end(response: dict[str, Any], result: CreateResult) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info(LLMStreamEndEvent(**_event_fields(result.model_dump(), response, result)))


def _event_fields(logged: dict[str, Any], response: dict[str, Any], result: CreateResult) -> dict[str, Any]:
    return {
        "response": logged,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "weft": response["weft"],  # ids and account of the call
    }
