"""`weft.Engine` on real vLLM with a tiny random Llama."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import weft
from weft.core.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDiedError,
    EngineStartError,
    InvalidIdError,
    InvalidRequestError,
    ModelNotFoundError,
    PolicyError,
    ProgramEndedError,
    ProgramEngineError,
    UnsupportedVllmError,
    VllmUnavailableError,
)
from weft.core.testing import RecordingBackend

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

LONG = {"max_tokens": 1500, "ignore_eos": True}


def body(text: str = "hello", **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **extra}


async def call(engine: weft.Engine, program: weft.Program, key: str = "run", **extra: Any) -> dict[str, Any]:
    """One call of a program, chained behind its earlier ones."""
    identity = program.start_call(key)
    answer = await engine.chat(body(**extra), program, identity)
    program.end_call(key, identity)
    return answer


async def reached(engine: weft.Engine) -> None:
    """Wait until vLLM has a request."""
    for _ in range(1000):
        if engine._llm.get_num_unfinished_requests():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the call never reached the engine")


async def settled(engine: weft.Engine) -> int:
    """Requests that vLLM still has after the abort had time to arrive."""
    for _ in range(50):
        if engine._llm.get_num_unfinished_requests() == 0 and not engine._in_flight:
            return 0
        await asyncio.sleep(0.02)
    return int(engine._llm.get_num_unfinished_requests())


# -- accounting


async def test_a_call_returns_its_account_and_the_table_folds_it_in(engine: weft.Engine) -> None:
    """What the calls report adds up to the program's row, to the microsecond."""
    with weft.Program("sum") as program:
        reports = [(await call(engine, program, text="hello " * n))["weft"] for n in (1, 5, 9)]
        row = program.row
        assert row is not None
        assert row.state is weft.ProgramState.IDLE
        engine.table.check_integrity()
    assert row.calls == 3
    assert row.attained.service_s == pytest.approx(sum(report["service_s"] for report in reports), abs=1e-6)
    assert row.attained.total_wait_s == pytest.approx(sum(report["wait_s"] for report in reports), abs=1e-6)
    assert all(report["service_s"] > 0 and report["output_tokens"] == 8 for report in reports)
    assert row.account.prompt_tokens == sum(report["prompt_tokens"] for report in reports)
    assert len(row.threads) == 1
    assert reports[1]["parents"] == (reports[0]["call_id"],)
    assert row.end_s > row.last_completion_s >= row.last_arrival_s >= row.start_s


async def test_parallel_calls_raise_service_by_the_longest_only(engine: weft.Engine) -> None:
    """Algorithm 1 line 4: the row's service is the critical path, its total the sum."""
    with weft.Program("parallel") as program:
        answers = await asyncio.gather(
            *(call(engine, program, f"run-{n}", max_tokens=20 * n, ignore_eos=True) for n in (1, 2, 3))
        )
        services = [answer["weft"]["service_s"] for answer in answers]
        assert program.attained.service_s == pytest.approx(max(services), abs=1e-6)
        assert program.attained.total_service_s == pytest.approx(sum(services), abs=1e-6)
        assert program.row is not None
        assert len(program.row.threads) == 3


async def test_waiting_is_measured_when_there_are_more_calls_than_slots(engine: weft.Engine) -> None:
    """Eight calls on four slots: some wait for others, and their wait is about the others' time."""
    with weft.Program("crowd") as program:
        answers = await asyncio.gather(
            *(call(engine, program, f"run-{n}", max_tokens=60, ignore_eos=True) for n in range(8))
        )
    waits = sorted(answer["weft"]["wait_s"] for answer in answers)
    services = [answer["weft"]["service_s"] for answer in answers]
    assert waits[-1] > 0.5 * min(services)
    assert waits[0] < 0.5 * min(services)


async def test_a_repeated_prompt_is_found_in_the_prefix_cache(engine: weft.Engine) -> None:
    """Cached tokens are reported with the call and in the table."""
    with weft.Program("cache") as program:
        text = "one two three four five " * 60
        first = await call(engine, program, text=text)
        second = await call(engine, program, text=text)
    assert first["weft"]["cached_tokens"] == 0
    assert second["weft"]["cached_tokens"] >= 128
    assert program.row is not None
    assert program.row.account.cached_tokens == second["weft"]["cached_tokens"]


