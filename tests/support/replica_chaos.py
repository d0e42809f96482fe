"""Programs on two real replicas, one of which is killed. Every program's output is compared with the expected one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
from history import History, Lost
from polling import until

import weft
from weft.core.errors import ReplicaLostError
from weft.core.ids import EngineId

if TYPE_CHECKING:
    from weft.engine.host.frontend import FrontEnd

PROMPTS = [f"{word} " * (n + 1) for n, word in enumerate(["hello", "thanks", "tools", "answer", "weather", "city"])]
TOKENS = 40
CALLS = 3
# Tokens that may be generated without a chunk: vLLM waits for more if the text ends inside a UTF-8 character, which has
# up to four bytes.
HELD_BACK = 3


def body(text: str, *, max_tokens: int = TOKENS, **extra: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **extra,
    }


async def ask(engine: FrontEnd, program: weft.Program, text: str, key: str = "run", **extra: Any) -> dict[str, Any]:
    """Make one call, which comes after the program's earlier calls."""
    identity = program.reports.start_call(key)
    answer = await engine.chat(body(text, **extra), program, identity)
    program.reports.end_call(key, identity)
    return answer


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def references(engine: FrontEnd) -> dict[str, str]:
    """The output of each prompt."""
    with weft.Program("references") as program:
        return {text: content(await ask(engine, program, text)) for text in PROMPTS}


def replica_processes(engine: weft.AsyncMultiLLMEngine, engine_id: EngineId) -> list[psutil.Process]:
    """The engine process of a replica, followed by its workers."""
    replica = next(iter(engine._groups.values())).supervisor.replica(engine_id)
    assert replica is not None
    (process,) = [psutil.Process(each.pid) for each in replica._processes]
    return [process, *process.children(recursive=True)]


async def both_ready(engine: weft.AsyncMultiLLMEngine) -> None:
    """Wait until both replicas are ready."""
    await until(lambda: [health.state for health in engine.health()[engine.model]] == ["ready", "ready"])


@asynccontextmanager
async def stealing(engine: weft.AsyncMultiLLMEngine) -> AsyncIterator[None]:
    """Calls that wait move meanwhile."""
    from weft.core.routing.stealing import Stealing
    from weft.engine.replicas.stealer import Stealer

    group = engine._groups[engine.model]
    rule = Stealing(weft.StealingConfig(cooldown_s=0.1))
    stealer = Stealer(rule, group.states, group.supervisor.replica, group.llm.unanswered, engine.now_s)
    engine._loop.call_soon(stealer.watch)
    try:
        yield
    finally:
        await asyncio.wrap_future(engine.submit(stealer.stop()))


@dataclass
class Outcome:
    """The results of the programs of a round."""

    finished: int = 0  # programs
    lost: int = 0  # programs that ended with ReplicaLostError
    calls_done: int = 0
    wrong: list[str] = field(default_factory=list)  # a message for each wrong output
    history: History = field(default_factory=History)

    def note_row(self, program: weft.Program) -> None:
        assert program.row is not None
        attained = program.row.attained
        values = (attained.service_s, attained.total_service_s, attained.wait_s, attained.total_wait_s)
        self.history.add("row", program.program_id, value=values)

    def note_tokens(self, program: weft.Program, call_id: str, tokens: range) -> None:
        for token in tokens:
            self.history.add("token", program.program_id, call_id, token)


