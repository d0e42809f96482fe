"""Converts AutoGen's messages, tools and formats to OpenAI's format."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from autogen_core import Image
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResultMessage,
    LLMMessage,
    ModelInfo,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from weft.core.errors import InvalidRequestError
from weft.core.locks import fork_safe

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