async def test_samples_and_stop_strings_are_accounted_too(engine: weft.Engine) -> None:
    """n > 1 and a call that ends by a stop string in the front process both bring a full account."""
    with weft.Program("shapes") as program:
        many = await call(engine, program, n=3, temperature=1, max_tokens=10, ignore_eos=True)
        assert len(many["choices"]) == 3
        assert many["weft"]["output_tokens"] == 30
        stopped = await call(engine, program, max_tokens=200, stop=["a", "e", "i", "t"], ignore_eos=True)
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["weft"]["service_s"] > 0
        assert many["weft"]["service_s"] > 0


# -- streaming and sync


async def test_a_stream_gives_the_same_answer_and_account_as_a_whole(engine: weft.Engine) -> None:
    """Greedy decoding: the pieces joined are the whole; the finishing chunk carries the account."""
    with weft.Program("stream") as program:
        whole = await call(engine, program, max_tokens=30)
        identity = program.start_call("s")
        text, report, pieces = "", None, 0
        async for chunk in engine.chat_stream(body(max_tokens=30), program, identity):
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                pieces += 1
                report = chunk.get("weft", report)
    assert text == whole["choices"][0]["message"]["content"]
    assert pieces > 10
    assert report is not None
    assert report["service_s"] > 0
    assert program.row is not None
    assert program.row.calls == 2


async def test_sync_code_gets_the_same(engine: weft.Engine) -> None:
    """`chat_sync` and `chat_stream_sync` need no event loop."""

    def work() -> tuple[str, str]:
        with weft.Program("sync") as program:
            whole = engine.chat_sync(body(), program, program.start_call("a"))
            chunks = engine.chat_stream_sync(body(), program, program.start_call("b"))
            pieces = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
            return whole["choices"][0]["message"]["content"], "".join(pieces)

    whole, joined = await anyio.to_thread.run_sync(work)
    assert whole == joined != ""


async def test_one_engine_serves_several_event_loops(engine: weft.Engine) -> None:
    """A second `asyncio.run` in another thread uses the engine as the first did."""

    async def one() -> int:
        with weft.Program("loop") as program:
            return int((await call(engine, program))["usage"]["completion_tokens"])

    counts = [await anyio.to_thread.run_sync(lambda: asyncio.run(one())) for _ in range(2)]
    assert counts == [8, 8]


# -- the end of a program


@weft.program
async def runs_long(engine: weft.Engine, ready: asyncio.Event, program: weft.Program) -> None:
    """An entrypoint that leaves a call behind."""
    task = asyncio.create_task(call(engine, program, **LONG))
    await reached(engine)
    ready.set()
    await task


@weft.program
async def returns_early(engine: weft.Engine, late: list[asyncio.Task[Any]], program: weft.Program) -> str:
    """An entrypoint that forgets to await what it started."""
    late.append(asyncio.create_task(call(engine, program, **LONG)))
    await reached(engine)
    return "done"


@weft.program
async def raises_early(engine: weft.Engine, late: list[asyncio.Task[Any]], program: weft.Program) -> None:
    """An entrypoint that fails while a call runs."""
    await asyncio.gather(asyncio.sleep(0))
    late.append(asyncio.create_task(call(engine, program, **LONG)))
    await reached(engine)
    raise KeyError("lost")


@weft.program
async def streams(engine: weft.Engine, program: weft.Program) -> AsyncIterator[str]:
    """A generator that streams a long answer."""
    async for chunk in engine.chat_stream(body(**LONG), program, program.start_call("s")):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


@weft.program
def streams_sync(engine: weft.Engine, program: weft.Program) -> Iterator[str]:
    """The same without an event loop."""
    for chunk in engine.chat_stream_sync(body(**LONG), program, program.start_call("s")):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def last_state(engine: weft.Engine) -> weft.ProgramState:
    return engine.table.ended()[0].state


async def test_returning_aborts_what_is_in_flight(engine: weft.Engine) -> None:
    """The late call fails with a message that says why, and the engine runs nothing."""
    late: list[asyncio.Task[Any]] = []
    assert await returns_early(engine, late) == "done"
    assert len(engine.table) == 0
    with pytest.raises(ProgramEndedError, match="Await every task that the program starts"):
        await late[0]
    assert await settled(engine) == 0
    assert last_state(engine) is weft.ProgramState.FINISHED


