"""Chat completions on a server, in the place of vLLM's chat endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from weft.core.accounts import Account
from weft.core.errors import InvalidRequestError
from weft.core.ids import CallId
from weft.core.process_rows import CallIdentity
from weft.core.program import Program
from weft.engine.host.in_flight import ChatRequest
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.remote.connection import CHUNK, COMPLETION, COUNT, TOKENS, Server, account_of
from weft.engine.wire.call_header import MOST_TOOLS

_CHAT: Final = "/v1/chat/completions"
_TOKENIZE: Final = "/tokenize"
# What a server is told of a call. The figures stay here: it has its own, and takes none from clients.
_IDS: Final = ("program_id", "call_id", "program_name", "tenant")
_TEMPLATE: Final = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
)


class Request(ChatRequest):
    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self._place: dict[str, Any] = {}  # in the graph of its program
        self._shown: dict[str, Any] = {}

    def describe(self, program: Program, identity: CallIdentity) -> None:
        """Take what the server shows of a call and learns from: thread, parents, name, tools, the program around it."""
        graph, call_id = program.graph, identity.call_id
        self._place = {"thread_id": identity.thread_id, "parents": list(identity.parents)}
        if program.parent_program_id is not None:
            self._shown["parent_program_id"] = program.parent_program_id
        if call_id in graph:
            node = graph[call_id]
            self._shown["label"] = node.label
            self._shown["tools"] = list(node.tools[:MOST_TOOLS])

    def body(self) -> dict[str, Any]:
        arguments = self.vllm_xargs or {}
        own: dict[str, Any] = {name: arguments[name] for name in _IDS if arguments.get(name)} | self._place
        own |= {name: value for name, value in self._shown.items() if value}
        others = self.given.get("vllm_xargs") or {}
        sent = {name: value for name, value in self.given.items() if name != "request_id"}
        sent["vllm_xargs"] = {**others, **own}
        if self.return_token_ids:
            sent["return_token_ids"] = True
        return sent

    @property
    def headers(self) -> dict[str, str]:
        """How long the call and its program may take from now on."""
        arguments = self.vllm_xargs or {}
        named = (("weft-timeout-s", "time_left_s"), ("weft-program-deadline-s", "program_time_left_s"))
        # A time that has passed is one that has nearly passed: the server takes none of 0 seconds.
        return {header: f"{max(arguments[name], 1e-3):.6f}" for header, name in named if name in arguments}

    def template_body(self) -> dict[str, Any]:
        """Return the part of the body that the prompt is rendered from."""
        return {name: self.given[name] for name in _TEMPLATE if self.given.get(name) is not None}


class RemoteChat:
    """Sends chat requests to a server. The front end uses it like a model's endpoint in this process.

    Args:
        max_model_len: The context length of the first model, in tokens.
        on_account: Takes a call's account before its answer is delivered.
    """

    def __init__(
        self, server: Server, loop: LoopThread, *, max_model_len: int, on_account: Callable[[CallId, Account], None]
    ) -> None:
        self._server = server
        self._loop = loop
        self._on_account = on_account
        self.max_model_len = max_model_len

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Blocks while the server is asked."""
        body = {"prompt": text, "add_special_tokens": False}
        answer = self._loop.submit(self._server.ask(_TOKENIZE, body, shape=TOKENS)).result()
        return list(answer["tokens"])

    @staticmethod
    def make_request(
        body: dict[str, Any], program: Program | None = None, identity: CallIdentity | None = None
    ) -> Request:
        """Check what the front end reads of a request, with InvalidRequestError. The server checks the rest."""
        if not isinstance(body.get("messages"), list):
            raise InvalidRequestError("the chat request is malformed: messages must be a list of messages.")
        arguments = body.get("vllm_xargs")
        if arguments is not None and not isinstance(arguments, dict):
            raise InvalidRequestError("the chat request is malformed: vllm_xargs must be an object.")
        request = Request(body)
        if program is not None and identity is not None:
            request.describe(program, identity)
        return request

    async def count_prompt_tokens(self, request: Request) -> int:
        """The number of tokens of the rendered prompt."""
        answer = await self._server.ask(_TOKENIZE, request.template_body(), shape=COUNT)
        return int(answer["count"])

    async def complete(self, request: Request) -> dict[str, Any]:
        """One answer, as an OpenAI `chat.completion` object."""
        answer = await self._server.ask(_CHAT, request.body(), request.headers, may_run=True, shape=COMPLETION)
        self._take_account(request, answer)
        found = without_nulls(answer)
        return dict(found)

    async def stream(self, request: Request) -> AsyncGenerator[dict[str, Any]]:
        """The answer as OpenAI `chat.completion.chunk` objects."""
        has_finished = False
        async with aclosing(self._server.stream(_CHAT, request.body(), request.headers, shape=CHUNK)) as chunks:
            async for chunk in chunks:
                has_finished |= any(choice.get("finish_reason") for choice in chunk["choices"])
                self._take_account(request, chunk)
                yield chunk
        if not has_finished:
            raise self._server.ended_early()

    def _take_account(self, request: Request, answer: dict[str, Any]) -> None:
        account = account_of(answer.pop("weft", None))
        if account is not None:
            self._on_account(CallId(request.request_id), account)


def without_nulls(value: Any) -> Any:
    """A JSON value without the members that are null, as an engine in this process answers."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
