"""`WeftChatCompletionClient`: AutoGen's model client on a Weft engine.

docs/explanation/threads.md explains how calls become a DAG.
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
from weft.core.program import Program, passed_on
from weft.engine.host.frontend import FrontEnd
from weft.integrations.arguments import check_engine, check_program
from weft.integrations.autogen.client_calls import (
    Binding,
    ClientConfigError,
    CreateCall,
    Usage,
    check_client_fields,
    takes_several_system_messages,
    until_cancelled,
)
from weft.integrations.autogen.messages import (
    ReasonedCalls,
    StreamedResponse,
    ToolChoice,
    check_complete,
    log_call,
    log_stream_end,
    log_stream_start,
    to_messages,
    to_response_format,
    to_result,
    to_tool_choice,
    to_tools,
)

_NONE: Mapping[str, Any] = MappingProxyType({})


class WeftChatCompletionClient(ChatCompletionClient):
    """AutoGen's model client on a `weft.Engine`. Clients are cheap to make and to bind.

    ::

        client = WeftChatCompletionClient(engine, temperature=0)
        planner = AssistantAgent("planner", client.bind(program, agent="planner"))

    Each call of an unbound client is a program of its own.

    Args:
        engine: The engine on which the calls run. It is shared, so `close` does not shut it down.
        temperature: The sampling temperature. None: the model's default.
        max_tokens: The maximum number of output tokens. None: as many as fit into the context.
        model_info: What AutoGen may ask of the model. None: tools, JSON and structured output, but no vision; several
            system messages if the chat template renders them.
        add_name_prefixes: Write "<source> said:" before each user message, since few chat templates show the source.
        **fields: Further fields of vLLM's chat request, such as `top_p`, `seed`, `parallel_tool_calls`,
            `structured_outputs` and `chat_template_kwargs`. `tool_choice` applies to calls whose own choice is "auto".

    Raises:
        InvalidRequestError: vLLM's chat request has no such field, or the client fills it in.
        ArgumentTypeError: `engine` is no engine.
    """

    component_type = "model"
    component_provider_override = "weft.integrations.autogen.WeftChatCompletionClient"

    def __init__(
        self,
        engine: FrontEnd,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        model_info: ModelInfo | None = None,
        add_name_prefixes: bool = False,
        **fields: Any,
    ) -> None:
        check_engine("WeftChatCompletionClient", engine)
        check_client_fields(fields)
        sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self.engine = engine
        self.binding: Binding | None = None
        self._fields = {**{name: value for name, value in sampling.items() if value is not None}, **fields}
        self._name_prefixes = add_name_prefixes
        self._usage = Usage()
        self._reasoned = ReasonedCalls()  # shared with the clients bound from this one
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
        """Return a copy of this client whose calls belong to a program and carry an agent's name.

        The copy counts its own usage. The usage of this client includes it.

        Raises:
            ArgumentTypeError: `program` is no program.
        """
        check_program("bind", program)
        bound = copy.copy(self)
        bound.binding = Binding(passed_on(program), agent)
        bound._usage = Usage(self._usage)  # noqa: SLF001  an object of this class
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
        """Generate one answer.

        Args:
            messages: The conversation so far.
            tools: The tools that the model may call.
            tool_choice: "auto" (the client's own `tool_choice`, if it has one), "required", "none" or one of `tools`.
            json_output: True: any JSON. A pydantic class: JSON of its schema. False: text.
            extra_create_args: Fields of vLLM's chat request for this call.
            cancellation_token: Cancelling it aborts the call in the engine, as cancelling the caller does.

        Raises:
            InvalidRequestError: The model does not take a field or a combination of fields.
            OutputParsingError: `max_tokens` cut off the requested JSON or a required tool call.
            CallError, ProgramError, EngineError: See `weft.core.errors`.
        """
        body = self._body(messages, tools, tool_choice, json_output, extra_create_args)
        with CreateCall(self.binding, messages) as call:
            answer = asyncio.ensure_future(self.engine.chat(body, call.program, call.identity))
            if cancellation_token is not None:
                cancellation_token.link_future(answer)
            response = await answer
            result = to_result(response, self._model_info["family"])
            self._reasoned.add(response)
            call.set_result(result)
        self._usage.add(result.usage)
        log_call(body, response, result)
        check_complete(body, response, result)
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
        """Yield pieces of text as they come, then the whole answer. Closing the stream aborts the call.

        The arguments and errors are those of `create`.
        """
        body = self._body(messages, tools, tool_choice, json_output, extra_create_args)
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        streamed = StreamedResponse()
        with CreateCall(self.binding, messages) as call:
            log_stream_start(body)
            stream = self.engine.chat_stream(body, call.program, call.identity)
            async with aclosing(stream), aclosing(until_cancelled(stream, cancellation_token)) as chunks:
                async for chunk in chunks:
                    if text := streamed.add(chunk):
                        yield text
            response = streamed.joined()
            result = to_result(response, self._model_info["family"])
            self._reasoned.add(response)
            call.set_result(result)
        self._usage.add(result.usage)
        log_stream_end(response, result)
        check_complete(body, response, result)
        yield result

    def _body(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema],
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra: Mapping[str, Any] = _NONE,
    ) -> dict[str, Any]:
        check_client_fields(extra)
        info = self._model_info
        body = {**self._fields, **extra}
        body["messages"] = to_messages(messages, info, self._reasoned, name_prefixes=self._name_prefixes)
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
        """Count the tokens of the prompt of these messages and tools, exactly and without a download."""
        return self.engine.count_prompt_tokens(self._body(messages, tools))

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = ()) -> int:
        """Return the number of tokens left in the model's context after the prompt; negative if it is too long."""
        return self.engine.max_model_len - self.count_tokens(messages, tools=tools)

    def actual_usage(self) -> RequestUsage:
        """Return the tokens of all calls so far, including those of the clients bound from this one."""
        return self._usage.total

    total_usage = actual_usage  # The two differ only for clients that cache answers.

    # -- AutoGen's component interface

    @property
    def capabilities(self) -> ModelInfo:  # AutoGen's deprecated name
        return self._model_info

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    async def close(self) -> None:
        """Do nothing, since the engine is shared."""

    def _to_config(self) -> NoReturn:
        raise ClientConfigError


def _require(info: ModelInfo, ability: str, argument: str) -> None:
    if not info[ability]:  # type: ignore[literal-required]
        raise InvalidRequestError(f"{argument} was given, but model_info[{ability!r}] is False.")
