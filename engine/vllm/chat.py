"""vLLM's own chat endpoint in this process, without HTTP: templates, tool parsers, structured output and usage."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from pydantic import ValidationError

from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineStartError,
    InvalidRequestError,
    RetryableCallError,
    WeftError,
)
from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.engine.http.http_errors import is_too_long
from weft.engine.vllm_compat.logs import leave_out_expected_ends
from weft.engine.vllm_compat.names import (
    AsyncLLM,
    BaseModelPath,
    ChatCompletionRequest,
    EngineDeadError,
    ErrorResponse,
    GenerationError,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingModels,
    ToolParserManager,
    VLLMClientError,
)

# What vLLM's server answers with status 400. vLLM raises the built-in errors for, e.g., an image for a text model.
_CLIENTS: Final = (VLLMClientError, ValueError, TypeError, OverflowError)
_PROBLEM_CHARS: Final = 2000  # of an error's message, because vLLM's validators repeat the value


class ChatEndpoint:
    """OpenAI chat completions over an engine client. Use it on the engine's event loop.

    Args:
        llm: An `AsyncLLM`, or a router with its interface.
        failures: Weft's errors by call, which `llm` leaves here because vLLM's serving layer would turn them into text.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model_name: str,
        tool_call_parser: str | None,
        failures: dict[CallId, WeftError] | None = None,
    ) -> None:
        leave_out_expected_ends()
        self._llm = llm
        self._failures = failures if failures is not None else {}
        common: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": tool_call_parser is not None,
            "tool_parser": tool_call_parser,
            # "auto" would constrain only the envelope of a tool call, and its arguments should be valid, too.
            "tool_strict_level": "parameter",
        }
        models = OpenAIServingModels(llm, [BaseModelPath(name=model_name, model_path=model_name)])
        renderer = OnlineRenderer(model_config=llm.model_config, renderer=llm.renderer, **common)
        self._chat = OpenAIServingChat(
            llm,
            models,
            response_role="assistant",
            online_renderer=renderer,
            enable_prompt_tokens_details=True,
            **common,
        )

    @property
    def max_model_len(self) -> int:
        """The model's context length in tokens."""
        return int(self._llm.model_config.max_model_len)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises EngineError if the engine was started without a
        tokenizer."""
        tokenizer = self._llm.renderer.tokenizer
        if tokenizer is None:
            raise EngineError("this engine was started with skip_tokenizer_init; it has no tokenizer.")
        return list(tokenizer.encode(text, add_special_tokens=False))

    @staticmethod
    def make_request(
        body: dict[str, Any], program: Program | None = None, identity: CallIdentity | None = None
    ) -> ChatCompletionRequest:
        """Check a chat request in OpenAI's format. InvalidRequestError names each field that is malformed where vLLM
        does."""
        del program, identity  # the scheduler is told in `vllm_xargs`
        try:
            return ChatCompletionRequest(**body)
        except Exception as error:  # vLLM's validators read a body of any shape, and fail on some in other ways
            raise InvalidRequestError(f"the chat request is malformed: {_problem(error):.{_PROBLEM_CHARS}}") from None

    async def complete(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """One answer, as an OpenAI `chat.completion` object, or CallError or EngineDiedError."""
        response = await self._create(request)
        return dict(response.model_dump(exclude_none=True))

    async def count_prompt_tokens(self, request: ChatCompletionRequest) -> int:
        """The number of tokens of the rendered prompt. It need not fit the model's context. Raises
        InvalidRequestError if the chat template refuses the request."""
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        chat = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
        any_length = replace(request.build_tok_params(self._llm.model_config), max_total_tokens=None)
        try:
            _, (prompt,) = await self._llm.renderer.render_chat_async([request.messages], chat, any_length)
        except _CLIENTS as error:
            raise InvalidRequestError(f"the engine refused the request: {said(error)}") from None
        return len(prompt["prompt_token_ids"])

    async def stream(self, request: ChatCompletionRequest) -> AsyncGenerator[dict[str, Any]]:
        """The answer as OpenAI `chat.completion.chunk` objects, or CallError or EngineDiedError."""
        response = await self._create(request)
        async with aclosing(response) as lines:
            async for line in lines:
                data = line.removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise self._failure(request) or self._error(chunk["error"]["message"], chunk["error"].get("code"))
                yield chunk

    async def _create(self, request: ChatCompletionRequest) -> Any:
        """vLLM's response or stream, with its errors as Weft's."""
        try:
            response = await self._chat.create_chat_completion(request)
        except Exception as error:
            raise self._failure(request) or self._translate(error) from error
        if isinstance(response, ErrorResponse):
            failure = self._failure(request)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # vLLM answers a cancellation with an error response
                raise asyncio.CancelledError
            raise failure or self._error(response.error.message, response.error.code)
        return response

    def _died(self) -> EngineDiedError:
        return EngineDiedError(getattr(self._llm, "why_dead", ""), getattr(self._llm, "log", None))

    def _failure(self, request: ChatCompletionRequest) -> WeftError | None:
        return self._failures.pop(CallId(request.request_id), None)

    def _translate(self, error: Exception) -> WeftError:
        if isinstance(error, EngineDeadError) or self._llm.errored:
            return self._died()
        if isinstance(error, _CLIENTS):
            return self._error(said(error).split(" (parameter=")[0], 400)
        return call_failed(error)

    def _error(self, message: str, code: Any) -> WeftError:
        if self._llm.errored:
            return self._died()
        if is_too_long(message):
            return ContextLengthError(message)
        if isinstance(code, int) and 400 <= code < 500:
            return InvalidRequestError(f"the engine refused the request: {message}")
        return (RetryableCallError if code == 503 else CallFailedError)(f"the engine failed on this call: {message}")


def call_failed(error: Exception) -> CallFailedError:
    """vLLM's failure of a call. From 0.32 on it says of some that they may be sent again, by their HTTP status."""
    is_retryable = isinstance(error, GenerationError) and error.status_code == 503
    kind = RetryableCallError if is_retryable else CallFailedError
    return kind(f"the engine failed on this call: {type(error).__name__}: {said(error)}")


def _problem(error: Exception) -> str:
    """What vLLM's validators found wrong with a request."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in found)
    if isinstance(error, TypeError | ValueError | VLLMClientError):
        return said(error)
    return f"a field has a value of the wrong type ({said(error)}). Compare the fields with OpenAI's chat completions."


def said(error: Exception) -> str:
    """The error's text. vLLM's errors add the client's value when they are asked for it, which may fail."""
    try:
        return f"{error!s:.{_PROBLEM_CHARS}}"
    except Exception:  # the value is nested too deeply, has too many digits, or fails itself
        message = error.args[0] if error.args else None
        return f"{message:.{_PROBLEM_CHARS}}" if isinstance(message, str) else type(error).__name__


def check_tool_call_parser(name: str | None) -> None:
    """Raise EngineStartError unless vLLM has a parser of this name."""
    known = ToolParserManager.list_registered()
    if name is None or name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1)
    raise EngineStartError(
        f"tool_call_parser={name!r} is not one of vLLM's parsers{f' (did you mean {near[0]!r}?)' if near else ''}. "
        f"Give one of {', '.join(known)}, or None."
    )
