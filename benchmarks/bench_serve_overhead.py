"""What `weft serve` costs a call: the same calls through it and through vLLM's own server, in turns.

    python benchmarks/bench_serve_overhead.py --out serve_overhead.json

Two servers run at once: vLLM's, with its own scheduler, and `weft serve` with its default policy. One client sends the
same calls to both, a block of calls to one and then to the other, in an order that a seed decides. Before each block is
a pause, because vLLM's processes spin on a core for a second after their last message: of two servers that are used at
once, each waits for the other's. The model is the tests' tiny random Llama, whose steps take 2 ms, or with
`--model embedded` the embedded one.

Requests are of three kinds: a whole answer, a stream, and a conversation of four turns without ids, which `weft serve`
has to recognise. The figure of a round is the ratio of the quantiles of its calls. The median of the rounds is
reported, with the lowest and the highest. p10 and the CPU time of a call depend less on other work on the machine. So
they are reported too, the CPU time for the process that serves HTTP and for the engine below it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import psutil
import typer
from common import machine, pyplot, spread
from http_servers import MODEL, Capacity, vllm_server, weft_server
from rich.console import Console
from rich.table import Table

from weft.engine.models.embedded import embedded_model
from weft.engine.models.tiny import make_tiny_llama

CAPACITY: Final = Capacity(slots=4, kv_tokens=32_768, chunk_tokens=2048, max_model_len=2048)
KINDS: Final = ("whole", "stream", "turns")
TURNS: Final = 4
WARM_UP_CALLS: Final = 20
BLOCK: Final = 20  # calls to one server; whole conversations
PAUSE_S: Final = 1.5
SHARES: Final = {"p10": 0.10, "p50": 0.50, "p95": 0.95, "p99": 0.99}

PARTS: Final = ("http", "engine")

Seconds = dict[str, list[float]]  # of each call, by server


class Model(StrEnum):
    """What both servers serve."""

    TINY = "tiny"
    EMBEDDED = "embedded"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def call(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, str]:
    """Seconds from the request to the last byte of the answer, and the answer's text."""
    began_s = time.perf_counter()
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        data = await response.read()
    took_s = time.perf_counter() - began_s
    response.raise_for_status()
    if body.get("stream"):
        return took_s, ""
    return took_s, json.loads(data)["choices"][0]["message"]["content"]


async def block(client: aiohttp.ClientSession, url: str, kind: str, count: int, seed: str) -> list[float]:
    """Send so many calls of a kind to one server; the seconds of each. One before them is not counted."""
    rng = random.Random(seed)
    seconds: list[float] = []
    messages: list[dict[str, str]] = []
    for number in range(-1, count):
        if kind != "turns" or number % TURNS == 0 or number < 0:
            messages = [{"role": "user", "content": " ".join(f"w{rng.randrange(10_000)}" for _ in range(30))}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        took_s, text = await call(client, url, {**body, "stream": kind == "stream"})
        if number >= 0:
            seconds.append(took_s)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
    return seconds


def cpu_s(server: psutil.Process) -> Counter[str]:
    """CPU seconds so far of a server's own process, and of all below it."""
    own, *below = (sum(each.cpu_times()[:2]) for each in (server, *server.children(recursive=True)))
    return Counter(dict(zip(PARTS, (own, sum(below)), strict=True)))


async def measure(
    urls: dict[str, str],
    servers: dict[str, psutil.Process],
    blocks: int,
    rounds: int,
    seed: int,
    tell: Callable[[str], None],
) -> list[Any]:
    """All rounds of all kinds: the quantiles of each server in milliseconds, and their ratios."""
    rows = []
    async with aiohttp.ClientSession() as client:
        for kind in KINDS:
            for url in urls.values():
                await block(client, url, kind, WARM_UP_CALLS, "warm up")
        for number in range(rounds):
            for kind in KINDS:
                row: dict[str, Any] = {"round": number, "kind": kind, "calls": blocks * BLOCK}
                found: Seconds = {name: [] for name in urls}
                spent_s: dict[str, Counter[str]] = {name: Counter() for name in urls}
                for each in range(blocks):
                    block_seed = f"{kind} {seed + number} {each}"
                    for name in random.Random(block_seed).sample(list(urls), len(urls)):
                        await asyncio.sleep(PAUSE_S)
                        before_s = cpu_s(servers[name])
                        found[name] += await block(client, urls[name], kind, BLOCK, block_seed)
                        spent_s[name] += cpu_s(servers[name]) - before_s
                for name, parts in spent_s.items():
                    row[f"cpu_ms_{name}"] = {part: round(1e3 * parts[part] / row["calls"], 3) for part in PARTS}
                for name, share in SHARES.items():
                    by_server = {server: quantile(seconds, share) for server, seconds in found.items()}
                    row[name] = {server: round(1e3 * value, 3) for server, value in by_server.items()}
                    row[f"{name}_ratio"] = round(by_server["weft"] / by_server["vllm"], 4)
                rows.append(row)
                tell(f"{number} {kind}: p50 {row['p50']} ms, CPU {row['cpu_ms_vllm']}, {row['cpu_ms_weft']} ms a call")
    return rows


def shown(rows: list[Any]) -> Table:
    """Median (lowest, highest) of the rounds."""
    servers = ("vllm", "weft")
    columns = [f"{server} {what}" for what in ("p50 ms", "CPU ms: http", "engine") for server in servers]
    table = Table("calls", *columns, *(f"{name} ratio" for name in SHARES))
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        cells = [f"{statistics.median(row['p50'][server] for row in mine):.2f}" for server in servers]
        for part in ("http", "engine"):
            cells += [f"{statistics.median(row[f'cpu_ms_{server}'][part] for row in mine):.2f}" for server in servers]
        table.add_row(kind, *cells, *(spread([row[f"{name}_ratio"] for row in mine]) for name in SHARES))
    return table


def draw(rows: list[Any], path: Path) -> None:
    """The ratios of the rounds, by kind and quantile."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3))
    for place, name in enumerate(SHARES):
        for offset, kind in enumerate(KINDS):
            ratios = [row[f"{name}_ratio"] for row in rows if row["kind"] == kind]
            x = place + (offset - 1) * 0.2
            axes.plot([x] * len(ratios), ratios, "o", color=f"C{offset}", alpha=0.5, label=kind if not place else None)
            axes.plot([x - 0.06, x + 0.06], [statistics.median(ratios)] * 2, color="black")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axhline(1.05, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(SHARES)), SHARES)
    axes.set_ylabel("weft serve ÷ vLLM's server")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main(
    out: Annotated[Path, typer.Option(help="A JSON file; the plot is written next to it.")] = Path("overhead.json"),
    blocks: Annotated[int, typer.Option(min=1, help=f"Blocks of {BLOCK} calls of each kind in a round.")] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts and the order.")] = 0,
    model: Annotated[Model, typer.Option(help="What the servers serve.")] = Model.TINY,
) -> None:
    """Measure, print a table, and write a JSON file and a plot."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        weights = embedded_model() if model is Model.EMBEDDED else make_tiny_llama(folder / "model")
        urls, servers = {}, {}
        for server, start in (("vllm", vllm_server), ("weft", weft_server)):
            urls[server] = stack.enter_context(start(weights, CAPACITY, folder / f"{server}.log"))
            servers[server] = psutil.Process().children()[-1]
        rows = asyncio.run(measure(urls, servers, blocks, rounds, seed, console.print))
    console.print(shown(rows))
    out.write_text(json.dumps({"machine": machine(), "model": model, "seed": seed, "rounds": rows}, indent=1))
    draw(rows, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
