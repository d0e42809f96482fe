"""One call of an OpenAI client, in the tree of its program's runs, and what it was given and gave."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from weft.core.program import Program
from weft.core.program.lineage import Content


class Call:
    """A call: named when it is made, and accounted to its program whatever happens while it is entered.

    Args:
        program: what it belongs to; None: it is a program of its own.
        body: the request.

    Raises:
        ProgramEndedError: the program has ended.
    """

    def __init__(self, program: Program | None, body: dict[str, Any]) -> None:
        self.program = program or Program("chat")
        self._own = program is None
        self._run = object()
        self._unfinished = body.get("n") or 1
        self._texts: dict[int, list[str]] = {}
        self._ids: list[str] = []
        messages = _objects(body.get("messages"))
        self.program.start_run(self._run, None)
        self.program.note_tools(self._run, _tools_before(messages))
        self.identity = self.program.start_call(self._run, lambda: _given(messages))

    @property
    def is_whole(self) -> bool:
        """Whether every choice of the answer has come to its end."""
        return self._unfinished <= 0

    def hear_answer(self, response: dict[str, Any]) -> None:
        """A whole `chat.completion` came."""
        for choice in response["choices"]:
            self._hear(choice["index"], choice["message"])

    def hear_chunk(self, chunk: dict[str, Any]) -> None:
        """A `chat.completion.chunk` came."""
        for choice in chunk["choices"]:
            self._hear(choice["index"], choice["delta"])
            self._unfinished -= bool(choice.get("finish_reason"))

    def _hear(self, index: int, message: dict[str, Any]) -> None:
        if message.get("content"):
            self._texts.setdefault(index, []).append(message["content"])
        self._ids += [call["id"] for call in message.get("tool_calls") or () if call.get("id")]

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is None:
            gave = Content(tuple(map("".join, self._texts.values())), tuple(self._ids))
            self.program.end_call(self._run, self.identity, gave)
        self.program.end_run(self._run)
        if self._own:
            self.program.end_with(error)


# What follows reads requests that nobody has checked yet, so it takes what it understands and leaves the rest.


def _given(messages: list[dict[str, Any]]) -> Content:
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
    """The names of the tools whose results are the last messages."""
    results: list[str] = []
    for message in reversed(messages):
        if message.get("role") != "tool":
            calls = _objects(message.get("tool_calls"))
            names = {str(call.get("id")): _name(call) for call in calls}
            return [str(names[result]) for result in reversed(results) if names.get(result)]
        results.append(str(message.get("tool_call_id")))
    return []


def _name(call: dict[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
