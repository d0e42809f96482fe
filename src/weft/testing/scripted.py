"""An engine that answers from a script, for tests of agents with their real framework and without a model."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from weft.core.accounts import Account
from weft.core.errors import ContextLengthError, InvalidRequestError
from weft.core.ids import CallId
from weft.core.policies import PolicyConfig
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.core.routing.admission import DEFAULT_MAX_CALLS, Admission
from weft.core.testing import FakeClock
from weft.core.testing.script import Replies, Script
from weft.engine.host.create import Create
from weft.engine.host.frontend import FrontEnd
from weft.engine.host.in_flight import ChatRequest, Link, ModelEndpoint, weakly
from weft.engine.options import EngineOptions

_POLL_S: Final = 0.001
_LIMITS: Final = ("max_completion_tokens", "max_tokens")  # of the output; the first that a request has counts


class _Request(ChatRequest):
    def __init__(self, body: dict[str, Any], identity: CallIdentity | None) -> None:
        super().__init__(body)
        self.identity = identity


class ScriptedEngine(FrontEnd):
    """An engine without a model and without vLLM, for unit tests. Everything but the answers is Weft's own.

    ::

        engine = ScriptedEngine(["Paris", Reply(tool_calls=[("weather", {"city": "Paris"})]), "It is warm."])
        model = ChatWeft(engine=engine)

    `ChatWeft`, `WeftChatCompletionClient` and `openai_client` take it like a `weft.Engine`. It has a real process
    table, sessions, deadlines and errors. A token is a word.

    Args:
        replies: The answers, one for each call in the order of arrival; or a function from the request, in OpenAI's
            chat format, to the answer. An answer is a text, a `Reply`, or an exception, which the call then raises.
        latency_s: Seconds that each answer takes, and that count as the call's service.
        clock: Answers wait until the test has advanced this clock by their latency. None: the engine has a clock of its
            own, `engine.clock`, and advances it by the latency of each answer, so that nothing waits.
        max_calls: As for `weft.Engine`.
        max_model_len: The context length, in words. A call that does not fit raises `ContextLengthError`.
        listen: As for `weft.Engine`.

    Attributes:
        calls: The calls that have arrived, in order.
        clock: The engine's clock, in seconds.

    Raises:
        ReplicaError: `max_calls` is not above 0.
        ListenError: As for `weft.Engine`.
    """

    model = "scripted"

    def __init__(
        self,
        replies: Replies,
        *,
        latency_s: float = 0.0,
        clock: FakeClock | None = None,
        max_calls: int = DEFAULT_MAX_CALLS,
        max_model_len: int = 4096,
        listen: str | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        super().__init__(EngineOptions(max_calls=max_calls, clock=self.clock, listen=listen))
        self.policy = PolicyConfig("fcfs")
        script = Script(replies)
        self.calls = script.calls
        self._start_loop()
        self._chat = _ScriptedChat(
            script,
            latency_s,
            self.clock,
            waits=clock is not None,
            max_model_len=max_model_len,
            on_account=weakly(self._in_flight.account),
        )
        admission = Admission(lambda: max_calls)
        self._connect(Link(ModelEndpoint(self._chat, admission, self.engine_id, self.model)))
        self._finalizer = weakref.finalize(self, self._loop.stop)
        self._has_started()

    create = Create(__init__)
    """Start an engine without blocking the caller's event loop. Cancelling the start ends its processes."""

    async def until_waiting(self, calls: int) -> None:
        """Wait until so many calls wait for the clock, which the test then advances."""
        while self._chat.waiting < calls:  # noqa: ASYNC110  the calls are on the engine's event loop
            await asyncio.sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"<weft.testing.ScriptedEngine {self.engine_id} {len(self.calls)} calls>"


