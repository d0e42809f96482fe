"""The OpenAI SDK on the session's engine: calls that are cancelled, and calls that are refused or fail."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import httpx2
import openai
import pytest
from observers import EndedPrograms, cancel_while_generating, wait_until_generating, wait_until_idle
from openai_parts import QUESTION, ask, endless, every_method
from polling import until
from tiny_engine import ENDLESS_TOKENS, MAX_MODEL_LEN

import weft
from weft.core.errors import (
    CallFailedError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineDiedError,
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ProgramEndedError,
    ProgramEngineError,
    ReplicaLostError,
    RetryableCallError,
    UnknownModelError,
    WeftError,
)
from weft.core.testing import RecordingBackend
from weft.engine.http.http_errors import error_body
from weft.integrations.openai import openai_client, sync_openai_client
from weft.integrations.openai.transport import error_response

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


# -- cancelled


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["task", "wait_for", "move_on_after"])
async def test_cancelled(engine: weft.Engine, stream: bool, how: str) -> None:
    """Cancelling the entrypoint aborts its call in the engine, and the program ends as cancelled."""
    ended = EndedPrograms(engine)

    @weft.program
    async def main(program: weft.Program) -> None:
        client = openai_client(engine, program)
        request = {"model": engine.model, "messages": QUESTION, **endless()}
        if stream:
            async for _ in await client.chat.completions.create(stream=True, **request):
                pass
        else:
            await client.chat.completions.create(**request)

    await cancel_while_generating(engine, how, main)
    (row,) = ended.rows
    assert (row.calls, str(row.state)) == (1, "cancelled")
    assert row.account.output_tokens < ENDLESS_TOKENS


async def test_cancelled_in_the_queue(engine: weft.Engine) -> None:
    """A stream that is cancelled before its first chunk, while it is queued, leaves no call on the engine."""
    async with weft.Program() as program:
        client = openai_client(engine, program)
        request = {"model": engine.model, "messages": QUESTION, "stream": True, **endless()}
        tasks = [asyncio.create_task(client.chat.completions.create(**request)) for _ in range(8)]  # 4 can run
        await until(lambda: any(task.done() for task in tasks))
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if not isinstance(result, BaseException):
                await result.close()
        await wait_until_idle(engine)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)


def test_keyboard_interrupt(engine: weft.Engine) -> None:
    """Ctrl-C during a sync call aborts the call."""
    ended = EndedPrograms(engine)
    # A shell that runs the tests in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        try:
            asyncio.run(wait_until_generating(engine))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), weft.Program("interrupted") as program:
            sync_openai_client(engine, program).chat.completions.create(
                model=engine.model, messages=QUESTION, **endless()
            )
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    asyncio.run(wait_until_idle(engine))
    assert ended.states == {"interrupted": "cancelled"}


@every_method
async def test_timeout(engine: weft.Engine, how: str) -> None:
    """A timeout that the user sets raises the SDK's timeout error and aborts the call. By default there is none."""
    ended = EndedPrograms(engine)
    with pytest.raises(openai.APITimeoutError):
        await ask(engine, None, how, timeout=1e-4, **endless())
    await wait_until_idle(engine)
    assert [str(row.state) for row in ended.rows] == ["cancelled"]
    assert openai_client(engine).timeout is None


# -- errors


@every_method
@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 7}, {"n": 0}, {"tools": [3]}, {"stop": 5}, {"messages": [3]}],
    ids=str,
)  # fmt: skip
async def test_invalid_request(engine: weft.Engine, how: str, wrong: dict[str, Any]) -> None:
    """A wrong argument is a bad request, by every method, and the error names the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(engine, None, how, **wrong)
    assert next(iter(wrong)) in caught.value.message
    assert caught.value.type == "invalid_request_error"
    await wait_until_idle(engine)


@pytest.mark.parametrize(
    "messages",
    [3, "Hello", [{"role": "assistant", "tool_calls": 3}, {"role": "tool", "tool_call_id": []}],
     [{"role": "assistant", "tool_calls": [{"id": [], "function": 3}, 3]}, {"role": "tool"}]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("how", ["create", "stream"])
async def test_malformed_messages(engine: weft.Engine, how: str, messages: Any) -> None:
    """Malformed messages are a bad request, although their contents are read before they are validated."""
    async with weft.Program() as program:
        with pytest.raises(openai.BadRequestError):
            await ask(engine, program, how, messages=messages)
    await wait_until_idle(engine)


@every_method
@pytest.mark.parametrize(
    "what", [{"max_tokens": 1_000_000}, {"messages": [{"role": "user", "content": "fog " * MAX_MODEL_LEN}]}]
)
async def test_context_length(engine: weft.Engine, how: str, what: dict[str, Any]) -> None:
    """A request that does not fit into the context has OpenAI's error code."""
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(engine, None, how, **what)
    assert caught.value.code == "context_length_exceeded"
    await wait_until_idle(engine)


async def test_malformed_body(engine: weft.Engine) -> None:
    """A body that is not a JSON object is a bad request."""
    for content in (b"{", b"[]", b"\xff"):
        with pytest.raises(openai.BadRequestError, match="JSON"):
            await openai_client(engine).post("/chat/completions", content=content, cast_to=httpx2.Response)


