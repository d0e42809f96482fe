"""One model call of AutoGen: its program, its cancellation, its token usage, and the checks of its request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, CreateResult, FunctionExecutionResultMessage, LLMMessage, RequestUsage

from weft.core.errors import InvalidRequestError, WeftError
from weft.core.locks import fork_safe
from weft.core.program import Program
from weft.core.program.structure.lineage import Content
from weft.engine.host.frontend import FrontEnd
from weft.engine.vllm_compat.known_names import CHAT_FIELDS, FILLED_IN, check_fields
from weft.integrations.client_call import Caller, ClientCall

# Fields that the client fills in from AutoGen's arguments. `n` is among them because a call has one answer.
_FROM_AUTOGEN: Final = {"model", "n", "tools"}


class ClientConfigError(WeftError, NotImplementedError):
    """A client cannot be dumped to a component configuration of AutoGen."""

    def __init__(self) -> None:
        super().__init__(
            "WeftChatCompletionClient cannot be dumped, because it holds an engine, which a configuration cannot "
            "contain. Build the team in code, or load its configuration with another model client and replace that "
            "client."
        )


@dataclass(slots=True)
class Binding:
    """The program and the agent to which a client's calls belong."""

    program: Program
    agent: str | None
    by_team: bool = False  # made by `bind_team`, which may bind the client again


class CreateCall(ClientCall):
    """A model call of AutoGen. With the binding None it is a program of its own. Raises ProgramEndedError if the
    program has ended."""

    def __init__(self, binding: Binding | None, messages: Sequence[LLMMessage]) -> None:
        caller = Caller(binding.program, binding.agent) if binding is not None else Caller()
        super().__init__(caller, lambda: _input_content(messages), _tool_calls_in(messages), _tools_before(messages))

    def set_result(self, result: CreateResult) -> None:
        """Record the result. A later call whose input contains it is known to come after this call."""
        self.output = _output_content(result)
        if not isinstance(result.content, str):
            self.tools = {call.id: call.name for call in result.content}


def _tool_calls_in(messages: Sequence[LLMMessage]) -> set[str]:
    """The ids of all tool calls in the input. None of them runs any more, with a result or without one."""
    return {
        call.id
        for message in messages
        if isinstance(message, AssistantMessage) and not isinstance(message.content, str)
        for call in message.content
    }


def _tools_before(messages: Sequence[LLMMessage]) -> Iterator[str]:
    """The names of the tools whose results are the last messages, which are the tools that ran before this call."""
    for message in reversed(messages):
        if not isinstance(message, FunctionExecutionResultMessage):
            return
        yield from (result.name for result in message.content)


def _input_content(messages: Sequence[LLMMessage]) -> Content:
    """The input of a call: the texts of its messages, and the ids of tool calls and tool results."""
    texts: list[str] = []
    ids: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        elif isinstance(message, FunctionExecutionResultMessage):
            texts += [result.content for result in message.content]
            ids += [result.call_id for result in message.content]
        elif isinstance(message, AssistantMessage):
            ids += [call.id for call in message.content]
        else:
            texts += [part for part in message.content if isinstance(part, str)]
    return Content(tuple(texts), tuple(ids))


def _output_content(result: CreateResult) -> Content:
    """The output of a call: its text, or the texts in the arguments of its tool calls and the ids of these."""
    if isinstance(result.content, str):
        return Content((result.content,), ())
    texts = [text for call in result.content for text in _strings(call.arguments)]
    return Content(tuple(texts), tuple(call.id for call in result.content))


def _strings(arguments: str) -> Iterator[str]:
    """The strings in the JSON arguments of a tool call. An agent that runs as a tool gets its task in one of them."""
    try:
        parts = [json.loads(arguments)]
    except ValueError:
        return
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part


async def until_cancelled(
    chunks: AsyncGenerator[dict[str, Any]], token: CancellationToken | None
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a stream until a token is cancelled, which raises asyncio.CancelledError."""
    if token is None:
        async for chunk in chunks:
            yield chunk
        return
    step: asyncio.Future[Any] | None = None
    # A token keeps all futures that were linked to it, so the whole stream uses one.
    stop = token.link_future(asyncio.get_running_loop().create_future())
    stop.add_done_callback(lambda _: step.cancel() if step is not None else None)
    while not stop.cancelled():
        step = asyncio.ensure_future(anext(chunks, None))
        chunk = await step
        if chunk is None:
            return
        yield chunk
    raise asyncio.CancelledError


class Usage:
    """The tokens of a client's calls. Thread-safe, since a client may be used on several threads.

    Args:
        parent: The usage of the client from which this client was bound. It counts the same calls.
    """

    def __init__(self, parent: Usage | None = None) -> None:
        self._parent = parent
        self._lock = fork_safe(threading.Lock())
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def add(self, usage: RequestUsage) -> None:
        """Count a call, here and in the parent."""
        with self._lock:
            self._prompt_tokens += usage.prompt_tokens
            self._completion_tokens += usage.completion_tokens
        if self._parent is not None:
            self._parent.add(usage)

    @property
    def total(self) -> RequestUsage:
        """The tokens of all calls so far."""
        with self._lock:
            return RequestUsage(self._prompt_tokens, self._completion_tokens)


def check_client_fields(names: Iterable[str]) -> None:
    """Raise InvalidRequestError for a field that vLLM's chat request does not have, or that the client fills in."""
    check_fields(names, CHAT_FIELDS - FILLED_IN - _FROM_AUTOGEN)


def takes_several_system_messages(engine: FrontEnd, fields: Mapping[str, Any]) -> bool:
    """Whether the engine's chat template renders a system message that comes after other messages.

    Args:
        fields: Fields of the chat request. Only those that the template reads matter.
    """
    messages = [{"role": role, "content": role} for role in ("system", "user", "system")]
    template = {name: value for name, value in fields.items() if name in ("chat_template", "chat_template_kwargs")}
    try:
        without, with_last = (engine.count_prompt_tokens({**template, "messages": messages[:n]}) for n in (2, 3))
    except InvalidRequestError:  # The template refuses the messages.
        return False
    return with_last > without
