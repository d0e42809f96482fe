"""The swap on a real engine: what a preempted call computes again when it resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import weft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.anyio]  # it starts an engine of its own

BLOCK_TOKENS = 128  # vLLM's default on CPU
CONTEXT = " ".join(f"ship {n} passed the lighthouse at {n % 24} hours" for n in range(140))
LONG_TOKENS: Final = 400  # so many that short calls come before the last one on a busy machine, too


@pytest.fixture(scope="module")
def one_slot(tiny_model: Path) -> Iterator[weft.Engine]:
    """An engine that runs one call at a time and caches no prefixes, so a preempted call loses all its KV blocks."""
    from threads import one_thread
    from tiny_engine import ENGINE_ARGS

    arguments = {**ENGINE_ARGS, "max_num_seqs": 1, "max_model_len": 4096, "enable_prefix_caching": False}
    with one_thread():
        engine = weft.Engine(tiny_model, policy="atlas", **arguments)  # which preempts whatever it costs
    with engine:
        yield engine


async def ask(engine: weft.Engine, program: weft.Program, text: str, max_tokens: int, started: asyncio.Event) -> str:
    """The text of one streamed call. `started` is set when the first token has come."""
    identity = program.reports.start_call("run")
    sampling = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **sampling}
    pieces = []
    async for chunk in engine.chat_stream(body, program, identity):
        pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        started.set()
    program.reports.end_call("run", identity)
    return "".join(pieces)


async def ask_among_others(engine: weft.Engine) -> tuple[str, weft.ProgramRow]:
    """Run a long call of a program that has attained much service, and then three short programs, which preempt it."""
    with weft.Program("long") as program:
        program.reports.bind(engine.programs)
        row = engine.row(program.program_id)
        assert row is not None
        row.attained.service_s = 1000.0
        started = asyncio.Event()
        long = asyncio.create_task(ask(engine, program, CONTEXT, LONG_TOKENS, started))
        await started.wait()
        for number in range(3):
            with weft.Program(f"short {number}") as short:
                await ask(engine, short, "hello", 4, asyncio.Event())
        return await long, row


async def test_a_long_call_goes_on_where_it_was(one_slot: weft.Engine) -> None:
    """A call is preempted with more than 1,500 tokens. It computes less than a block again and gives the same text as
    undisturbed. Afterwards host memory is empty."""
    with weft.Program("alone") as program:
        alone = await ask(one_slot, program, CONTEXT, LONG_TOKENS, asyncio.Event())
    before = one_slot.swap_stats
    preempted, row = await ask_among_others(one_slot)
    assert preempted == alone
    account = row.account
    assert account.prompt_tokens > 1500
    assert account.preemptions >= 1
    assert account.recomputed_tokens < BLOCK_TOKENS
    assert account.swapped_tokens >= account.preemptions * 1500
    stats = one_slot.swap_stats
    assert before is not None
    assert stats is not None
    assert (stats.swaps_in - before.swaps_in, stats.used) == (account.preemptions, 0)


async def test_the_engine_measures_when_a_swap_pays(one_slot: weft.Engine) -> None:
    """After one call it knows the speeds of copies and of prefill, and so from how many tokens on a swap pays."""
    with weft.Program("any") as program:
        await ask(one_slot, program, "hello", 2, asyncio.Event())
    stats = one_slot.swap_stats
    assert stats is not None
    assert stats.prefill_tokens_per_s is not None
    assert stats.out_bytes_per_s is not None
    assert stats.in_bytes_per_s is not None
    assert 0 < stats.min_tokens < 1500
