"""One call of an OpenAI client: its run in the run tree, its input and its output."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from weft.core.program import Program
from weft.core.program.structure.lineage import Content


class RequestCall:
    """A model call. It is named when it is made, and its program counts it however the `with` block ends.

    Args:
        program: The program. None: The call is a program of its own.
        body: The request.

    Raises:
        ProgramEndedError: The program has ended.
    """

    def __init__(self, program: Program | None, body: dict[str, Any]) -> None:
        self.program = program or Program("chat")
        self._is_program = program is None
        self._run = object()
        self._unfinished = body.get("n") or 1  # choices without a finish reason
        self._texts: dict[int, list[str]] = {}
        self._tools: dict[str, str] = {}  # the names of the tools that the answer calls, by tool call
        messages = _objects(body.get("messages"))
        self.program.reports.tools_ended(_tool_calls_in(messages))
        self.program.reports.start_run(self._run, None, runs_code=False)
        self.program.reports.note_tools(self._run, _tools_before(messages))
        self.identity = self.program.reports.start_call(self._run, lambda: _input_content(messages))

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
        self._tools |= {call["id"]: str(_name(call) or "tool") for call in calls}

    def __enter__(self) -> RequestCall:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None:
            output = Content(tuple(map("".join, self._texts.values())), tuple(self._tools))
            self.program.reports.end_call(self._run, self.identity, output)
        self.program.reports.end_run(self._run)
        if error is None and not self._is_program:
            for tool_call, name in self._tools.items():  # the client runs them now
                self.program.reports.tool_began(tool_call, name)
        if self._is_program:
            self.program.reports.end_with(error)


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
