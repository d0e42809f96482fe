"""What `weft serve` costs a call: the same calls through it and through vLLM's own server, in pairs.

    python benchmarks/bench_serve_overhead.py --out serve_overhead.json

Two servers of the tests' tiny random Llama run at once: vLLM's, with its own scheduler, and `weft serve` with its
default policy. One client sends each request to both, one after the other, in an order that a seed decides. The
requests of a pair are the same, and each pair has a prompt of its own. Requests are of three kinds: a whole answer, a
stream, and a conversation of four turns without ids, which `weft serve` has to recognise. The figure of a round is the
ratio of the quantiles of its calls. The median of the rounds is reported, with the lowest and the highest. p10 and the
CPU time of a call depend less on other work on the machine. So they are reported too, the CPU time for the process that
serves HTTP and for the engine below it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import psutil
import typer
from common import machine, pyplot, spread
from http_servers import MODEL, Capacity, vllm_server, weft_server
from rich.console import Console
from rich.table import Table

from weft.engine.models.tiny import make_tiny_llama

CAPACITY: Final = Capacity(slots=4, kv_tokens=32_768, chunk_tokens=2048, max_model_len=2048)
KINDS: Final = ("whole", "stream", "turns")
TURNS: Final = 4
WARM_UP_PAIRS: Final = 20
SHARES: Final = {"p10": 0.10, "p50": 0.50, "p95": 0.95, "p99": 0.99}

Seconds = dict[str, list[float]]  # of each call, by server


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


async def pairs(client: aiohttp.ClientSession, urls: dict[str, str], kind: str, count: int, seed: int) -> Seconds:
    """Send so many pairs of calls of a kind."""
    rng = random.Random(f"{kind} {seed}")
    seconds: Seconds = {name: [] for name in urls}
    conversations: dict[str, list[dict[str, str]]] = {}
    for number in range(count):
        if kind != "turns" or number % TURNS == 0:
            words = " ".join(f"w{rng.randrange(10_000)}" for _ in range(30))
            conversations = {name: [{"role": "user", "content": words}] for name in urls}
        order = list(urls)
        rng.shuffle(order)
        for name in order:
            messages = conversations[name]
            body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            took_s, text = await call(client, urls[name], {**body, "stream": kind == "stream"})
            seconds[name].append(took_s)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {number}?"}]
    return seconds


def cpu_s(server: psutil.Process) -> dict[str, float]:
    """CPU seconds so far of a server's own process, and of all below it."""
    own, *below = (sum(each.cpu_times()[:2]) for each in (server, *server.children(recursive=True)))
    return {"http": own, "engine": sum(below)}


async def measure(
    urls: dict[str, str],
    servers: dict[str, psutil.Process],
    count: int,
    rounds: int,
    seed: int,
    tell: Callable[[str], None],
) -> list[Any]:
    """All rounds of all kinds: the quantiles of each server in milliseconds, and their ratios."""
    rows = []
    async with aiohttp.ClientSession() as client:
        for kind in KINDS:
            await pairs(client, urls, kind, WARM_UP_PAIRS, -1)
        for number in range(rounds):
            for kind in KINDS:
                before = {name: cpu_s(server) for name, server in servers.items()}
                found = await pairs(client, urls, kind, count, seed + number)
                row: dict[str, Any] = {"round": number, "kind": kind, "calls": count}
                for name, server in servers.items():
                    spent = {part: value - before[name][part] for part, value in cpu_s(server).items()}
                    row[f"cpu_ms_{name}"] = {part: round(1e3 * value / count, 3) for part, value in spent.items()}
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
    pairs_a_round: Annotated[int, typer.Option("--pairs", help="Pairs of calls of each kind in a round.")] = 200,
    rounds: Annotated[int, typer.Option(help="Rounds.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts and the order.")] = 0,
) -> None:
    """Measure, print a table, and write a JSON file and a plot."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = make_tiny_llama(folder / "model")
        urls, servers = {}, {}
        for server, start in (("vllm", vllm_server), ("weft", weft_server)):
            urls[server] = stack.enter_context(start(model, CAPACITY, folder / f"{server}.log"))
            servers[server] = psutil.Process().children()[-1]
        rows = asyncio.run(measure(urls, servers, pairs_a_round, rounds, seed, console.print))
    console.print(shown(rows))
    out.write_text(json.dumps({"machine": machine(), "seed": seed, "rounds": rows}, indent=1))
    draw(rows, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
