"""`ChatWeft`: a LangChain chat model on a Weft engine."""

from __future__ import annotations

import difflib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableMap, RunnablePassthrough, ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field

from weft.core.errors import InvalidRequestError
from weft.engine.host.frontend import FrontEnd
from weft.engine.vllm_compat.known_names import CHAT_FIELDS, FILLED_IN, check_fields
from weft.integrations.arguments import check_engine
from weft.integrations.langchain.handler import RUN_KWARG, LangChainRun, ModelCall, find_handler, run_of
from weft.integrations.langchain.messages import (
    WholeJsonParser,
    WholeJsonToolsParser,
    WholePydanticParser,
    WholePydanticToolsParser,
    to_chunk,
    to_messages,
    to_result,
)

try:
    from langchain_core.utils.uuid import uuid7  # as LangSmith asks; older ones have none, and use uuid4 themselves
except ImportError:
    from uuid import uuid4 as uuid7  # type: ignore[assignment]  # it takes no time


class ChatWeft(BaseChatModel):
    """A LangChain chat model on a `weft.Engine`.

    ::

        model = ChatWeft(engine=engine, temperature=0)
        model.invoke("Hello", config=program.config())

    Further fields of vLLM's chat request, such as `top_k` and `chat_template_kwargs`, are given in the same way, and to
    single calls as well: `model.invoke("Hello", top_k=5)`. LangChain's other names for fields are known, too:
    `max_completion_tokens`, `stop_sequences`, `model_name` and `request_timeout`. Of the parameters that all models
    of LangChain take, `api_key` and `max_retries` have no effect: no key is needed, and `with_retry` repeats calls.

    Raises:
        InvalidRequestError: A field is not known. The message names the field that is spelt most like it.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    engine: FrontEnd = Field(exclude=True, repr=False)
    model: str | None = None
    """One of the models that the engine serves; None: the first."""
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    timeout: float | None = None
    """Seconds that a call may take, its time in the queue included; None: the engine's `call_timeout_s`."""
    streaming: bool = False
    """Whether `invoke` and `ainvoke` stream, too, for callbacks that take tokens as they come."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's chat request."""

    if not TYPE_CHECKING:  # type checkers read the fields above

        def __init__(self, **fields: Any) -> None:
            if "engine" in fields:
                check_engine("ChatWeft", fields["engine"])
            super().__init__(**_constructor_fields(fields, type(self).model_fields))

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The public path of the class, which LangChain writes into traces."""
        return ["weft", "integrations", "langchain"]

    @property
    def _llm_type(self) -> str:
        return "weft"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.engine.model, **self._defaults()}

    def _defaults(self) -> dict[str, Any]:
        fields = ("model", "temperature", "max_tokens", "top_p", "seed", "stop", "timeout")
        given = {name: value for name in fields if (value := getattr(self, name)) is not None}
        return {**request_fields(given), **self.model_kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        model = kwargs.get("model") or self.model or self.engine.model
        return LangSmithParams(**{**params, "ls_provider": "weft", "ls_model_name": model})

    def get_token_ids(self, text: str) -> list[int]:
        return self.engine.tokenize(text)

    # -- identity: some of LangChain's paths call `_stream` and `_astream` without a run, so `kwargs` carry the run

    def _with_run(self, config: RunnableConfig | None, kwargs: dict[str, Any]) -> tuple[RunnableConfig, dict[str, Any]]:
        """Choose the id of the run that LangChain is about to start, and add the run to `kwargs`."""
        config = ensure_config(config)
        handler = find_handler(config.get("callbacks"), self.callbacks)
        if handler is None:
            return config, kwargs
        run_id = config.get("run_id") or uuid7()
        config["run_id"] = run_id
        return config, {**kwargs, RUN_KWARG: LangChainRun(handler, run_id)}

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[RUN_KWARG] = run_of(run_manager)  # LangChain streams here if a handler asks for tokens.
        return super()._generate_with_cache(messages, stop, run_manager, **kwargs)

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        kwargs[RUN_KWARG] = run_of(run_manager)
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
        kwargs.pop(RUN_KWARG, None)
        params = super()._get_invocation_params(stop=stop, **kwargs)
        return params if stop is not None or self.stop is None else {**params, "stop": self.stop}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        kwargs.pop(RUN_KWARG, None)
        return super()._get_llm_string(stop=stop, **kwargs)

    # -- the call itself

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._call(run_manager, kwargs, messages) as call:
            response = self.engine.chat_sync(self._body(messages, stop, kwargs), call.program, call.identity)
            return to_result(call.answer.add(response))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with self._call(run_manager, kwargs, messages) as call:
            response = await self.engine.chat(self._body(messages, stop, kwargs), call.program, call.identity)
            return to_result(call.answer.add(response))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._call(run_manager, kwargs, messages) as call:
            body = self._body(messages, stop, kwargs, stream=True)
            for chunk in self.engine.chat_stream_sync(body, call.program, call.identity):
                yield to_chunk(call.answer.add(chunk))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with self._call(run_manager, kwargs, messages) as call:
            body = self._body(messages, stop, kwargs, stream=True)
            async with aclosing(self.engine.chat_stream(body, call.program, call.identity)) as chunks:
                async for chunk in chunks:
                    yield to_chunk(call.answer.add(chunk))

    def _call(self, run_manager: Any, kwargs: dict[str, Any], messages: list[BaseMessage]) -> ModelCall:
        run = kwargs.pop(RUN_KWARG, None)
        return ModelCall(self.name or "", run or run_of(run_manager), messages)

    def _body(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, stream: bool = False
    ) -> dict[str, Any]:
        body = {**self._defaults(), **request_fields(kwargs), "messages": to_messages(messages)}
        if stop is not None:
            body["stop"] = stop
        if stream:
            _check_one_answer(body.get("n"))
            body["stream_options"] = {"include_usage": True}
        return body

    # -- tools and structure

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: The tools, in any form that LangChain takes.
            tool_choice: "auto" (the model decides; needs the engine's `tool_call_parser`), "any", "required" or True
                (some tool, enforced by structured output), "none", or the name of a tool.
            strict: Whether the model must keep to the tools' schemas, as OpenAI's field of a function.
            **kwargs: Further fields of the request, such as `parallel_tool_calls=False` for at most one tool call an
                answer.
        """
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
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
        """Return a runnable whose answers have the form of `schema`, which vLLM's structured output enforces.

        Args:
            schema: A pydantic class, a TypedDict, a JSON schema or an OpenAI tool.
            include_raw: Return `{"raw", "parsed", "parsing_error"}`, and raise no parsing error.
            method: "json_schema" enforces the schema; "function_calling" enforces one tool call with arguments of the
                schema; "json_mode" enforces JSON of any form.

        Raises:
            InvalidRequestError: There is no such method.
            OutputParsingError: (raised by the returned runnable) `max_tokens` cut off the answer.
        """
        _check_method(method)
        kwargs.pop("strict", None)  # The schema is always enforced.
        is_pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)  # classes of pydantic 1 included
        json_schema = convert_to_json_schema(schema)
        kwargs["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": json_schema}
        model: Runnable[LanguageModelInput, AIMessage]
        parser: Any
        if method == "function_calling":
            model = self.bind_tools([schema], tool_choice="any", parallel_tool_calls=False, **kwargs)
            if is_pydantic:
                parser = WholePydanticToolsParser(tools=[cast("Any", schema)], first_tool_only=True)
            else:
                key_name = convert_to_openai_tool(schema)["function"]["name"]
                parser = WholeJsonToolsParser(key_name=key_name, first_tool_only=True)
        else:
            response_format: dict[str, Any] = {"type": "json_object"}
            if method == "json_schema":
                response_format = {
                    "type": "json_schema",
                    "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema},
                }
            model = self.bind(response_format=response_format, **kwargs)
            parser = WholePydanticParser(pydantic_object=cast("Any", schema)) if is_pydantic else WholeJsonParser()
        if not include_raw:
            return cast("Runnable[LanguageModelInput, dict[str, Any] | BaseModel]", model | parser)
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


