"""Programs on two real replicas, one of which is killed: what each of them got, against what it should have got."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

import weft
from weft.core.errors import ReplicaLostError
from weft.core.ids import EngineId

PROMPTS = [f"{word} " * (n + 1) for n, word in enumerate(["hello", "thanks", "tools", "answer", "weather", "city"])]
TOKENS = 40
CALLS = 3
# vLLM sends no chunk for a token that gives no text yet, as one that ends within a UTF-8 character of four bytes.
HELD_BACK = 3


def body(text: str, *, max_tokens: int = TOKENS, **extra: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **extra,
    }


async def ask(engine: weft.Engine, program: weft.Program, text: str, key: str = "run", **extra: Any) -> dict[str, Any]:
    """One call, chained behind the program's earlier ones."""
    identity = program.start_call(key)
    answer = await engine.chat(body(text, **extra), program, identity)
    program.end_call(key, identity)
    return answer


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def references(engine: weft.Engine) -> dict[str, str]:
    """What each prompt gives."""
    with weft.Program("references") as program:
        return {text: content(await ask(engine, program, text)) for text in PROMPTS}


def replica_processes(engine: weft.AsyncMultiLLMEngine, engine_id: EngineId) -> list[psutil.Process]:
    """A replica's engine process, and then its workers."""
    replica = next(iter(engine._groups.values())).supervisor.replica(engine_id)
    (process,) = [psutil.Process(each.pid) for each in replica._processes]
    return [process, *process.children(recursive=True)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that tells nobody when it happens; two minutes at most."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def both_ready(engine: weft.AsyncMultiLLMEngine) -> None:
    """Wait until two replicas serve."""
    await until(lambda: [health.state for health in engine.health()[engine.model]] == ["ready", "ready"])


@dataclass
class Outcome:
    """What came of the programs of a round."""

    finished: int = 0
    lost: int = 0
    calls_done: int = 0
    wrong: list[str] = field(default_factory=list)


async def streaming_call(engine: weft.Engine, program: weft.Program, text: str, expected: str, seen: Outcome) -> None:
    """A stream: whole, or a beginning of it and an error that counts rightly."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    identity = program.start_call("run")
    got, tokens = "", 0
    try:
        stream = engine.chat_stream(body(text, stream_options=options), program, identity)
        async for chunk in stream:
            tokens = chunk["usage"]["completion_tokens"]
            got += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except ReplicaLostError as error:
        if not max(tokens, 1) <= error.delivered_tokens <= min(tokens + HELD_BACK, TOKENS):
            seen.wrong.append(f"{tokens} tokens were delivered, the error says {error.delivered_tokens}")
        if not expected.startswith(got.rstrip("\N{REPLACEMENT CHARACTER}")):
            seen.wrong.append(f"{got!r} is no beginning of {expected!r}")
        raise
    program.end_call("run", identity)
    if got != expected or tokens != TOKENS:
        seen.wrong.append(f"{got!r} ({tokens} tokens) instead of {expected!r}")


async def agent(engine: weft.Engine, number: int, expected: dict[str, str], seen: Outcome) -> None:
    """A program of a few calls, every other one streamed; it ends at an error."""
    with weft.Program(f"agent-{number}") as program:
        try:
            for step in range(CALLS):
                text = PROMPTS[(number + step) % len(PROMPTS)]
                if (number + step) % 2:
                    await streaming_call(engine, program, text, expected[text], seen)
                else:
                    answer = await ask(engine, program, text)
                    if content(answer) != expected[text] or answer["usage"]["completion_tokens"] != TOKENS:
                        seen.wrong.append(f"{content(answer)!r} instead of {expected[text]!r}")
                seen.calls_done += 1
        except ReplicaLostError:
            seen.lost += 1
        else:
            seen.finished += 1


async def chaos_round(
    engine: weft.AsyncMultiLLMEngine, expected: dict[str, str], rng: random.Random, programs: int = 60
) -> Outcome:
    """`programs` at once; somewhere on the way one replica is killed, in its engine process or in a worker."""
    seen = Outcome()
    victim = rng.choice([health.engine_id for health in engine.health()[engine.model]])
    deaths = {health.engine_id: health.deaths for health in engine.health()[engine.model]}
    after = rng.randrange(programs * CALLS // 2)

    async def kill() -> None:
        await until(lambda: seen.calls_done >= after and in_flight(engine, victim) > 0)
        rng.choice(replica_processes(engine, victim)).kill()

    async with asyncio.timeout(180), asyncio.TaskGroup() as tasks:
        tasks.create_task(kill())
        for number in range(programs):
            tasks.create_task(agent(engine, number, expected, seen))
    await both_ready(engine)
    for health in engine.health()[engine.model]:
        assert health.deaths - deaths[health.engine_id] == (health.engine_id == victim)
    return seen


def in_flight(engine: weft.AsyncMultiLLMEngine, engine_id: EngineId) -> int:
    return next(h.calls for replicas in engine.health().values() for h in replicas if h.engine_id == engine_id)


async def idle(engine: weft.AsyncMultiLLMEngine) -> None:
    """Wait until no call is in flight on any replica."""
    await until(lambda: not any(health.calls for health in engine.health()[engine.model]))


async def assert_idle(engine: weft.AsyncMultiLLMEngine) -> None:
    """Nothing is left of calls and programs: in the table, in the counts, in the balancers, in vLLM."""
    balancers = [group.states.balancer for group in engine._groups.values()]
    # Both are told to the engine's event loop, a moment before or after the caller hears of it.
    await idle(engine)
    await until(lambda: not any(getattr(balancer, "_assigned", None) for balancer in balancers))
    engine.table.check_integrity()
    assert len(engine.table) == 0
    assert engine.sessions == {}
    assert engine._in_flight == {}
    for group in engine._groups.values():
        assert group.endpoint.admission.calls == 0
        assert [health.calls for health in group.states.health(0.0)] == [0] * len(group.states)
        assert group.llm.failures == {}
        for replica in group.supervisor._replicas.values():
            assert replica.llm is not None
            assert replica.llm.get_num_unfinished_requests() == 0
