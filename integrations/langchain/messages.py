"""Converts OpenAI's responses to LangChain's messages; parsers that reject an answer that was cut off."""

from __future__ import annotations

from typing import Any, Final, cast

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
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
from weft.core.program.structure.lineage import Content
from weft.integrations.arguments import is_json

_RUN_PREFIX: Final = "lc_run--"  # LangChain's id of a message is this prefix, the id of the run, and perhaps a number.


def input_content(messages: list[BaseMessage]) -> Content:
    """The input of a call: its texts, the ids of the runs that made its messages, and the ids of tool calls."""
    texts: list[str] = []
    ids: list[str] = []
    for message in messages:
        content = message.content
        if isinstance(content, str):
            texts.append(content)
        else:
            parts = (part if isinstance(part, str) else part.get("text") for part in content)
            texts += [part for part in parts if isinstance(part, str)]
        if isinstance(message, AIMessage):
            if message.id is not None and message.id.startswith(_RUN_PREFIX):
                start = len(_RUN_PREFIX)
                ids.append(message.id[start : start + 36])
            ids += [call["id"] for call in message.tool_calls if call["id"]]
        elif isinstance(message, ToolMessage):
            ids.append(message.tool_call_id)
    return Content(tuple(texts), tuple(ids))


def to_messages(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format, with the reasoning of all answers, from which the chat template chooses."""
    converted: list[dict[str, Any]] = []
    for message in messages:
        own = convert_to_openai_messages([message])  # a list: some contents become several messages
        if isinstance(message, AIMessage) and own and (reasoning := _reasoning_in(message, own[0])):
            own[0]["reasoning"] = reasoning
        converted += own
    return converted


def _reasoning_in(message: AIMessage, converted: dict[str, Any]) -> str:
    """The reasoning of an answer. The blocks that have it are taken out of the content, where vLLM takes none."""
    blocks = converted.get("content")
    found = []
    if isinstance(blocks, list):
        found = [block for block in blocks if block.get("type") in ("reasoning", "thinking")]
        converted["content"] = [block for block in blocks if block not in found] or ""
    texts = (block.get("reasoning") or block.get("thinking") or "" for block in found)
    return str(message.additional_kwargs.get("reasoning_content") or "".join(texts))


class AnswerSoFar:
    """Collects the content of an answer from a whole response or from chunks, in OpenAI's format."""

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}  # by index of the choice
        self._ids: list[str] = []

    def add(self, response: dict[str, Any]) -> dict[str, Any]:
        """Add a completion or a chunk, and return it."""
        for choice in response["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            if message.get("content"):
                self._texts.setdefault(choice["index"], []).append(message["content"])
            self._ids += [call["id"] for call in message.get("tool_calls") or () if call.get("id")]
        return response

    def content(self, run: object) -> Content:
        """The output of a run: the texts, the id of the run, and the ids of tool calls."""
        return Content(tuple("".join(parts) for parts in self._texts.values()), (str(run), *self._ids))


def _usage(usage: dict[str, Any]) -> UsageMetadata:
    details = usage.get("prompt_tokens_details") or {}
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage.get("completion_tokens", 0),
        total_tokens=usage["total_tokens"],
        input_token_details={"cache_read": details.get("cached_tokens") or 0},
    )


def to_result(response: dict[str, Any]) -> ChatResult:
    """Convert a chat completion, with all its choices."""
    usage = _usage(response["usage"])
    generations = []
    for choice in response["choices"]:
        answer = choice["message"]
        tool_calls, invalid_tool_calls = [], []
        for raw in answer.get("tool_calls") or ():
            try:
                tool_calls.append(cast("Any", parse_tool_call(raw, return_id=True)))
            except Exception as error:  # The arguments are not JSON. The agent may show the error to the model.
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
    """Convert a chunk of a chat completion."""
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
        "weft": [response["weft"]],  # LangChain joins the lists of two chunks; it cannot join seconds
        **_logprobs(choice),
    }


def _logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {"reasoning_content": message["reasoning"]} if message.get("reasoning") else {}


class _Whole(BaseLLMOutputParser[Any]):
    """Rejects an answer that was cut off. LangChain's parsers would complete it or return None."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = cast("ChatGeneration", result[0]).message
        if message.response_metadata.get("finish_reason") == "length" and not is_json(message.text):
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
