"""What a scripted engine answers: replies in their order, or by a function of the request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.core.errors import ScriptError
from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.process_rows import CallIdentity


@dataclass(frozen=True)
class Reply:
    """One scripted answer.

    Args:
        content: The text.
        tool_calls: The name and the arguments of each tool that the model calls.
        latency_s: Seconds before the answer begins. None: the engine's `latency_s`.
        reasoning: What the model thinks before it answers.
        token_s: Seconds between two tokens of the answer.
        error: The call raises it after the answer's last token, instead of ending.
    """

    content: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    latency_s: float | None = None
    reasoning: str = ""
    token_s: float = 0.0
    error: Exception | None = None


AnyReply = str | Reply | Exception
Replies = Iterable[AnyReply] | Callable[[Mapping[str, Any]], AnyReply]


class ScriptedCall(NamedTuple):
    """A call that reached a scripted engine."""

    body: Mapping[str, Any]  # the request in OpenAI's chat format, with `messages`, `tools`, …
    program_id: ProgramId
    thread_id: ThreadId
    parents: tuple[CallId, ...]  # the calls that had to finish first
    call_id: CallId


class Script:
    """Hands out replies, one for each call. May be used from any thread.

    Args:
        replies: As for `weft.testing.ScriptedEngine`.

    Attributes:
        calls: The calls that asked, in order.
    """

    def __init__(self, replies: Replies) -> None:
        self.calls: list[ScriptedCall] = []
        self._function = replies if callable(replies) else None
        self._list: Iterator[AnyReply] = iter(() if callable(replies) else replies)
        self._lock = threading.Lock()

    def reply(self, request: Mapping[str, Any], identity: CallIdentity) -> Reply:
        """The next reply, which is raised if it is an exception. Raises ScriptError if there is none, or it is of
        the wrong kind."""
        with self._lock:
            self.calls.append(
                ScriptedCall(request, identity.program_id, identity.thread_id, identity.parents, identity.call_id)
            )
            number = len(self.calls)
            try:
                reply = self._function(request) if self._function else next(self._list, None)
            except Exception as error:
                if isinstance(error, ScriptError):
                    raise
                raise ScriptError(f"the script fails on call {number}: {type(error).__name__}: {error}") from error
        if isinstance(reply, Exception):
            raise reply
        if reply is None:
            last = request["messages"][-1]
            raise ScriptError(f"the script has no reply for call {number}, whose last message is {last!r:.200}.")
        if not isinstance(reply, str | Reply):
            raise ScriptError(f"reply {number} must be a text, a Reply or an Exception, not {reply!r:.200}.")
        return Reply(reply) if isinstance(reply, str) else reply