async def test_raising_aborts_what_is_in_flight(engine: weft.Engine) -> None:
    """The entrypoint's own exception comes out, and the engine runs nothing."""
    late: list[asyncio.Task[Any]] = []
    with pytest.raises(KeyError, match="lost"):
        await raises_early(engine, late)
    with pytest.raises(ProgramEndedError):
        await late[0]
    assert await settled(engine) == 0
    assert last_state(engine) is weft.ProgramState.FAILED


@pytest.mark.parametrize("how", ["task.cancel", "wait_for", "move_on_after"])
async def test_cancelling_aborts_what_is_in_flight(engine: weft.Engine, how: str) -> None:
    """Whichever way the entrypoint is cancelled, the cancellation is not swallowed and the engine runs nothing."""
    ready = asyncio.Event()
    if how == "task.cancel":
        task = asyncio.create_task(runs_long(engine, ready))
        await ready.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "wait_for":
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(runs_long(engine, ready), 0.5)
    else:
        with anyio.move_on_after(0.5) as scope:
            await runs_long(engine, ready)
        assert scope.cancelled_caught
    assert await settled(engine) == 0
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_closing_an_async_generator_aborts_its_call(engine: weft.Engine) -> None:
    """`aclose` after the first piece."""
    stream = streams(engine)
    assert isinstance(await anext(stream), str)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await settled(engine) == 0
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_closing_a_sync_generator_aborts_its_call(engine: weft.Engine) -> None:
    """Breaking out of a `for` drops the generator, which closes it."""

    def take_two() -> None:
        for n, _ in enumerate(streams_sync(engine)):
            if n == 1:
                break

    await anyio.to_thread.run_sync(take_two)
    assert await settled(engine) == 0
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_an_aborted_stream_still_costs_its_program(engine: weft.Engine) -> None:
    """What was computed before the abort is attained service."""
    with weft.Program("abort") as program:
        stream = engine.chat_stream(body(**LONG), program, program.start_call("s"))
        for _ in range(6):
            await anext(stream)
        await stream.aclose()
        assert await settled(engine) == 0
        assert program.attained.service_s > 0


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_whose_program_ends_before_it_reaches_the_engine_is_told(
    engine: weft.Engine, streamed: bool
) -> None:
    """The engine's loop is busy, so nothing of the call has run yet: its caller does not wait for ever."""

    async def busy() -> None:
        time.sleep(1)  # noqa: ASYNC251  blocks the engine's event loop on purpose

    async def consume() -> None:
        if streamed:
            _ = [chunk async for chunk in engine.chat_stream(body(), program, program.start_call("s"))]
        else:
            await engine.chat(body(), program, program.start_call("s"))

    with weft.Program("too late") as program:
        engine._loop.submit(busy())
        task = asyncio.create_task(consume())
        await asyncio.sleep(0.1)
    with pytest.raises(ProgramEndedError):
        await asyncio.wait_for(task, 10)


# -- sessions


async def test_programs_of_one_session_share_it_and_the_last_one_ends_it(engine: weft.Engine) -> None:
    """start_session and end_session are issued by the programs."""
    with weft.Program("one", session_id="chat-7") as one:
        await call(engine, one)
        with weft.Program("two", session_id="chat-7") as two:
            await call(engine, two)
            assert engine.sessions == {"chat-7": {one.program_id, two.program_id}}
        assert engine.sessions == {"chat-7": {one.program_id}}
    assert engine.sessions == {}


async def test_many_programs_at_once_keep_their_own_books(engine: weft.Engine) -> None:
    """Twenty concurrent programs with one to four calls each: every call is in its own program's row."""

    async def agent(n: int) -> tuple[int, weft.ProgramRow | None]:
        with weft.Program(f"agent-{n}") as program:
            for _ in range(n % 4 + 1):
                await call(engine, program, max_tokens=4)
        return n, program.row

    for n, row in await asyncio.gather(*(agent(n) for n in range(20))):
        assert row is not None
        assert (row.info.name, row.calls) == (f"agent-{n}", n % 4 + 1)


# -- errors


