"""One model call of AutoGen's: which program it belongs to, how it is cancelled, and what it uses up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    RequestUsage,
)

from weft.core.errors import InvalidRequestError, WeftError
from weft.core.program import Program
from weft.core.program.lineage import NOTHING, Content
from weft.engine.engine import Engine

# The client's own to fill in: one answer a call, and AutoGen's arguments.
_TAKEN: Final = {"messages", "model", "n", "request_id", "session_id", "stream", "tools"}


class ClientConfigError(WeftError, NotImplementedError):
    """A client was to be dumped to AutoGen's component configuration."""

    def __init__(self) -> None:
        super().__init__(
            "WeftChatCompletionClient cannot be dumped: it holds an engine, which no configuration can carry. Build "
            "the team in code, or load its configuration with another model client and replace that."
        )


@dataclass(slots=True)
class Binding:
    """Whose calls a client makes."""

    program: Program
    agent: str | None
    by_team: bool = False  # made by `bind_team`, which may bind it again


class Call:
    """A call of the model: named when entered, and accounted to a program whatever happens inside."""

    def __init__(self, binding: Binding | None, messages: Sequence[LLMMessage]) -> None:
        self._is_own = binding is None  # an unbound client's call is a program by itself
        self.program = Program("chat") if binding is None else binding.program
        self._run = object()
        self._gave = NOTHING
        self.program.start_run(self._run, None)
        self.program.note_tools(self._run, _tools_before(messages))
        label = binding.agent if binding is not None else None
        self.identity = self.program.start_call(self._run, lambda: _given(messages), label=label)

    def gave(self, result: CreateResult) -> None:
        """Note its result, by which later calls that are given it are known to come after this one."""
        self._gave = _gave(result)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            self.program.end_call(self._run, self.identity, self._gave)
        self.program.end_run(self._run)
        if self._is_own:
            self.program.end_with(error)


def _tools_before(messages: Sequence[LLMMessage]) -> Iterator[str]:
    """The tools that ran right before a call: those whose results end its messages."""
    for message in reversed(messages):
        if not isinstance(message, FunctionExecutionResultMessage):
            return
        yield from (result.name for result in message.content)


def _given(messages: Sequence[LLMMessage]) -> Content:
    """What a call is given: the texts of its messages, and the ids of the tool calls and results among them."""
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


def _gave(result: CreateResult) -> Content:
    """What a call gave: its text, or the texts in the arguments of its tool calls, and their ids."""
    if isinstance(result.content, str):
        return Content((result.content,), ())
    texts = [text for call in result.content for text in _strings(call.arguments)]
    return Content(tuple(texts), tuple(call.id for call in result.content))


def _strings(arguments: str) -> Iterator[str]:
    """The strings in a JSON text, which agents that run as tools get as their task."""
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
    """The chunks of a stream, until a token is cancelled; then it is as if the caller had been."""
    if token is None:
        async for chunk in chunks:
            yield chunk
        return
    step: asyncio.Future[Any] | None = None
    stop = token.link_future(asyncio.get_running_loop().create_future())  # one link, as a token keeps them all
    stop.add_done_callback(lambda _: step.cancel() if step is not None else None)
    while not stop.cancelled():
        step = asyncio.ensure_future(anext(chunks, None))
        chunk = await step
        if chunk is None:
            return
        yield chunk
    raise asyncio.CancelledError


class Usage:
    """Tokens of a client's calls. Clients may be used on several threads."""

    def __init__(self, parent: Usage | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def add(self, usage: RequestUsage) -> None:
        """Count a call, here and in the client that this one was bound from."""
        with self._lock:
            self._prompt_tokens += usage.prompt_tokens
            self._completion_tokens += usage.completion_tokens
        if self._parent is not None:
            self._parent.add(usage)

    @property
    def total(self) -> RequestUsage:
        with self._lock:
            return RequestUsage(self._prompt_tokens, self._completion_tokens)


def check_fields(names: Iterable[str]) -> None:
    """Refuse what is no field of vLLM's chat request, or not the user's to set.

    Raises:
        InvalidRequestError: there is one; the message names it.
    """
    from weft.engine.vllm_compat.names import ChatCompletionRequest

    wrong = [name for name in names if name in _TAKEN or name not in ChatCompletionRequest.model_fields]
    if wrong:
        raise InvalidRequestError(
            f"{', '.join(wrong)}: no field of vLLM's chat request that can be set here. Fields are e.g. top_p, seed, "
            "stop, min_tokens, parallel_tool_calls, structured_outputs."
        )


def takes_several_system_messages(engine: Engine, fields: Mapping[str, Any]) -> bool:
    """Whether the chat template renders a system message that comes after others.

    Args:
        engine: it has the template.
        fields: of the chat request; those that the template sees count.
    """
    messages = [{"role": role, "content": role} for role in ("system", "user", "system")]
    seen = {name: value for name, value in fields.items() if name in ("chat_template", "chat_template_kwargs")}
    try:
        without, with_last = (engine.count_prompt_tokens({**seen, "messages": messages[:count]}) for count in (2, 3))
    except InvalidRequestError:  # the template says no
        return False
    return with_last > without