async def streaming_call(engine: FrontEnd, program: weft.Program, text: str, expected: str, outcome: Outcome) -> None:
    """Make a streamed call. If its replica is lost, check the beginning of the output and the error's token count."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    identity = program.reports.start_call("run")
    got, tokens = "", 0
    outcome.history.add("invoke", program.program_id, identity.call_id, TOKENS)
    try:
        stream = engine.chat_stream(body(text, stream_options=options), program, identity)
        async for chunk in stream:
            outcome.note_tokens(program, identity.call_id, range(tokens, chunk["usage"]["completion_tokens"]))
            tokens = chunk["usage"]["completion_tokens"]
            got += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except ReplicaLostError as error:
        if not max(tokens, 1) <= error.delivered_tokens <= min(tokens + HELD_BACK, TOKENS):
            outcome.wrong.append(f"{tokens} tokens were delivered, the error says {error.delivered_tokens}")
        if not expected.startswith(got.rstrip("\N{REPLACEMENT CHARACTER}")):
            outcome.wrong.append(f"{got!r} is not a beginning of {expected!r}")
        outcome.history.add("return", program.program_id, identity.call_id, Lost(tokens))
        raise
    outcome.history.add("return", program.program_id, identity.call_id, "finished")
    program.reports.end_call("run", identity)
    if got != expected or tokens != TOKENS:
        outcome.wrong.append(f"{got!r} ({tokens} tokens) instead of {expected!r}")


async def whole_call(engine: FrontEnd, program: weft.Program, text: str, outcome: Outcome) -> dict[str, Any]:
    """Make a call that is not streamed. Only three lost replicas could make it fail."""
    identity = program.reports.start_call("run")
    outcome.history.add("invoke", program.program_id, identity.call_id, TOKENS)
    answer = await engine.chat(body(text), program, identity)
    outcome.note_tokens(program, identity.call_id, range(answer["usage"]["completion_tokens"]))
    outcome.history.add("return", program.program_id, identity.call_id, "finished")
    program.reports.end_call("run", identity)
    return answer


async def agent(engine: FrontEnd, number: int, expected: dict[str, str], outcome: Outcome) -> None:
    """Run a program of a few calls, every other one streamed, until its end or an error."""
    with weft.Program(f"agent-{number}") as program:
        try:
            for step in range(CALLS):
                text = PROMPTS[(number + step) % len(PROMPTS)]
                if (number + step) % 2:
                    await streaming_call(engine, program, text, expected[text], outcome)
                else:
                    answer = await whole_call(engine, program, text, outcome)
                    if content(answer) != expected[text] or answer["usage"]["completion_tokens"] != TOKENS:
                        outcome.wrong.append(f"{content(answer)!r} instead of {expected[text]!r}")
                outcome.calls_done += 1
                outcome.note_row(program)
        except ReplicaLostError:
            outcome.lost += 1
        else:
            outcome.finished += 1
    outcome.history.add("close", program.program_id)


def note_attempts(history: History) -> Callable[[], None]:
    """Note each call that begins on a replica, until the returned function is called."""
    from weft.engine.replicas.local import LocalReplica
    from weft.engine.wire.call_header import decode_call

    generate = LocalReplica.generate

    def noting(self: LocalReplica, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        identity = decode_call(sampling_params.extra_args, request_id, None, is_trusted=True).identity
        history.add("attempt", identity.program_id, identity.call_id, self.engine_id)
        return generate(self, prompt, sampling_params, request_id, **kwargs)

    def restore() -> None:
        LocalReplica.generate = generate  # type: ignore[method-assign]

    LocalReplica.generate = noting  # type: ignore[assignment,method-assign]
    return restore


async def chaos_round(
    engine: weft.AsyncMultiLLMEngine,
    expected: dict[str, str],
    rng: random.Random,
    *,
    hangs: bool = False,
    programs: int = 60,
) -> Outcome:
    """Run `programs` programs at once, and kill one replica meanwhile, by its engine process or a worker.

    If it `hangs`, the process is not killed but stopped, as by SIGSTOP, and Weft must notice.
    """
    outcome = Outcome()
    victim = rng.choice([health.engine_id for health in engine.health()[engine.model]])
    deaths = {health.engine_id: health.deaths for health in engine.health()[engine.model]}
    after = rng.randrange(programs * CALLS // 2)

    async def kill() -> None:
        await until(lambda: outcome.calls_done >= after and in_flight(engine, victim) > 0)
        process = rng.choice(replica_processes(engine, victim))
        if hangs:
            process.suspend()
        else:
            process.kill()

    noted = note_attempts(outcome.history)
    async with asyncio.timeout(180), asyncio.TaskGroup() as tasks:
        tasks.create_task(kill())
        for number in range(programs):
            tasks.create_task(agent(engine, number, expected, outcome))
    noted()
    await both_ready(engine)
    for health in engine.health()[engine.model]:
        assert health.deaths - deaths[health.engine_id] == (health.engine_id == victim)
        assert not hangs or health.engine_id != victim or (health.reason or "").startswith("it hung: no answer")
    return outcome


def in_flight(engine: weft.AsyncMultiLLMEngine, engine_id: EngineId) -> int:
    return next(h.calls for replicas in engine.health().values() for h in replicas if h.engine_id == engine_id)


async def idle(engine: weft.AsyncMultiLLMEngine) -> None:
    """Wait until no call is in flight on any replica."""
    await until(lambda: not any(health.calls for health in engine.health()[engine.model]))


async def _known_to_schedulers(engine: weft.AsyncMultiLLMEngine, program: weft.Program) -> int:
    """The number of schedulers that know a program. They forget it."""
    from weft.engine.wire.control import ProgramsEnded, encode_control

    async def ask_all() -> list[Any]:
        message = encode_control(ProgramsEnded((program.program_id,)))
        replicas = [replica for group in engine._groups.values() for replica in group.supervisor.replicas()]
        return [await replica.send_to_scheduler(message) for replica in replicas]

    return sum(answer["ended"] for answer in await asyncio.wrap_future(engine._loop.submit(ask_all())))


async def assert_ended_programs_are_forgotten(engine: weft.AsyncMultiLLMEngine) -> None:
    """Every scheduler has forgotten a program that has ended, and one still knows a program that has not."""
    with weft.Program("over") as over:
        await ask(engine, over, "hello")
    with weft.Program("open") as still_open:
        await ask(engine, still_open, "hello")
        assert await _known_to_schedulers(engine, over) == 0, "its end was reported before"
        assert await _known_to_schedulers(engine, still_open) == 1


async def assert_idle(engine: weft.AsyncMultiLLMEngine) -> None:
    """Check that the table, the counts, the balancers and vLLM hold no call and no program."""
    balancers = [group.states.balancer for group in engine._groups.values()]
    # The counts and the balancers are updated on the engine's event loop, shortly before or after a call returns.
    await idle(engine)
    await until(lambda: not any(getattr(balancer, "_assigned", None) for balancer in balancers))
    engine.table.check_integrity()
    assert len(engine.table) == 0
    assert engine.sessions == {}
    assert len(engine._in_flight) == 0
    for group in engine._groups.values():
        assert group.endpoint.admission.calls == 0
        assert [health.calls for health in group.states.health(0.0)] == [0] * len(group.states)
        assert group.llm.failures == {}
        for replica in group.supervisor._replicas.values():
            assert replica.llm is not None
            assert replica.llm.get_num_unfinished_requests() == 0