@dataclass(eq=False)
class _ScriptedChat:
    """Takes the place of vLLM's chat endpoint."""

    script: Script
    latency_s: float
    clock: FakeClock
    waits: bool
    max_model_len: int
    on_account: Callable[[CallId, Account], None]
    waiting: int = 0  # calls that wait for the clock

    # -- what the front end asks of an endpoint

    @staticmethod
    def tokenize(text: str) -> list[int]:
        return [sum(word.encode()) for word in text.split()]

    @staticmethod
    def make_request(
        body: dict[str, Any], program: Program | None = None, identity: CallIdentity | None = None
    ) -> _Request:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidRequestError("the chat request is malformed: messages must be a list of one message or more.")
        if body.get("n") not in (None, 1):
            raise InvalidRequestError("a scripted engine gives one answer to a call; leave out n.")
        for name in _LIMITS:
            limit = body.get(name)
            if limit is not None and not (isinstance(limit, int) and limit >= 1):
                raise InvalidRequestError(
                    f"the chat request is malformed: {name} must be a whole number from 1, not {limit!r:.40}."
                )
        return _Request(body, identity)

    async def count_prompt_tokens(self, request: _Request) -> int:
        return len(self._prompt(request))

    async def complete(self, request: _Request) -> dict[str, Any]:
        message, usage, reason = await self._answer(request)
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
        if request.return_token_ids:
            choice["token_ids"] = self.tokenize(message.get("content") or "")
        answer = {**_head(request, "chat.completion"), "choices": [choice], "usage": usage}
        return {**answer, "prompt_token_ids": self._prompt(request)} if request.return_token_ids else answer

    async def stream(self, request: _Request) -> AsyncGenerator[dict[str, Any]]:
        message, usage, reason = await self._answer(request)
        head = _head(request, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        words = (message.get("content") or "").split(" ")
        deltas += [{"content": word if number == 0 else f" {word}"} for number, word in enumerate(words) if message]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls") or ())]
        for number, delta in enumerate(deltas):
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            chunk = {**head, "choices": [choice]}
            if request.return_token_ids:
                choice["token_ids"] = self.tokenize(delta.get("content") or "")
                if number == 0:
                    chunk["prompt_token_ids"] = self._prompt(request)
            yield chunk
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        if (request.given.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": usage}

    # -- the script

    async def _answer(self, request: _Request) -> tuple[dict[str, Any], dict[str, int], str]:
        """The next reply as OpenAI's message, with its usage and its finish reason."""
        prompt = len(self._prompt(request))
        limit = next((limit for name in _LIMITS if (limit := request.given.get(name)) is not None), None)
        if prompt + (limit or 1) > self.max_model_len:
            raise ContextLengthError(
                f"The call has {prompt} input tokens and asks for {limit or 1} output tokens, and the context length "
                f"is {self.max_model_len} tokens."
            )
        assert request.identity is not None  # noqa: S101  only a request that is counted has none
        reply = self.script.reply(request.given, request.identity)
        number = len(self.script.calls)
        words = reply.content.split(" ") if reply.content else []
        latency_s = (self.latency_s if reply.latency_s is None else reply.latency_s) + reply.token_s * len(words)
        if self.waits:
            self.waiting += 1
            try:
                await self.clock.sleep(latency_s)
            finally:
                self.waiting -= 1
        else:
            self.clock.advance(latency_s)
        if reply.error is not None:
            raise reply.error
        limit = limit or len(words)
        is_cut = len(words) > limit and not reply.tool_calls
        message: dict[str, Any] = {"content": " ".join(words[:limit] if is_cut else words) or None}
        if reply.reasoning:
            message["reasoning"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{number}-{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for index, (name, arguments) in enumerate(reply.tool_calls)
            ]
        output = max(1, min(len(words), limit))
        account = Account(service_s=latency_s, prompt_tokens=prompt, output_tokens=output)
        self.on_account(CallId(request.request_id), account)
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return message, usage, "tool_calls" if reply.tool_calls else "length" if is_cut else "stop"

    def _prompt(self, request: _Request) -> list[int]:
        texts = (message.get("content") for message in request.given["messages"] if isinstance(message, Mapping))
        return self.tokenize(" ".join(text if isinstance(text, str) else json.dumps(text) for text in texts if text))


def _head(request: _Request, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request.request_id}", "object": kind, "created": 0, "model": ScriptedEngine.model}
