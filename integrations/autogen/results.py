"""Converts OpenAI's responses, whole or streamed, to AutoGen's results, and writes AutoGen's event log."""

from __future__ import annotations

import logging
from typing import Any, Final

from autogen_core import EVENT_LOGGER_NAME, FunctionCall
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent
from autogen_core.models import (
    ChatCompletionTokenLogprob,
    CreateResult,
    FinishReasons,
    ModelFamily,
    RequestUsage,
    TopLogprob,
)

from weft.core.errors import OutputParsingError
from weft.integrations.arguments import is_json

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
