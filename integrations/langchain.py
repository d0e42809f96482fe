"""LangChain and LangGraph: a chat model on a Weft engine, and the callback handler that carries the program to it.

The handler sees the tree of runs, so it can say which program a call belongs to, which thread and which parents. How it
reaches the model on each of LangChain's paths is explained in docs/design.md.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, cast
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    BaseCallbackHandler,
    CallbackManagerForLLMRun,
)
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    UsageMetadata,
    convert_to_openai_messages,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import (
    BaseLLMOutputParser,
    JsonOutputKeyToolsParser,
    JsonOutputParser,
    PydanticOutputParser,
    PydanticToolsParser,
)
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough, ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.uuid import uuid7
from pydantic import BaseModel, ConfigDict, Field

from weft.core.errors import OutputParsingError
from weft.core.process_table import CallIdentity
from weft.core.program import Program, register_adapter
from weft.engine.engine import Engine

_SESSION_KEYS: Final = ("session_id", "conversation_id", "thread_id")  # as LangSmith reads them
_RUN: Final = "_weft_run"


class ProgramCallbackHandler(BaseCallbackHandler):
    """Carries a program through LangChain: `config={"callbacks": [ProgramCallbackHandler()]}`.

    Args:
        program: the program that all runs under it belong to, as `program.config()` sets it. None: each root run is a
            program of its own, named as the run, in the session that its metadata names (`session_id`,
            `conversation_id` or `thread_id`).
    """

    run_inline = True  # on the caller's thread and at once, so that parents are known before their children

    def __init__(self, program: Program | None = None) -> None:
        self.program = program
        self._lock = threading.Lock()
        self._programs: dict[UUID, Program] = {}  # of the runs under way, where each root is its own program

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramCallbackHandler:
        return self  # LangChain copies configs; the copy still carries the same program

    def start_call(self, run_id: UUID) -> tuple[Program, CallIdentity]:
        """Name the call that a model run makes.

        Raises:
            ProgramEndedError: the program has ended.
        """
        program = self._program_of(run_id) or self._open(run_id, None, "chat", None)
        return program, program.start_call(run_id)

    def _program_of(self, run_id: UUID | None) -> Program | None:
        if self.program is not None:
            return self.program
        with self._lock:
            return self._programs.get(run_id) if run_id is not None else None

    def _open(self, run_id: UUID, parent_run_id: UUID | None, name: str, metadata: dict[str, Any] | None) -> Program:
        program = self._program_of(parent_run_id)
        if program is None:
            session = next((metadata[key] for key in _SESSION_KEYS if metadata and metadata.get(key)), None)
            program = Program(name, session_id=str(session) if session is not None else None, metadata=metadata)
        if self.program is None:
            with self._lock:
                self._programs[run_id] = program
        return program

    def _start(self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        serialized = args[0] or {}
        name = kwargs.get("name") or serialized.get("name") or "program"
        self._open(run_id, parent_run_id, name, kwargs.get("metadata")).start_run(run_id, parent_run_id)

    def _end(self, *_args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, None)

    def _error(self, *args: Any, run_id: UUID, **_kwargs: Any) -> None:
        self.finish(run_id, args[0])

    def finish(self, run_id: UUID, error: BaseException | None) -> None:
        """A run ended; the last run of a program that was opened here ends the program. Finishing twice is harmless."""
        program = self._program_of(run_id)
        if program is None:
            return
        program.end_run(run_id)
        if self.program is None:
            with self._lock:
                self._programs.pop(run_id, None)
                ends = program not in self._programs.values()
            if ends:
                program.end_with(error)

    on_chain_start = on_tool_start = on_retriever_start = on_llm_start = on_chat_model_start = _start
    on_chain_end = on_tool_end = on_retriever_end = on_llm_end = _end
    on_chain_error = on_tool_error = on_retriever_error = on_llm_error = _error


register_adapter("langchain", ProgramCallbackHandler)


class _Run(NamedTuple):
    """Which run a model call is, handed from the public methods to the private ones."""

    handler: ProgramCallbackHandler
    run_id: UUID


class _Call:
    """One call of the model: opened when entered, and accounted to a program whatever happens inside."""

    def __init__(self, name: str, run: _Run | None) -> None:
        self._run = run
        if run is not None:
            self.program, self.identity = run.handler.start_call(run.run_id)
            self._key: Any = run.run_id
        else:  # no handler anywhere: the call is a program of its own
            self.program = Program(name)
            self._key = "call"
            self.identity = self.program.start_call(self._key)

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.program.end_call(self._key, self.identity)
        if self._run is None:
            self.program.end_with(error)
        elif error is not None and not isinstance(error, Exception):
            self._run.handler.finish(self._run.run_id, error)  # LangChain reports no end of a cancelled model run


class ChatWeft(BaseChatModel):
    """Chat model on a `weft.Engine`.

    ::

        model = ChatWeft(engine=engine, temperature=0)
        model.invoke("Hello", config=program.config())
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: Engine = Field(exclude=True, repr=False)
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's chat request, e.g. `top_k`, `repetition_penalty`, `chat_template_kwargs`."""

    @property
    def _llm_type(self) -> str:
        return "weft"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.engine.model, **self._defaults()}

    def _defaults(self) -> dict[str, Any]:
        fields = ("temperature", "max_tokens", "top_p", "seed", "stop")
        return {
            **{name: value for name in fields if (value := getattr(self, name)) is not None},
            **self.model_kwargs,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        return LangSmithParams(**{**params, "ls_provider": "weft", "ls_model_name": self.engine.model})

    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.tokenize(text)

    # -- identity: where LangChain streams, it calls `_stream` and `_astream` without saying which run it is

    def _with_run(self, config: RunnableConfig | None, kwargs: dict[str, Any]) -> tuple[RunnableConfig, dict[str, Any]]:
        config = ensure_config(config)
        handler = _find_handler(config.get("callbacks"), self.callbacks)
        if handler is None:
            return config, kwargs
        run_id = config.get("run_id") or uuid7()
        config["run_id"] = run_id
        return config, {**kwargs, _RUN: _Run(handler, run_id)}

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[_RUN] = _run_of(run_manager)  # it may stream, when a handler asks for tokens
        return super()._generate_with_cache(messages, stop, run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[_RUN] = _run_of(run_manager)
        return await super()._agenerate_with_cache(messages, stop, run_manager, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        config, kwargs = self._with_run(config, kwargs)
        yield from super().stream(input, config, stop=stop, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        config, kwargs = self._with_run(config, kwargs)
        async with aclosing(
            cast("AsyncGenerator[AIMessageChunk]", super().astream(input, config, stop=stop, **kwargs))
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop(_RUN, None)
        return {**super()._get_invocation_params(stop=stop, **kwargs), **self._defaults()}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        kwargs.pop(_RUN, None)
        return super()._get_llm_string(stop=stop, **kwargs)

    # -- the call itself

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._call(run_manager, kwargs) as call:
            return _result(self.engine.chat_sync(self._body(messages, stop, kwargs), call.program, call.identity))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._call(run_manager, kwargs) as call:
            return _result(await self.engine.chat(self._body(messages, stop, kwargs), call.program, call.identity))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._call(run_manager, kwargs) as call:
            body = self._body(messages, stop, kwargs, stream=True)
            for chunk in self.engine.chat_stream_sync(body, call.program, call.identity):
                yield _chunk(chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with self._call(run_manager, kwargs) as call:
            body = self._body(messages, stop, kwargs, stream=True)
            async with aclosing(self.engine.chat_stream(body, call.program, call.identity)) as chunks:
                async for chunk in chunks:
                    yield _chunk(chunk)

    def _call(self, run_manager: Any, kwargs: dict[str, Any]) -> _Call:
        run = kwargs.pop(_RUN, None)
        return _Call(self.name or "chat", run or _run_of(run_manager))

    def _body(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        *,
        stream: bool = False,
    ) -> dict[str, Any]:
        body = {**self._defaults(), **kwargs, "messages": convert_to_openai_messages(messages)}
        body.pop("stream", None)  # LangChain's own switch, already followed
        if stop is not None:
            body["stop"] = stop
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body

    # -- tools and structure

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: in any form that LangChain takes.
            tool_choice: "auto" (the model decides; needs the engine's `tool_call_parser`), "any", "required" or True
                (some tool, held by structured output), "none", or a tool's name.
            **kwargs: further fields of the request, e.g. `parallel_tool_calls=False` for at most one call an answer.
        """
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        if tool_choice in ("any", "required", True):
            kwargs["tool_choice"] = "required"
        elif isinstance(tool_choice, str) and tool_choice not in ("auto", "none"):
            kwargs["tool_choice"] = {"type": "function", "function": {"name": tool_choice}}
        elif tool_choice:
            kwargs["tool_choice"] = tool_choice
        return super().bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers in the form of `schema`, held to it by vLLM's structured output.

        Args:
            schema: a pydantic class, a TypedDict, a JSON schema or an OpenAI tool.
            include_raw: give `{"raw", "parsed", "parsing_error"}` and raise nothing.
            method: "json_schema" holds the answer to the schema; "function_calling" asks for one tool call of that
                form; "json_mode" holds it to be JSON only.

        Raises:
            OutputParsingError: (of the returned runnable) the answer was cut off by `max_tokens`.
        """
        kwargs.pop("strict", None)  # always
        is_pydantic = isinstance(schema, type) and issubclass(schema, BaseModel)
        json_schema = convert_to_json_schema(schema)
        kwargs["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": json_schema}
        model: Runnable[LanguageModelInput, AIMessage]
        parser: Any
        if method == "function_calling":
            model = self.bind_tools([schema], tool_choice="any", parallel_tool_calls=False, **kwargs)
            if is_pydantic:
                parser = _PydanticToolsParser(tools=[cast("Any", schema)], first_tool_only=True)
            else:
                key_name = convert_to_openai_tool(schema)["function"]["name"]
                parser = _JsonToolsParser(key_name=key_name, first_tool_only=True)
        else:
            response_format: dict[str, Any] = {"type": "json_object"}
            if method == "json_schema":
                response_format = {
                    "type": "json_schema",
                    "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema},
                }
            model = self.bind(response_format=response_format, **kwargs)
            parser = _PydanticParser(pydantic_object=cast("Any", schema)) if is_pydantic else _JsonParser()
        if not include_raw:
            return cast("Runnable[LanguageModelInput, dict[str, Any] | BaseModel]", model | parser)
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


class _Whole(BaseLLMOutputParser[Any]):
    """Refuses an answer that was cut off, where LangChain's parsers would make up the rest or give None."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = cast("ChatGeneration", result[0]).message
        if message.response_metadata.get("finish_reason") == "length" and not _is_json(message.text):
            raise OutputParsingError(
                "the answer was cut off by max_tokens before its structure was complete; allow more tokens. "
                f"It begins {message.text[:80]!r}."
            )
        return super().parse_result(result, partial=partial)  # type: ignore[safe-super]  # always mixed into a parser


class _JsonParser(_Whole, JsonOutputParser):
    pass


class _PydanticParser(_Whole, PydanticOutputParser[Any]):
    pass


class _JsonToolsParser(_Whole, JsonOutputKeyToolsParser):
    pass


class _PydanticToolsParser(_Whole, PydanticToolsParser):
    pass


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _find_handler(*sources: Any) -> ProgramCallbackHandler | None:
    """Our handler among callbacks, which are a list, a manager or None."""
    for source in sources:
        handlers = source.handlers if hasattr(source, "handlers") else source
        for handler in handlers or ():
            if isinstance(handler, ProgramCallbackHandler):
                return handler
    return None


def _run_of(run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None) -> _Run | None:
    handler = _find_handler(run_manager)
    return _Run(handler, run_manager.run_id) if run_manager is not None and handler is not None else None


def _usage(usage: dict[str, Any]) -> UsageMetadata:
    details = usage.get("prompt_tokens_details") or {}
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage.get("completion_tokens", 0),
        total_tokens=usage["total_tokens"],
        input_token_details={"cache_read": details.get("cached_tokens") or 0},
    )


def _result(response: dict[str, Any]) -> ChatResult:
    usage = _usage(response["usage"])
    generations = []
    for choice in response["choices"]:
        answer = choice["message"]
        tool_calls, invalid_tool_calls = [], []
        for raw in answer.get("tool_calls") or ():
            try:
                tool_calls.append(cast("Any", parse_tool_call(raw, return_id=True)))
            except Exception as error:  # not JSON: the agent may show it to the model
                invalid_tool_calls.append(make_invalid_tool_call(raw, str(error)))
        message = AIMessage(
            content=answer.get("content") or "",
            tool_calls=tool_calls,
            invalid_tool_calls=invalid_tool_calls,
            usage_metadata=usage,
            response_metadata=_metadata(response, choice),
            additional_kwargs=_reasoning(answer),
        )
        generations.append(
            ChatGeneration(message=message, generation_info={"finish_reason": choice.get("finish_reason")})
        )
    return ChatResult(generations=generations, llm_output={"token_usage": response["usage"]})


def _chunk(chunk: dict[str, Any]) -> ChatGenerationChunk:
    usage = _usage(chunk["usage"]) if chunk.get("usage") else None
    if not chunk["choices"]:
        return ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=usage))
    choice = chunk["choices"][0]
    delta = choice["delta"]
    message = AIMessageChunk(
        content=delta.get("content") or "",
        tool_call_chunks=[
            tool_call_chunk(
                name=(part.get("function") or {}).get("name"),
                args=(part.get("function") or {}).get("arguments"),
                id=part.get("id"),
                index=part.get("index"),
            )
            for part in delta.get("tool_calls") or ()
        ],
        usage_metadata=usage,
        additional_kwargs=_reasoning(delta),
    )
    info = _metadata(chunk, choice) if choice.get("finish_reason") else _logprobs(choice)
    return ChatGenerationChunk(message=message, generation_info=info)


def _metadata(response: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_provider": "weft",
        "model_name": response["model"],
        "finish_reason": choice.get("finish_reason"),
        "id": response["id"],
        "weft": response["weft"],
        **_logprobs(choice),
    }


def _logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {"reasoning_content": message["reasoning"]} if message.get("reasoning") else {}


__all__ = ["ChatWeft", "ProgramCallbackHandler"]
