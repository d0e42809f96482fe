"""`weft.AsyncMultiLLMEngine` on two real replicas of a tiny random Llama."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from background import is_background
from history import check
from polling import until
from replica_chaos import (
    HELD_BACK,
    PROMPTS,
    TOKENS,
    ask,
    assert_ended_programs_are_forgotten,
    assert_idle,
    body,
    both_ready,
    chaos_round,
    content,
    idle,
    in_flight,
    references,
    replica_processes,
    stealing,
)
from tiny_engine import ENDLESS_TOKENS, MAX_MODEL_LEN

import weft
from weft.core.errors import (
    BalancerError,
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    EngineStartError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ProgramEndedError,
    ReplicaError,
    ReplicaLostError,
    UnknownModelError,
)
from weft.core.ids import EngineId
from weft.views.top_client import StateClient

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

LONG_PROMPT = "one two three four five " * 40  # more tokens than THRESHOLD_TOKENS
THRESHOLD_TOKENS = 100
MAX_CALLS = 80
HANG_TIMEOUT_S = 10.0  # longer than any test stops both replicas


def shared_memory() -> set[str]:
    """The segments of shared memory. Folders there are those of other programs, which keep files in memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.is_file()}  # noqa: S108


def left_behind(before: set[str]) -> set[str]:
    """New segments that no process outside this tree uses, such as a background command or another run of the tests.

    Semaphores are left out, because they are mapped for moments only.
    """
    new, in_use = shared_memory() - before, set[str]()
    for process in set(psutil.process_iter()) - process_tree() - {psutil.Process()}:
        with suppress(OSError):  # the process has ended
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            in_use.update(re.findall(r"/dev/shm/(\S+)", maps))  # noqa: S108
    return {name for name in (new & shared_memory()) - in_use if not name.startswith("sem.")}


def process_tree() -> set[psutil.Process]:
    """The processes below this one, without background commands and Python's resource tracker, which stays."""
    return {
        process
        for process in psutil.Process().children(recursive=True)
        if not is_background(process) and "resource_tracker" not in " ".join(process.cmdline())
    }


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Iterator[weft.AsyncMultiLLMEngine]:
    """An engine with two replicas. When it is shut down, only their logs are left, and only if a replica has died."""
    from tiny_engine import ENGINE_ARGS

    memory, before = shared_memory(), process_tree()
    engine = weft.AsyncMultiLLMEngine(
        tiny_model,
        replicas=2,
        balancer=weft.BalancerConfig("locality", threshold_tokens=THRESHOLD_TOKENS),
        max_calls=MAX_CALLS,
        hang_timeout_s=HANG_TIMEOUT_S,
        swap=weft.SwapConfig(space_gib=0.1, min_tokens=0),  # what is there dies with a replica
        kv_policy="next-use",
        listen="127.0.0.1:0",
        **ENGINE_ARGS,
    )
    try:
        yield engine
    finally:
        health = engine.health()[engine.model]
        logs = [Path(each.log) for each in health if each.log is not None]
        processes = process_tree() - before
        engine.shutdown()
    engine.shutdown()
    with weft.Program("late") as program, pytest.raises(EngineClosedError):
        engine.chat_sync(body("hello"), program, program.reports.start_call("late"))
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.add_replica())
    assert not engine.is_alive
    assert not engine.is_ready
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []
    assert left_behind(memory) == set()
    has_died = any(each.deaths for each in health)
    assert logs
    assert {log.exists() for log in logs} == {has_died}
    for log in logs if has_died else ():
        assert log.suffix == ".log"
        log.unlink()


@pytest.fixture
async def pair(started: weft.AsyncMultiLLMEngine) -> AsyncIterator[weft.AsyncMultiLLMEngine]:
    """The engine. After each test both replicas are ready again, and no call is left."""
    yield started
    await both_ready(started)
    await assert_idle(started)


# -- replicas behind one engine


