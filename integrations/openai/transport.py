"""HTTP transports that answer OpenAI's chat completions from an engine in this process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import httpx2
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from weft.core.errors import DeadlineError, InvalidRequestError, UnknownModelError, WeftError
from weft.core.program import Program, passed_on
from weft.core.program.structure.lineage import Content
from weft.engine.http.http_errors import error_body, error_headers, error_status, openai_error
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.vllm_compat.known_names import CHAT_FIELDS, check_fields
from weft.integrations.arguments import check_engine, check_program
from weft.integrations.client_call import Caller, ClientCall

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

T = TypeVar("T")

# The SDK's own parameters are known: as other servers of its API do, vLLM ignores those that it has no use for.
_SDK_FIELDS: Final = CompletionCreateParamsNonStreaming.__required_keys__ | (
    CompletionCreateParamsNonStreaming.__optional_keys__
)
_FIELDS: Final = (CHAT_FIELDS - {"request_id", "session_id"}) | _SDK_FIELDS | {"timeout_s"}


def error_response(error: WeftError) -> httpx2.Response:
    """Convert an error to a response. Its headers say whether a retry may succeed, and after how long."""
    return httpx2.Response(error_status(error), headers=error_headers(error), json=error_body(error))


class AsyncTransport(httpx2.AsyncBaseTransport):
    """Answers the requests of an `httpx2.AsyncClient`. Use it for OpenAI clients that other code makes.

    ::

        http = httpx2.AsyncClient(transport=AsyncTransport(engine, program))
        ChatOpenAI(http_async_client=http, base_url="http://weft/v1", api_key="none", model=engine.model)

    Args:
        engine: The engine on which the calls run.
        program: The program to which the calls belong. None: Each call is a program of its own.

    Raises:
        ArgumentTypeError: One of them is something else.
    """

    def __init__(self, engine: FrontEnd, program: Program | None = None) -> None:
        check_engine("openai_client", engine)
        if program is not None:
            check_program("openai_client", program)
        self._engine = engine
        self._program = passed_on(program) if program is not None else None

    def _caller(self) -> Caller:
        """Who makes the call that is being made."""
        return Caller(self._program)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request. Weft's errors become error responses.

        Raises:
            httpx2.ReadTimeout: The request's read timeout, in seconds, has passed. The call is aborted.
        """
        method, path = request.method, request.url.path
        try:
            if method == "POST" and path.endswith("/chat/completions"):
                return await self._chat(request)
        except WeftError as error:
            return error_response(error)
        if method == "GET" and path.endswith("/models"):
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "weft"} for name in self._engine.models]
            return httpx2.Response(200, json={"object": "list", "data": models})
        said = f"{method} {path} is not served in this process; only POST /chat/completions and GET /models are."
        return httpx2.Response(404, headers={"x-should-retry": "false"}, json=openai_error(404, said, "not_served"))

    async def _chat(self, request: httpx2.Request) -> httpx2.Response:
        try:
            body = json.loads(await request.aread())
        except ValueError as error:
            raise InvalidRequestError(f"the chat request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidRequestError("the chat request is not a JSON object.")
        check_fields(body, _FIELDS)
        model = body.get("model")
        if model and model not in self._engine.models:
            raise UnknownModelError(str(model), self._engine.models)
        timeout_s = request.extensions.get("timeout", {}).get("read")
        call = RequestCall(self._caller(), body)
        headers = {"x-request-id": call.identity.call_id}
        if body.get("stream"):
            events = EventStream(self._events(call, body), timeout_s)
            await events.begin()
            return httpx2.Response(200, headers={**headers, "content-type": "text/event-stream"}, stream=events)
        try:
            async with asyncio.timeout(timeout_s):
                with call:
                    answer = await self._engine.chat(body, call.program, call.identity)
                    call.add_answer(answer)
        except DeadlineError:  # a TimeoutError as well, but of the call's deadline and not of the client's timeout
            raise
        except TimeoutError:
            raise _read_timeout(timeout_s) from None
        return httpx2.Response(200, headers=headers, json=answer)

    async def _events(self, call: RequestCall, body: dict[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the answer as server-sent events, each as soon as the engine gives it."""
        held_back = []
        with call:
            async with aclosing(self._engine.chat_stream(body, call.program, call.identity)) as chunks:
                async for chunk in chunks:
                    call.add_chunk(chunk)
                    # Chunks are held back from the last finish reason on, until the call has ended. So a client that
                    # stops reading at the finish reason does not abort the call.
                    if call.is_complete:
                        held_back.append(_event(chunk))
                    else:
                        yield _event(chunk)
        for event in held_back:
            yield event
        yield b"data: [DONE]\n\n"


class EventStream(httpx2.AsyncByteStream):
    """The body of a streamed answer. Closing it aborts the call, even while another task waits for the next event."""

    def __init__(self, events: AsyncGenerator[bytes], timeout_s: float | None) -> None:
        self._events = events
        self._timeout_s = timeout_s
        self._first: bytes | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._closed = False

    async def begin(self) -> None:
        """Wait for the first event, so that a rejected request gets an error status instead of a stream. Raises
        WeftError if it is rejected, and httpx2.ReadTimeout if the first event comes too late."""
        self._first = await self._next()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return await self._next()
        except WeftError as error:  # The status has been sent, so the error is an event, as in OpenAI's API.
            return _event(error_body(error))

    async def _next(self) -> bytes:
        reader = self._reader = cast("asyncio.Task[Any]", asyncio.current_task())
        cancelling = reader.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(self._events)
        except DeadlineError:
            raise
        except TimeoutError:
            raise _read_timeout(self._timeout_s) from None
        except asyncio.CancelledError:
            if self._closed and reader.uncancel() <= cancelling:  # `aclose` alone has cancelled the task.
                raise StopAsyncIteration from None
            raise
        finally:
            self._reader = None

    async def aclose(self) -> None:
        """Abort the call, if it has not ended."""
        if self._reader is None:
            await self._events.aclose()
        elif not self._closed:
            self._closed = True
            self._reader.cancel()


class Transport(httpx2.BaseTransport):
    """`AsyncTransport` for an `httpx2.Client`."""

    def __init__(self, engine: FrontEnd, program: Program | None = None) -> None:
        self._transport = AsyncTransport(engine, program)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request, as `AsyncTransport` does."""
        request.read()
        response = _wait(self._transport.handle_async_request(request))
        if isinstance(response.stream, EventStream):
            response.stream = _SyncEventStream(response.stream)
        return response


class _SyncEventStream(httpx2.SyncByteStream):
    def __init__(self, stream: EventStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        while (event := _wait(self._next())) is not None:
            yield event

    async def _next(self) -> bytes | None:
        return await anext(self._stream, None)

    def close(self) -> None:
        _wait(self._stream.aclose())


@functools.cache
def _loop() -> LoopThread:
    """The event loop of all sync clients, on a thread of its own."""
    loop = LoopThread("weft-openai")
    atexit.register(loop.stop)
    return loop


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    future = _loop().submit(coroutine)
    try:
        return future.result()
    finally:
        future.cancel()  # has an effect only after a KeyboardInterrupt


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _read_timeout(timeout_s: float | None) -> httpx2.ReadTimeout:
    return httpx2.ReadTimeout(f"the engine sent nothing for {timeout_s} s, so the call was aborted. Allow more time.")


class RequestCall(ClientCall):
    """A model call of an OpenAI client. Raises ProgramEndedError if the program has ended."""

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


_BASE_URL = "http://weft/v1"  # The host name is never resolved.


def openai_client(engine: FrontEnd, program: Program | None = None) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` whose calls run on `engine` and belong to `program`.

    Cancelling a call, or closing its stream, aborts the call in the engine. Calls are not retried, and they do not time
    out, since a call may wait long in the scheduler's queue. `client.with_options(timeout=..., max_retries=...)`
    changes both; a call that times out is aborted. The client holds no resources, so it need not be closed, and it may
    be used from any number of event loops.

    Args:
        engine: The engine on which the calls run. Requests name its model, `engine.model`.
        program: The program, or the branch of one, to which the calls belong. None: Each call is a program of its own.

    Raises:
        ArgumentTypeError: `engine` is no engine, or `program` no program.
        openai.APIStatusError: (raised by the calls) One of Weft's errors, see `weft.core.errors`, with a status of
            OpenAI's API: 400 the request is wrong or, with the code `context_length_exceeded`, too long; 404 unknown
            model or path; 409 the program has ended or runs on another engine; 429 the engine has too many calls; 500
            the engine failed on the call; 503 the engine or a replica was shut down or died; 504 the call's deadline
            has passed. After the first event of a stream, it is an `openai.APIError` with the same code.
    """
    return async_client(AsyncTransport(engine, program))


def async_client(transport: AsyncTransport) -> AsyncOpenAI:
    """Make an `AsyncOpenAI` with a transport of Weft's."""
    http = httpx2.AsyncClient(transport=transport, timeout=None)
    return AsyncOpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)


def sync_openai_client(engine: FrontEnd, program: Program | None = None) -> OpenAI:
    """Make an `OpenAI` client, for code without an event loop; otherwise as `openai_client`. It is thread-safe."""
    http = httpx2.Client(transport=Transport(engine, program), timeout=None)
    return OpenAI(base_url=_BASE_URL, api_key="none", max_retries=0, timeout=None, http_client=http)