# The names under which LangChain's other chat models take the same fields.
_ALIASES: Final = {
    "max_completion_tokens": "max_tokens",
    "model_name": "model",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}
_SETTABLE: Final = (CHAT_FIELDS - FILLED_IN) | {"timeout", "timeout_s"} | _ALIASES.keys()
# Every chat model of LangChain takes these. An engine in the same process needs no key, and `with_retry` repeats calls.
_WITHOUT_EFFECT: Final = frozenset({"api_key", "max_retries"})
_METHODS: Final = ("json_schema", "function_calling", "json_mode")  # of `with_structured_output`
_LANGCHAINS_OWN: Final = frozenset({"stream"})  # LangChain's switch for streaming, which LangChain has obeyed already


def _constructor_fields(given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The arguments of the model's constructor, with LangChain's other names replaced and the rest in
    `model_kwargs`. Raises InvalidRequestError if one is neither a field of the model nor of vLLM's chat request, or
    is given under two names."""
    more = dict(given.get("model_kwargs") or {})
    given = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    check_fields([*(name for name in given if name not in own), *more], {*_SETTABLE, *own})
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = _ALIASES.get(name, name)
        if field in fields or (field != name and field in given):
            raise InvalidRequestError(f"{field} is given twice, under two of its names; leave out one of them.")
        (fields if field in own else more)[field] = value
    return {**fields, "model_kwargs": more} if more else fields


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one request as the engine takes them. Raises InvalidRequestError if vLLM has no such field that
    can be set."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in _SETTABLE:
            fields[_ALIASES.get(name, name)] = value
        elif name not in _LANGCHAINS_OWN:
            check_fields([each for each in given if each not in _LANGCHAINS_OWN], _SETTABLE)
    if "timeout" in fields:
        fields["timeout_s"] = fields.pop("timeout")
    return fields


def _check_one_answer(count: object) -> None:
    """Refuse the `n` of a stream that asks for several answers, whose pieces LangChain would join into one text."""
    if isinstance(count, int) and count > 1:
        raise InvalidRequestError(
            f"n is {count}, and LangChain joins all pieces of a stream into one message. Leave out n and stream each "
            "answer by a call of its own, or get the answers whole with `generate` or `agenerate` and streaming=False."
        )


def _check_method(method: str) -> None:
    """Raise InvalidRequestError unless the `method` of `with_structured_output` is one."""
    if method not in _METHODS:
        near = difflib.get_close_matches(str(method), _METHODS, n=1)
        raise InvalidRequestError(
            f"with_structured_output: method is {method!r:.80}{f' (did you mean {near[0]!r}?)' if near else ''}. "
            f"Give one of {', '.join(map(repr, _METHODS))}."
        )
