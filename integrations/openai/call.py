"""One call of an OpenAI client: its input and its output."""

from __future__ import annotations

from typing import Any

from weft.core.program.structure.lineage import Content
from weft.integrations.client_call import Caller, ClientCall


class RequestCall(ClientCall):
    """A model call of an OpenAI client.

    Raises:
        ProgramEndedError: The program has ended.
    """

    def __init__(self, caller: Caller, body: dict[str, Any]) -> None:
        messages = _objects(body.get("messages"))
        super().__init__(caller, lambda: _input_content(messages), _tool_calls_in(messages), _tools_before(messages))
        self._unfinished = body.get("n") or 1  # choices without a finish reason
        self._texts: dict[int, list[str]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every choice of the answer has ended."""
        return self._unfinished <= 0

    def add_answer(self, response: dict[str, Any]) -> None:
        """Record a whole `chat.completion`."""
        for choice in response["choices"]:
            self._add(choice["index"], choice["message"])

    def add_chunk(self, chunk: dict[str, Any]) -> None:
        """Record a `chat.completion.chunk`."""
        for choice in chunk["choices"]:
            self._add(choice["index"], choice["delta"])
            self._unfinished -= bool(choice.get("finish_reason"))

    def _add(self, index: int, message: dict[str, Any]) -> None:
        if message.get("content"):
            self._texts.setdefault(index, []).append(message["content"])
        calls = [call for call in message.get("tool_calls") or () if call.get("id")]
        self.tools |= {call["id"]: str(_name(call) or "tool") for call in calls}

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.output = Content(tuple(map("".join, self._texts.values())), tuple(self.tools))
        super().__exit__(kind, error, trace)


# The functions below read requests that have not been validated, so they skip everything that they do not understand.


def _input_content(messages: list[dict[str, Any]]) -> Content:
    """The input of a call: the texts of its messages, and the ids of tool calls and tool results."""
    texts: list[Any] = []
    ids: list[Any] = []
    for message in messages:
        content = message.get("content")
        texts += [content, *(part.get("text") for part in _objects(content))]
        ids += [message.get("tool_call_id"), *(call.get("id") for call in _objects(message.get("tool_calls")))]
    return Content(
        tuple(text for text in texts if isinstance(text, str)), tuple(id_ for id_ in ids if isinstance(id_, str))
    )


def _tools_before(messages: list[dict[str, Any]]) -> list[str]:
    """The names of the tools whose results are the last messages, which are the tools that ran before this call."""
    results: list[str] = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            calls = _objects(message.get("tool_calls"))
            names = {str(call.get("id")): _name(call) for call in calls}
            return [str(names[result]) for result in reversed(results) if names.get(result)]
        results.append(str(message.get("tool_call_id")))
    return []


def _tool_calls_in(messages: list[dict[str, Any]]) -> set[str]:
    """The ids of all tool calls in a request. None of them runs any more, with a result or without one."""
    return {str(call["id"]) for message in messages for call in _objects(message.get("tool_calls")) if call.get("id")}


def _name(call: dict[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