async def test_calls_are_spread_and_the_program_has_one_service(pair: weft.AsyncMultiLLMEngine) -> None:
    """Of four calls at once, two run on each replica. The row names both engines and adds up their accounts."""
    with weft.Program("wide") as program:
        answers = await asyncio.gather(*(ask(pair, program, "hello", f"run-{n}") for n in range(4)))
        row = program.row
        assert row is not None
        assert sorted(row.engine_ids) == sorted(health.engine_id for health in pair.health()[pair.model])
        assert row.account.service_s == pytest.approx(sum(answer["weft"]["service_s"] for answer in answers))
        assert row.attained.service_s == pytest.approx(max(answer["weft"]["service_s"] for answer in answers))
        pair.table.check_integrity()
    assert len({content(answer) for answer in answers}) == 1


async def test_attained_service_travels_to_both_replicas(
    pair: weft.AsyncMultiLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chain of calls that changes replicas, each scheduler also gets the service of the other one's calls."""
    from weft.engine.replicas.local import LocalReplica

    sent: list[tuple[str, float]] = []  # the replica and the attained service of each call
    generate = LocalReplica.generate

    def watched(self: LocalReplica, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append((self.engine_id, sampling_params.extra_args["service_s"]))
        return generate(self, prompt, sampling_params, *args, **kwargs)

    monkeypatch.setattr(LocalReplica, "generate", watched)
    with weft.Program("chain") as program:
        service = [(await ask(pair, program, "hello"))["weft"]["service_s"] for _ in range(4)]
        row = program.row
        assert row is not None
        assert row.attained.service_s == pytest.approx(sum(service)) == pytest.approx(row.attained.total_service_s)
    assert len({engine_id for engine_id, _ in sent}) == 2
    assert [service_s for _, service_s in sent] == pytest.approx([sum(service[:n]) for n in range(4)])


async def test_the_schedulers_forget_a_program_that_has_ended(pair: weft.AsyncMultiLLMEngine) -> None:
    """The end of a program reaches every scheduler process at once. A program that has not ended is still known."""
    await assert_ended_programs_are_forgotten(pair)


async def test_long_calls_stay_with_their_program_and_find_its_prefix(pair: weft.AsyncMultiLLMEngine) -> None:
    """A growing conversation stays on one replica, where its prefix is cached (Autellix, Algorithm 2)."""
    with weft.Program("conversation") as program:
        text, cached = f"{program.program_id} {LONG_PROMPT}", []  # no other test's prefix
        for _ in range(3):
            answer = await ask(pair, program, text, max_tokens=8)
            cached.append(answer["weft"]["cached_tokens"])
            text += "six seven eight nine " * 20
        assert program.row is not None
        assert len(program.row.engine_ids) == 1
    assert cached[0] == 0
    assert 128 <= cached[1] < cached[2]


async def test_an_engine_that_listens_shows_its_replicas_and_programs(pair: weft.AsyncMultiLLMEngine) -> None:
    """The schedulers say what runs where, and with how much KV. A program that is ended over HTTP ends everywhere."""
    async with weft.Program("seen") as program, StateClient(str(pair.url)) as client:
        running = [
            asyncio.ensure_future(ask(pair, program, "hello", f"run-{n}", max_tokens=ENDLESS_TOKENS)) for n in range(2)
        ]
        with anyio.fail_after(300):
            while True:  # what a scheduler said last may be of calls that have ended since
                state = await client.read()
                replicas = [(each.state, each.running, each.waiting, each.calls) for each in state.replicas]
                programs = [
                    (each.name, each.state, each.calls_in_flight, bool(each.kv_tokens)) for each in state.programs
                ]
                if (replicas, programs) == ([("ready", 1, 0, 1)] * 2, [("seen", "running", 2, True)]):
                    break
                await anyio.sleep(0.05)
        (seen,) = state.programs
        assert sorted(seen.engine_ids) == sorted(each.engine_id for each in state.replicas)
        assert seen.prompt_tokens > 0
        await client.end(program.program_id)
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, ProgramEndedError)
        assert (await client.read()).ended[0].program_id == program.program_id


async def test_calls_that_wait_move_to_the_idle_replica(
    pair: weft.AsyncMultiLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balancer gives all long calls of a program to one replica, which runs a few at once. The other takes more.

    Each call is answered once, and with what it would have got where it waited. Its account has the wait there, too.
    """
    from weft.engine.replicas.local import LocalReplica

    waited_s: dict[str, float] = {}  # by call, what the replica that took it was told
    generate = LocalReplica.generate

    def watched(self: LocalReplica, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        if "waited_s" in sampling_params.extra_args:
            waited_s[sampling_params.extra_args["call_id"]] = sampling_params.extra_args["waited_s"]
        return generate(self, prompt, sampling_params, *args, **kwargs)

    monkeypatch.setattr(LocalReplica, "generate", watched)
    with weft.Program("wide") as program:
        expected = content(await ask(pair, program, LONG_PROMPT))
        assert program.row is not None
        assert len(program.row.engine_ids) == 1
        async with stealing(pair):
            answers = await asyncio.gather(*(ask(pair, program, LONG_PROMPT, f"run-{n}") for n in range(24)))
        assert len(program.row.engine_ids) == 2
        assert len(program.graph.calls) == 25
    assert {content(answer) for answer in answers} == {expected}
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
    assert sum(health.stolen for health in pair.health()[pair.model]) > 0
    assert waited_s  # on a busy machine, also of calls that were sent late and did not move
    accounts = {answer["weft"]["call_id"]: answer["weft"] for answer in answers}
    assert all(accounts[call_id]["wait_s"] >= told_s for call_id, told_s in waited_s.items())


async def test_a_stream_sync_code_and_the_frameworks(pair: weft.AsyncMultiLLMEngine) -> None:
    """Every interface that takes a `weft.Engine` takes this engine, too, and gets the same answer."""
    from autogen_core.models import UserMessage
    from langchain_core.messages import HumanMessage

    from weft.integrations.autogen import WeftChatCompletionClient
    from weft.integrations.langchain import ChatWeft

    expected = (await references(pair))[PROMPTS[0]]
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
    with weft.Program("ways") as program:
        stream = pair.chat_stream(body(PROMPTS[0]), program, program.reports.start_call("a"))
        pieces = [choice["delta"].get("content") or "" async for chunk in stream for choice in chunk["choices"]]
        assert "".join(pieces) == expected
        identity = program.reports.start_call("b")
        whole = await anyio.to_thread.run_sync(pair.chat_sync, body(PROMPTS[0]), program, identity)
        assert content(whole) == expected
        model = ChatWeft(engine=pair, model_kwargs={"ignore_eos": True}, **options)
        assert (await model.ainvoke([HumanMessage(PROMPTS[0])], config=program.config())).content == expected
        client = weft.openai_client(pair, program)
        completion = await client.chat.completions.create(
            model=pair.model,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            extra_body={"ignore_eos": True},
            **options,
        )
        assert completion.choices[0].message.content == expected
        autogen = WeftChatCompletionClient(pair, ignore_eos=True, **options).bind(program, agent="one")
        created = await autogen.create([UserMessage(content=PROMPTS[0], source="user")])
        assert created.content == expected
    assert pair.tokenize("hello") != []
    assert pair.max_model_len == MAX_MODEL_LEN
    assert pair.is_alive
    assert pair.is_ready


async def test_a_cancelled_call_is_aborted_where_it_runs(pair: weft.AsyncMultiLLMEngine) -> None:
    """The call is no longer in flight on its replica."""
    with weft.Program("cancelled") as program:
        task = asyncio.create_task(ask(pair, program, "hello", max_tokens=ENDLESS_TOKENS))
        await until(lambda: any(health.calls for health in pair.health()[pair.model]))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(pair)


# -- back-pressure, deadlines, wrong requests


@contextmanager
def suspended(engine: weft.AsyncMultiLLMEngine) -> Iterator[None]:
    """No call on any replica makes progress, so every deadline passes before its call ends."""
    processes = [replica_processes(engine, health.engine_id)[0] for health in engine.health()[engine.model]]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def test_too_many_calls_are_refused_with_a_hint(pair: weft.AsyncMultiLLMEngine) -> None:
    """Two replicas take 80 calls each. Of 170 calls at once, ten fail with a time to wait, and 160 are answered."""
    with weft.Program("crowd") as program:
        with suspended(pair):  # no call ends before the last one has begun
            calls = [
                asyncio.create_task(ask(pair, program, "hello", f"run-{n}", max_tokens=2))
                for n in range(2 * MAX_CALLS + 10)
            ]
            await asyncio.sleep(0)
        results = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert len(refused) == 10
        assert all(0 < error.retry_after_s <= 60 for error in refused)
        assert all(isinstance(result, dict) for result in results if not isinstance(result, OverloadedError))
        assert content(await ask(pair, program, "hello", max_tokens=2))


async def test_a_call_that_takes_too_long_is_ended(pair: weft.AsyncMultiLLMEngine) -> None:
    """The request gives `timeout_s`. For whole and streamed answers the error says how much was delivered."""
    with weft.Program("slow") as program:
        with suspended(pair), pytest.raises(DeadlineError, match=r"the call was not done within 0\.5 s") as caught:
            await ask(pair, program, "hello", max_tokens=ENDLESS_TOKENS, timeout_s=0.5)
        assert caught.value.delivered_tokens == 0
        options = {"include_usage": True, "continuous_usage_stats": True}
        request = body("hello", max_tokens=ENDLESS_TOKENS, timeout_s=3, stream_options=options)
        stream = pair.chat_stream(request, program, program.reports.start_call("s"))
        tokens = [0]

        async def read() -> None:
            async for chunk in stream:
                tokens.append(chunk["usage"]["completion_tokens"])  # noqa: PERF401  the chunks before an error are kept

        while tokens[-1] == 0:
            tokens.append((await anext(stream))["usage"]["completion_tokens"])
        with suspended(pair), pytest.raises(DeadlineError) as caught:
            await read()
        assert 0 < tokens[-1] <= caught.value.delivered_tokens <= tokens[-1] + 1 + HELD_BACK
        with pytest.raises(InvalidRequestError, match="timeout_s must be a number"):
            await ask(pair, program, "hello", timeout_s="soon")


async def test_a_program_that_takes_too_long_is_ended(pair: weft.AsyncMultiLLMEngine) -> None:
    """`timeout_s` in the program's metadata counts from its first call. Afterwards none of its calls begins."""
    with weft.Program("slow", metadata={"timeout_s": 3.0}) as program:
        await ask(pair, program, "hello", max_tokens=2)
        with suspended(pair), pytest.raises(DeadlineError, match="the program was not done within 3 s"):
            await ask(pair, program, "hello", max_tokens=ENDLESS_TOKENS)
        with pytest.raises(DeadlineError, match="the program"):
            await ask(pair, program, "hello", max_tokens=1)


async def test_wrong_requests_fail_once_and_kill_nothing(pair: weft.AsyncMultiLLMEngine) -> None:
    """No other replica is tried, because the request itself is wrong."""
    with weft.Program("wrong") as program:
        with pytest.raises(ContextLengthError):
            await ask(pair, program, "hello " * pair.max_model_len)
        with pytest.raises(InvalidRequestError):
            await ask(pair, program, "hello", temperature=-1)
        with pytest.raises(UnknownModelError, match="'gpt-4' is not served here"):
            await ask(pair, program, "hello", model="gpt-4")
        assert content(await ask(pair, program, "hello", model=pair.model))
    assert [health.deaths for health in pair.health()[pair.model]] == [0, 0]


# -- replicas die, are removed and added


@pytest.mark.slow  # in `make test`, tests/simulated tests the same with simulated replicas
async def test_a_replica_hangs_and_is_killed_under_sixty_programs(
    pair: weft.AsyncMultiLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Every program finishes or gets the number of tokens delivered. No answer is lost, repeated or left behind.

    One process of the replica is stopped. Weft notices and kills the replica, so this is a test of a death, too. The
    log has it in one line, without a traceback.
    """
    seen = await chaos_round(pair, await references(pair), random.Random(7), hangs=True)
    assert seen.wrong == []
    assert seen.finished + seen.lost == 60
    assert seen.finished > 10, "the other replica serves on"
    assert check(seen.history.events) == []
    said = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("replica died ") for message in said) == 1, said
    assert not [record for record in caplog.records if record.exc_info]
    attempts = Counter(event.call for event in seen.history.events if event.kind == "attempt")
    # A preemptive policy may have given a part of its answer to every call; then none can move.
    assert max(attempts.values()) > 1 or seen.lost > 0, "the death met calls"
    with weft.Program("after") as program:  # both replicas take calls again
        await asyncio.gather(*(ask(pair, program, "hello", f"run-{n}") for n in range(4)))
        assert program.row is not None
        assert len(program.row.engine_ids) == 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_twenty_rounds_of_kills(pair: weft.AsyncMultiLLMEngine) -> None:
    """Random replicas and random processes of them are killed, at random moments; some hang."""
    rng, expected = random.Random(11), await references(pair)
    for number in range(20):
        seen = await chaos_round(pair, expected, rng, hangs=number % 4 == 0)
        assert seen.wrong == []
        assert seen.finished + seen.lost == 60
        assert check(seen.history.events) == []
        await assert_idle(pair)


@pytest.mark.soak  # in `make test`, tests/engine/replicas/test_routing.py tests the same with fake replicas
async def test_the_programs_of_a_dead_replica_are_assigned_again(pair: weft.AsyncMultiLLMEngine) -> None:
    """The replica's KV is gone, so the row no longer names it. A stream fails with a count; the next call works."""
    with weft.Program("pinned") as program:
        assert program.row is None
        await ask(pair, program, LONG_PROMPT, max_tokens=2)
        assert program.row is not None
        (home,) = program.row.engine_ids
        stream = pair.chat_stream(
            body(LONG_PROMPT, max_tokens=ENDLESS_TOKENS), program, program.reports.start_call("s")
        )
        for _ in range(5):
            await anext(stream)
        waiting = asyncio.create_task(ask(pair, program, LONG_PROMPT, "other", max_tokens=400))
        await until(lambda: in_flight(pair, home) == 2)
        replica_processes(pair, home)[0].kill()
        with pytest.raises(ReplicaLostError, match=rf"replica {home} died") as caught:
            async for _ in stream:
                pass
        assert 0 < caught.value.delivered_tokens < ENDLESS_TOKENS
        assert (await waiting)["usage"]["completion_tokens"] == 400
        assert home not in program.row.engine_ids
        (other,) = program.row.engine_ids
        await both_ready(pair)
        await ask(pair, program, LONG_PROMPT, max_tokens=2)
        assert program.row.engine_ids == [other]


@pytest.mark.soak  # with fake replicas in tests/engine/replicas/test_routing.py
async def test_a_replica_is_drained_and_another_one_added(pair: weft.AsyncMultiLLMEngine) -> None:
    """The drained replica finishes its calls and gets no new ones. The added replica has a new name."""
    names = [health.engine_id for health in pair.health()[pair.model]]
    with weft.Program("drained") as program:
        stream = pair.chat_stream(body("hello", max_tokens=300), program, program.reports.start_call("s"))
        first = await anext(stream)
        assert program.row is not None
        (leaving,) = program.row.engine_ids
        processes = replica_processes(pair, leaving)
        removing = asyncio.create_task(pair.remove_replica(leaving))
        await until(lambda: "draining" in [health.state for health in pair.health()[pair.model]])
        with pytest.raises(ReplicaError, match="being removed already"):
            await pair.remove_replica(leaving)
        (remaining,) = set(names) - {leaving}
        with pytest.raises(ReplicaError, match="is the last replica"):
            await pair.remove_replica(remaining)
        await asyncio.gather(*(ask(pair, program, "hello", f"run-{n}", max_tokens=2) for n in range(3)))
        assert in_flight(pair, leaving) == 1
        text = [c["delta"].get("content") or "" for chunk in [first] for c in chunk["choices"]]
        text += [c["delta"].get("content") or "" async for chunk in stream for c in chunk["choices"]]
        assert len("".join(text)) > 300
        await removing
        assert program.row.engine_ids == [remaining]
    assert [health.engine_id for health in pair.health()[pair.model]] == [remaining]
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=120))
    assert alive == []
    added = await pair.add_replica()
    assert added not in names
    assert [health.state for health in pair.health()[pair.model]] == ["ready", "ready"]
    with pytest.raises(ReplicaError, match="no replica 'engine-x/9'; there are: engine-"):
        await pair.remove_replica(EngineId("engine-x/9"))


# -- start, several models, shutdown


def test_arguments_that_make_no_sense_are_refused_before_anything_starts(tiny_model: Path) -> None:
    """Zero replicas, an unknown balancer, a model that does not exist, and two models of one name are refused."""
    with pytest.raises(ReplicaError, match="has 0 replicas; give it 1 or more"):
        weft.AsyncMultiLLMEngine(tiny_model, replicas=0)
    with pytest.raises(BalancerError, match="unknown balancer 'best'"):
        weft.AsyncMultiLLMEngine(tiny_model, balancer="best")
    with pytest.raises(ModelNotFoundError):
        weft.AsyncMultiLLMEngine("/there/is/none")
    with pytest.raises(ReplicaError, match="same name"):
        weft.AsyncMultiLLMEngine(models=[weft.ServedModel(tiny_model), weft.ServedModel(tiny_model)])
    with pytest.raises(ReplicaError, match="max_calls is 0"):
        weft.AsyncMultiLLMEngine(tiny_model, max_calls=0)
    with pytest.raises(EngineStartError, match="max_sequences"):
        weft.AsyncMultiLLMEngine(tiny_model, max_sequences=3)


def test_a_replica_that_never_becomes_ready_names_its_log(tiny_model: Path) -> None:
    """The timeout ends the replica's processes and keeps its log."""
    from tiny_engine import ENGINE_ARGS

    before = process_tree()
    with pytest.raises(EngineStartError, match=r"not ready within 2 s\. Its log, (\S+),") as caught:
        weft.AsyncMultiLLMEngine(tiny_model, start_timeout_s=2.0, swap=None, **ENGINE_ARGS)
    log = Path(str(caught.value).split("Its log, ")[1].split(",")[0])
    assert log.is_file()
    _, alive = psutil.wait_procs(process_tree() - before, timeout=120)
    assert alive == []


_TWO_MODELS = """
import asyncio, json, sys
import psutil
import weft

ARGS = dict(max_num_seqs=2, max_model_len=512, enforce_eager=True, use_tqdm_on_load=False,
            kv_cache_memory_bytes=64 << 20, swap=None)

async def main():
    models = [weft.ServedModel(sys.argv[1], name="one"), weft.ServedModel(sys.argv[2], name="two")]
    engine = await weft.AsyncMultiLLMEngine.create(models=models, **ARGS)
    answers = {}
    async def ask(program, model):
        request = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
        request |= {"model": model} if model else {}
        answer = await engine.chat(request, program, program.reports.start_call(model or "none"))
        answers[model or "none"] = [answer["model"], answer["choices"][0]["message"]["content"]]
    with weft.Program("both") as program:
        for model in ("one", "two", None):
            await ask(program, model)
        engines = program.row.engine_ids
        service_s, calls = program.attained.total_service_s, program.row.calls
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    print(json.dumps({"answers": answers, "engines": engines, "models": engine.models, "calls": calls,
                      "service_s": service_s, "children": children}))
    globals()["engine"] = engine  # the interpreter exits without engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.soak
def test_two_models_together_and_an_engine_without_shutdown_ends_with_its_host(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A call names its model. A program that uses both models has one row. No process outlives the interpreter."""
    from tiny_engine import make_tiny_llama

    other = make_tiny_llama(tmp_path / "other", seed=1)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_TWO_MODELS))
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model), str(other)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["models"] == ["one", "two"]
    assert {model: name for model, (name, _) in seen["answers"].items()} == {"one": "one", "two": "two", "none": "one"}
    texts = {model: text for model, (_, text) in seen["answers"].items()}
    assert texts["one"] == texts["none"] != texts["two"]
    assert len(seen["engines"]) == 2
    assert (seen["calls"], seen["service_s"] > 0) == (3, True)
    anyio.run(until, lambda: not any(map(psutil.pid_exists, seen["children"])))
    assert "Traceback" not in done.stderr
