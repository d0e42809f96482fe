"""What it costs a program to go on at another replica of the same host, beside staying and computing again.

    python benchmarks/bench_move.py --out move.json

Two real replicas of the embedded model share host memory and have nothing else to do. A program makes a call with a
long prompt at one of them, then a call that adds a few words to it, in turns: at the same replica (*stays*), at the
other one, which copies the context (*moves*), and with a salt that finds nothing (*computes*). What is measured is the
time from the second call to its only token, as the program sees it. The copies are those of a CPU.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

import weft
from weft.core.sim.result import percentile

WAYS: Final = ("stays", "moves", "computes")
WORDS: Final = ("river", "stone", "lamp", "seven", "cloud", "paper", "green", "window", "salt", "morning", "hill")


async def call(engine: weft.AsyncMultiLLMEngine, program: weft.Program, text: str, salt: str = "") -> dict[str, Any]:
    """Make a call of one token, which comes after the program's earlier calls. Returns its account."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    identity = program.reports.start_call("run")
    answer = await engine.chat(body | ({"cache_salt": salt} if salt else {}), program, identity)
    program.reports.end_call("run", identity)
    return dict(answer["weft"])


async def turn_to(engine: weft.AsyncMultiLLMEngine, replica: str) -> None:
    """Let the next call go to this replica. The balancer takes turns, so a call that nobody needs may come before."""
    while True:
        with weft.Program("turn") as turn:
            await call(engine, turn, "hello")
            assert turn.row is not None  # noqa: S101  the program is open
            if turn.row.engine_ids != [replica]:
                return


async def measure(engine: weft.AsyncMultiLLMEngine, way: str, tokens: int, rng: random.Random) -> tuple[float, int]:
    """The seconds that a program's second call takes in one of the ways, and the prompt tokens that it computes."""
    first, second = (each.engine_id for each in engine.health()[engine.model])
    text = " ".join(rng.choices(WORDS, k=tokens))
    with weft.Program("moves") as program:
        await turn_to(engine, first)
        await call(engine, program, text)
        await turn_to(engine, second if way == "moves" else first)
        began_s = time.perf_counter()
        account = await call(engine, program, f"{text} and so on", "another" if way == "computes" else "")
        took_s = time.perf_counter() - began_s
    return took_s, account["prompt_tokens"] - account["cached_tokens"]


async def run(tokens: int, rounds: int, seed: int) -> dict[str, list[tuple[float, int]]]:
    """All rounds, the ways in turn; the first one of each is not counted."""
    rng = random.Random(seed)
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    async with await weft.AsyncMultiLLMEngine.create(
        replicas=2,
        balancer="round_robin",
        swap=weft.SwapConfig(space_gib=1.0, min_tokens=0),
        kv_policy="next-use",
        max_model_len=8192,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
    ) as engine:
        for _ in track(range(rounds + 1), "rounds"):
            for way in WAYS:
                found[way].append(await measure(engine, way, tokens, rng))
    return {way: values[1:] for way, values in found.items()}


def main(
    tokens: Annotated[int, typer.Option(min=16, help="Words of the prompt, a token or more each.")] = 1500,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each way.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the words.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Measure, print the table and write JSON."""
    found = asyncio.run(run(tokens, rounds, seed))
    table = Table(title=f"a second call after a prompt of {tokens} words, {rounds} rounds")
    for heading in ("way", "median ms", "p95 ms", "p99 ms", "tokens computed, median", "most"):
        table.add_column(heading)
    for way, values in found.items():
        times_ms = [1000 * took_s for took_s, _ in values]
        computed = [count for _, count in values]
        cells = (
            f"{value:.0f}" for value in (statistics.median(times_ms), *(percentile(times_ms, q) for q in (95, 99)))
        )
        table.add_row(way, *cells, f"{statistics.median(computed):.0f}", str(max(computed)))
    Console(width=100).print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "tokens": tokens, "seed": seed, "found": found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