async def test_a_prompt_over_the_models_length_says_so(engine: weft.Engine) -> None:
    """And says what to do, for a whole answer and for a stream; the program goes on."""
    with weft.Program("long") as program:
        with pytest.raises(ContextLengthError, match="Shorten the prompt"):
            await call(engine, program, text="hello " * 3000)
        with pytest.raises(ContextLengthError):
            async for _ in engine.chat_stream(body("hello " * 3000), program, program.start_call("s")):
                pass
        assert program.state is weft.ProgramState.IDLE
        assert (await call(engine, program))["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("extra", "told"),
    [({"temperature": "hot"}, "temperature"), ({"max_tokens": -1}, "max_tokens"), ({"messages": 3}, "malformed")],
)
async def test_a_malformed_request_names_the_field(engine: weft.Engine, extra: dict[str, Any], told: str) -> None:
    """A mistake in the request is the caller's, and is told as such."""
    with weft.Program("bad") as program, pytest.raises(InvalidRequestError, match=told):
        await engine.chat({**body(), **extra}, program, program.start_call("r"))


async def test_a_call_on_an_ended_program_is_refused(engine: weft.Engine) -> None:
    """Both when naming the call and when sending one that was named before."""
    with weft.Program("over") as program:
        identity = program.start_call("early")
    with pytest.raises(ProgramEndedError):
        program.start_call("late")
    with pytest.raises(ProgramEndedError):
        await engine.chat(body(), program, identity)


async def test_a_program_of_another_engine_is_refused(engine: weft.Engine) -> None:
    """One program runs on one engine."""
    with weft.Program("mine") as program:
        program.bind(RecordingBackend())
        with pytest.raises(ProgramEngineError, match="another engine"):
            await call(engine, program)


async def test_an_id_that_cannot_travel_is_refused(engine: weft.Engine) -> None:
    """At once, not by vLLM."""
    del engine
    with pytest.raises(InvalidIdError, match="session_id"):
        weft.Program(session_id="a\nb")


@pytest.mark.parametrize("model", ["/no/such/folder", "./neither", "."])
def test_an_unknown_model_folder_is_told_before_anything_starts(model: str) -> None:
    """The message offers the embedded model."""
    with pytest.raises(ModelNotFoundError, match="embedded SmolLM2"):
        weft.Engine(model)


def test_a_hub_name_that_cannot_be_fetched_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a hub in reach, as here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="no-such-org/no-such-model"):
        weft.Engine("no-such-org/no-such-model")


def test_arguments_that_vllm_does_not_have_or_refuses_are_typed_errors(tiny_model: Path) -> None:
    """Before any process starts."""
    with pytest.raises(EngineStartError, match="max_sequences"):
        weft.Engine(tiny_model, max_sequences=3)
    with pytest.raises(EngineStartError, match="max_model_len"):
        weft.Engine(tiny_model, max_model_len=10_000_000)
    with pytest.raises(PolicyError, match="unknown policy"):
        weft.Engine(tiny_model, policy="lottery")


@pytest.mark.parametrize(("version", "error"), [("0.31.0", UnsupportedVllmError), (None, VllmUnavailableError)])
def test_an_unsupported_vllm_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, version: str | None, error: type[Exception]
) -> None:
    """It names what to install."""
    from weft.engine.vllm_compat import version as compat

    monkeypatch.setattr(compat, "installed_vllm", lambda: version)
    with pytest.raises(error, match=r"weft\[cpu\]|vllm==0\.32"):
        compat.require_vllm()


async def test_an_engine_that_died_and_one_that_was_shut_down(tiny_model: Path) -> None:
    """kill -9 of its process: the call in flight and later ones say that it died; after shutdown, that it is closed."""
    import psutil
    from tiny_engine import ENGINE_ARGS

    engine = await weft.Engine.create(tiny_model, **ENGINE_ARGS)
    processes = [
        process for child in engine._children for process in psutil.Process(child.pid).children(recursive=True)
    ] + [psutil.Process(child.pid) for child in engine._children]
    try:
        with weft.Program("victim") as program:
            in_flight = asyncio.create_task(call(engine, program, **LONG))
            await reached(engine)
            for child in engine._children:
                psutil.Process(child.pid).kill()
            with pytest.raises(EngineDiedError, match="start a new one"):
                await asyncio.wait_for(in_flight, 30)
            with pytest.raises(EngineDiedError):
                await call(engine, program)
            assert not engine.is_alive
        assert len(engine.table) == 0
    finally:
        await anyio.to_thread.run_sync(engine.shutdown)
    with weft.Program("late") as late, pytest.raises(EngineClosedError):
        await call(engine, late)
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=20))
    assert alive == []