@every_method
async def test_another_model(engine: weft.Engine, how: str) -> None:
    """An unknown model gives 404, and the error names the engine's model."""
    with pytest.raises(openai.NotFoundError, match="tiny") as caught:
        await ask(engine, None, how, model="gpt-7")
    assert caught.value.code == "model_not_found"


async def test_another_path(engine: weft.Engine) -> None:
    """An unknown path gives 404, and the error names the paths that are served."""
    client = openai_client(engine)
    for call in (client.embeddings.create(model="m", input="x"), client.responses.create(model="m", input="x")):
        with pytest.raises(openai.NotFoundError, match="POST /chat/completions and GET /models"):
            await call


@every_method
async def test_program_has_ended(engine: weft.Engine, how: str) -> None:
    """A call after the end of its program gives 409, and is not retried."""
    async with weft.Program("over") as program:
        await ask(engine, program, "create")
    with pytest.raises(openai.ConflictError, match="over") as caught:
        await ask(engine, program, how)
    assert caught.value.code == "program_ended"
    assert len(program.graph) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_program_ends_during_the_call(engine: weft.Engine, stream: bool) -> None:
    """A call whose program ends gives 409, or an error event if its stream has begun."""

    async def call(program: weft.Program) -> None:
        client = openai_client(engine, program)
        request = {"model": engine.model, "messages": QUESTION, **endless()}
        if stream:
            async for _ in await client.chat.completions.create(stream=True, **request):
                pass
        else:
            await client.chat.completions.create(**request)

    async with weft.Program("short") as program:
        task = asyncio.create_task(call(program))
        await wait_until_generating(engine)
    with pytest.raises(openai.APIError, match="short") as caught:
        await task
    assert caught.value.code == "program_ended"
    assert isinstance(caught.value, openai.ConflictError) is not stream
    await wait_until_idle(engine)


async def test_another_engines_program(engine: weft.Engine) -> None:
    """A program that runs on another engine gives 409."""
    async with weft.Program() as program:
        program.reports.bind(RecordingBackend())
        with pytest.raises(openai.ConflictError) as caught:
            await ask(engine, program, "create")
    assert caught.value.code == "program_engine"


STATUSES: dict[str, tuple[WeftError, int, type[openai.APIStatusError], bool]] = {
    "invalid_request": (InvalidRequestError("no"), 400, openai.BadRequestError, False),
    "context_length_exceeded": (ContextLengthError("no."), 400, openai.BadRequestError, False),
    "program_ended": (ProgramEndedError("p", "name"), 409, openai.ConflictError, False),
    "program_engine": (ProgramEngineError("p", "name"), 409, openai.ConflictError, False),
    "model_not_found": (UnknownModelError("gpt", ["a"]), 404, openai.NotFoundError, False),
    "overloaded": (OverloadedError(9, 8, 0.01), 429, openai.RateLimitError, True),
    "deadline_exceeded": (DeadlineError("call", 2.0, 5), 504, openai.InternalServerError, False),
    "replica_lost": (ReplicaLostError("r", 3, 1), 503, openai.InternalServerError, True),
    "no_replica": (NoReplicaError("m", 9.0, None), 503, openai.InternalServerError, True),
    "call_failed": (CallFailedError("no"), 500, openai.InternalServerError, True),
    "call_retryable": (RetryableCallError("no"), 503, openai.InternalServerError, True),
    "engine_closed": (EngineClosedError(), 503, openai.InternalServerError, False),
    "engine_died": (EngineDiedError(), 503, openai.InternalServerError, False),
    "weft_error": (WeftError("no"), 500, openai.InternalServerError, False),
}


@pytest.mark.parametrize("code", STATUSES)
async def test_statuses(engine: weft.Engine, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Each of Weft's errors has a status and a code. A call is retried only if the user allows it and it may help."""
    error, status, kind, may_succeed = STATUSES[code]
    tries = []

    async def fail(*_args: Any) -> Any:
        tries.append(1)
        raise error

    monkeypatch.setattr(engine, "chat", fail)
    client = openai_client(engine)
    for retries, expected in ((0, 1), (1, 2 if may_succeed else 1)):
        tries.clear()
        with pytest.raises(kind) as caught:
            await client.with_options(max_retries=retries).chat.completions.create(
                model=engine.model, messages=QUESTION
            )
        assert (caught.value.status_code, caught.value.code, len(tries)) == (status, code, expected)
        assert str(error) in caught.value.message
    assert client.max_retries == 0
    assert error_response(error).json() == error_body(error)
    assert ("retry-after" in error_response(error).headers) == isinstance(error, OverloadedError)


def test_a_call_that_ends_each_replica_is_not_sent_again() -> None:
    """OpenAI's SDK sends a call again whose replica died, but not one that ended each replica on which it was tried."""
    answers = [error_response(ReplicaLostError("replica-1", 0, attempts)) for attempts in (1, 2, 3)]
    assert [each.headers["x-should-retry"] for each in answers] == ["true", "true", "false"]
