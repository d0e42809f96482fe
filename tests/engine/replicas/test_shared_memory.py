"""Programs that move between two real replicas of a tiny random Llama, which share host memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replica_chaos import ask, both_ready, content, replica_processes

import weft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]

BLOCK_TOKENS = 128
LONG = "one two three four five " * 60  # more than four blocks
ARGUMENTS: dict[str, Any] = {  # twenty blocks on the device
    "max_num_seqs": 2,
    "max_model_len": 1024,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 6 << 20,
}


@pytest.fixture
async def pair(tiny_model: Path) -> AsyncIterator[weft.AsyncMultiLLMEngine]:
    async with await weft.AsyncMultiLLMEngine.create(
        tiny_model,
        replicas=2,
        balancer="round_robin",
        swap=weft.SwapConfig(space_gib=0.05, min_tokens=0),
        kv_policy="next-use",
        hang_timeout_s=60.0,
        **ARGUMENTS,
    ) as engine:
        yield engine


async def push_out(engine: weft.AsyncMultiLLMEngine, replica: str) -> None:
    """Fill the KV cache of a replica, so that what other programs have there goes to host memory."""
    for number in range(7):
        await ask_at(engine, replica, weft.Program("other"), f"{number} seven eight nine ten eleven " * 60)


async def ask_at(
    engine: weft.AsyncMultiLLMEngine, replica: str, program: weft.Program, text: str, **extra: Any
) -> dict[str, Any]:
    """Make a call on this replica. The balancer takes turns, so calls that nobody needs come before it."""
    while True:
        with weft.Program("turn") as turn:
            await ask(engine, turn, "hello", max_tokens=1)
            row = turn.row
        assert row is not None
        if row.engine_ids != [replica] or engine.health()[engine.model][0].state != "ready":
            return await ask(engine, program, text, max_tokens=8, **extra)


async def test_a_program_that_moves_finds_its_kv_though_its_replica_has_died(pair: weft.AsyncMultiLLMEngine) -> None:
    """It computes what is new and at most a block. The replica that is started again finds it, too. The answers are
    those of an engine that computes everything. The balancer knows that programs take their KV along."""
    first, second = (each.engine_id for each in pair.health()[pair.model])
    assert pair._groups[pair.model].states.loads.moves_kv
    with weft.Program("moves") as program, weft.Program("reference") as reference:
        text = LONG
        await ask_at(pair, first, program, text)
        await push_out(pair, first)
        replica_processes(pair, first)[0].kill()
        for replica in (second, first):
            text += "six seven "
            answer = await ask_at(pair, replica, program, text)
            account = answer["weft"]
            assert account["fetched_tokens"] >= 4 * BLOCK_TOKENS
            assert account["prompt_tokens"] - account["cached_tokens"] < BLOCK_TOKENS
            assert replica in program.row.engine_ids  # type: ignore[union-attr]
            alone = await ask(pair, reference, text, max_tokens=8, cache_salt=replica.replace("/", "-"))
            assert alone["weft"]["cached_tokens"] == 0
            assert content(answer) == content(alone)
            await both_ready(pair)
            await push_out(pair, second)


async def test_a_program_finds_its_kv_though_its_replica_was_removed(pair: weft.AsyncMultiLLMEngine) -> None:
    """The replica had it on its device only, and copied it out before it ended."""
    first, second = (each.engine_id for each in pair.health()[pair.model])
    with weft.Program("moves") as program:
        await ask_at(pair, first, program, LONG)
        await pair.remove_replica(first)
        answer = await ask(pair, program, LONG + "six seven ", max_tokens=8)
        account = answer["weft"]
        assert account["fetched_tokens"] >= 4 * BLOCK_TOKENS
        assert account["prompt_tokens"] - account["cached_tokens"] < BLOCK_TOKENS
        assert program.row.engine_ids == [second]  # type: ignore[union-attr]


async def test_a_program_that_moves_finds_what_only_the_device_had(pair: weft.AsyncMultiLLMEngine) -> None:
    """Its replica, which is idle and has room for all, copies the context out because the program moves."""
    first, second = (each.engine_id for each in pair.health()[pair.model])
    with weft.Program("moves") as program, weft.Program("reference") as reference:
        text = LONG
        await ask_at(pair, first, program, text)
        for replica in (second, first, second):
            text += "six seven "
            answer = await ask_at(pair, replica, program, text)
            account = answer["weft"]
            assert account["prompt_tokens"] - account["cached_tokens"] < BLOCK_TOKENS
            assert program.row.engine_ids[-1] == replica  # type: ignore[union-attr]
            alone = await ask(pair, reference, text, max_tokens=8, cache_salt=f"{replica}{len(text)}".replace("/", "-"))
            assert alone["weft"]["cached_tokens"] == 0
            assert content(answer) == content(alone)
