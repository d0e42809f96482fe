"""Between OpenAI's wire format and LangChain's messages, and parsers that refuse an answer that was cut off."""

from __future__ import annotations

import json
from typing import Any, cast

from langchain_core.messages import AIMessage, AIMessageChunk, UsageMetadata
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

from weft.core.errors import OutputParsingError


def _usage(usage: dict[str, Any]) -> UsageMetadata:
    details = usage.get("prompt_tokens_details") or {}
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage.get("completion_tokens", 0),
        total_tokens=usage["total_tokens"],
        input_token_details={"cache_read": details.get("cached_tokens") or 0},
    )


def to_result(response: dict[str, Any]) -> ChatResult:
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


def to_chunk(chunk: dict[str, Any]) -> ChatGenerationChunk:
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


class WholeJsonParser(_Whole, JsonOutputParser):
    pass


class WholePydanticParser(_Whole, PydanticOutputParser[Any]):
    pass


class WholeJsonToolsParser(_Whole, JsonOutputKeyToolsParser):
    pass


class WholePydanticToolsParser(_Whole, PydanticToolsParser):
    pass


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
