"""AutoGen: a chat completion client on a Weft engine, bound to a program and an agent, and whole teams bound at once.

AutoGen runs agents in its runtime's own tasks, so nothing ambient says which program a call belongs to: the client that
an agent holds does. How calls become a DAG is explained in docs/design.md.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, NoReturn

from autogen_core import CancellationToken
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
    validate_model_info,
)
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from weft.core.errors import InvalidRequestError
from weft.core.program import Program
from weft.engine.engine import Engine
from weft.integrations.autogen.calls import (
    Binding,
    Call,
    ClientConfigError,
    Usage,
    check_fields,
    takes_several_system_messages,
    until_cancelled,
)
from weft.integrations.autogen.messages import (
    ToolChoice,
    to_messages,
    to_response_format,
    to_tool_choice,
    to_tools,
)
from weft.integrations.autogen.results import (
    Pieces,
    check_whole,
    tell_of_call,
    tell_of_stream,
    tell_of_stream_end,
    to_result,
)

_NONE: Mapping[str, Any] = MappingProxyType({})


class WeftChatCompletionClient(ChatCompletionClient):
    """AutoGen's model client on a `weft.Engine`. It is cheap, and so is a bound one.

    ::

        client = WeftChatCompletionClient(engine, temperature=0)
        planner = AssistantAgent("planner", client.bind(program, agent="planner"))

    An unbound client makes each call a program of its own.

    Args:
        engine: where the calls run. It is shared: `close` leaves it alone.
        temperature: of sampling; None: the model's own.
        max_tokens: the longest answer; None: what the context has room for.
        model_info: what AutoGen may ask of the model; None: tools, JSON and structured output but no vision, and
            several system messages if the chat template renders them.
        add_name_prefixes: write "<source> said:" before each user message, since few chat templates show who speaks.
        **fields: further fields of vLLM's chat request, e.g. `top_p`, `seed`, `parallel_tool_calls`, `tool_choice`
            (for calls whose own is "auto"), `structured_outputs`, `chat_template_kwargs`.

    Raises:
        InvalidRequestError: vLLM's chat request has no such field.
    """

    component_type = "model"
    component_provider_override = "weft.integrations.autogen.WeftChatCompletionClient"

    def __init__(
        self,
        engine: Engine,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        model_info: ModelInfo | None = None,
        add_name_prefixes: bool = False,
        **fields: Any,
    ) -> None:
        check_fields(fields)
        given = {"temperature": temperature, "max_tokens": max_tokens}
        self.engine = engine
        self.binding: Binding | None = None
        self._fields = {**{name: value for name, value in given.items() if value is not None}, **fields}
        self._name_prefixes = add_name_prefixes
        self._usage = Usage()
        self._model_info = model_info or ModelInfo(
            vision=False,
            function_calling=True,
            json_output=True,
            structured_output=True,
            family=ModelFamily.UNKNOWN,
            multiple_system_messages=takes_several_system_messages(engine, fields),
        )
        validate_model_info(self._model_info)

    def bind(self, program: Program, *, agent: str | None = None) -> WeftChatCompletionClient:
        """This client for one agent of one program: its calls are the program's, under the agent's name.

        Its usage is its own; this client's total includes it.
        """
        bound = copy.copy(self)
        bound.binding = Binding(program, agent)
        bound._usage = Usage(self._usage)  # noqa: SLF001  its own class
        return bound

    # -- calls

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = (),
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = _NONE,
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """One answer.

        Args:
            messages: the conversation so far.
            tools: what the model may call.
            tool_choice: "auto" (the client's own `tool_choice`, if it has one), "required", "none" or one of `tools`.
            json_output: True: any JSON; a pydantic class: JSON of that form; False: text.
            extra_create_args: fields of vLLM's chat request for this call.
            cancellation_token: cancelling it aborts the call in the engine, as cancelling the caller does.

        Raises:
            InvalidRequestError: a field or combination that the model does not take.
            OutputParsingError: `max_tokens` cut off JSON that was asked for, or a tool call that had to be made.
            CallError, ProgramError, EngineError: see `weft.core.errors`.
        """
        body = self._body(messages, tools, tool_choice, json_output, extra_create_args)
        with Call(self.binding, messages) as call:
            answer = asyncio.ensure_future(self.engine.chat(body, call.program, call.identity))
            if cancellation_token is not None:
                cancellation_token.link_future(answer)
            response = await answer
            result = to_result(response, self._model_info["family"])
            call.gave(result)
        self._usage.add(result.usage)
        tell_of_call(body, response, result)
        check_whole(body, response, result)
        return result

    async def create_stream(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = (),
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = _NONE,
        cancellation_token: CancellationToken | None = None,
    ) -> AsyncGenerator[str | CreateResult, None]:
        """The pieces of text as they come, then the whole answer; otherwise as `create`. Closing it aborts the call."""
        body = self._body(messages, tools, tool_choice, json_output, extra_create_args)
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        pieces = Pieces()
        with Call(self.binding, messages) as call:
            tell_of_stream(body)
            stream = self.engine.chat_stream(body, call.program, call.identity)
            async with aclosing(stream), aclosing(until_cancelled(stream, cancellation_token)) as chunks:
                async for chunk in chunks:
                    if text := pieces.add(chunk):
                        yield text
            response = pieces.joined()
            result = to_result(response, self._model_info["family"])
            call.gave(result)
        self._usage.add(result.usage)
        tell_of_stream_end(response, result)
        check_whole(body, response, result)
        yield result

    def _body(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema],
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra: Mapping[str, Any] = _NONE,
    ) -> dict[str, Any]:
        check_fields(extra)
        info = self._model_info
        body = {**self._fields, **extra}
        body["messages"] = to_messages(messages, info, name_prefixes=self._name_prefixes)
        own_choice = body.pop("tool_choice", "auto")
        if tools:
            _require(info, "function_calling", "tools")
            body["tools"] = to_tools(tools)
            body["tool_choice"] = own_choice if tool_choice == "auto" else to_tool_choice(tool_choice, body["tools"])
        if json_output is not None:
            if json_output:
                _require(info, "json_output" if json_output is True else "structured_output", f"{json_output=}")
            body["response_format"] = to_response_format(json_output)
        return body

    # -- tokens

    def count_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = ()) -> int:
        """Tokens of the prompt that these messages and tools make, exactly; nothing is downloaded."""
        return self.engine.count_prompt_tokens(self._body(messages, tools))

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = ()) -> int:
        """Tokens that the model's context still has room for, negative if the prompt is too long."""
        return self.engine.max_model_len - self.count_tokens(messages, tools=tools)

    def actual_usage(self) -> RequestUsage:
        """Tokens of this client's calls so far, those of the clients bound from it included."""
        return self._usage.total

    total_usage = actual_usage  # nothing here answers from a cache of answers

    # -- what AutoGen asks of a component

    @property
    def capabilities(self) -> ModelInfo:  # AutoGen's deprecated name
        return self._model_info

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    async def close(self) -> None:
        """Nothing: the engine is shared."""

    def _to_config(self) -> NoReturn:
        raise ClientConfigError


def _require(info: ModelInfo, ability: str, argument: str) -> None:
    if not info[ability]:  # type: ignore[literal-required]
        raise InvalidRequestError(f"{argument} was given, and model_info says that the model has no {ability}.")
