"""Programs over HTTP: stock vLLM, vLLM with Weft's scheduler, and `vllm-router` with program scheduling.

    python benchmarks/bench_http.py --out bench_http.json
    python benchmarks/bench_http.py --out bench_http.json --rounds 1 --programs 10      # a quick look

Three servers serve the same programs, in turns whose order rotates from round to round:

- *fcfs*: vLLM's own server and scheduler.
- *weft*: vLLM's own server with `--scheduler-cls weft.engine.scheduler.WeftScheduler`.
- *router*: `vllm-router --enable-program-scheduling` in front of the server of *fcfs*. It needs
  `pip install vllm-router`; without it, the benchmark compares the other two.

Weft's scheduler reads `program_id`, `program_name` and `program_end` (on a program's last call) in `vllm_xargs`. The
router reads `vllm_xargs.agentic_context`: `program_id`, and on the last call `expected_resume: false`. It is also told
the size of the KV cache. Stock vLLM gets no ids.

Every round draws new programs of the workload, and the prefix cache is emptied before each turn. What Weft's policy and
the router have learned stays, as in a server that goes on. Before the first round, a few programs run one at a time on
the stock server. The rate of arrival is `--load` times the rate at which they ended. Prompts are token ids, which share
prefixes as the workload says; answers have the workload's lengths. The model is the tests' tiny random Llama.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from common import machine, pyplot, spread
from http_client import Client, Outcome, Target, no_ids, router_ids, weft_ids
from http_servers import Capacity, router, router_command, vllm_server
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.bench.load import CLOSED, Prompts, Scaling, make_round, rate_name
from weft.bench.results.measures import summarise
from weft.core.policies import POLICIES
from weft.core.trace.workloads import WORKLOADS
from weft.engine.models.tiny import make_tiny_llama

TOKEN_IDS = range(10, 900)  # of the tiny model, without its special tokens
KV_TOKENS_PER_SLOT = 4096  # times the scale, as in `weft sim` and `weft bench`
CHUNK_TOKENS = 2048  # likewise
WARM_UP_PROGRAMS = 2
UNLOADED_SEED = 1_000_000  # of the programs that run one at a time, and of those that warm the servers up
FIGURES = {
    "completion, mean": ("seconds", "mean"),
    "completion, p95": ("seconds", "p95"),
    "completion, p99": ("seconds", "p99"),
    "per token, mean": ("seconds_per_token", "mean"),
}

Summary = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Settings:
    """The options of the command."""

    workload: str
    policy: str
    programs: int
    rounds: int
    load: float
    unloaded: int
    scale: float
    seed: int


class Bench:
    """The turns of a session on servers that run."""

    def __init__(self, settings: Settings, capacity: Capacity, targets: Sequence[Target], progress: Progress) -> None:
        self.settings, self.targets, self.progress = settings, targets, progress
        self.scaling = Scaling(settings.scale, capacity.max_model_len, whole_steps=False)

    async def turn(
        self, target: Target, number: int, load: str, programs: int, *, one_by_one: bool = False
    ) -> tuple[list[Outcome], float]:
        """One target's turn with the programs of a round; returns their outcomes and the seconds that it took."""
        settings = self.settings
        drawn = make_round(settings.workload, load, number, self.scaling, programs=programs, seed=settings.seed)
        prompts = Prompts(f"{settings.seed} {number}", TOKEN_IDS)
        task = self.progress.add_task(f"{target.name}, round {number + 1}", total=programs)
        if number >= UNLOADED_SEED:
            self.progress.update(task, description=f"{target.name}, {'unloaded' if one_by_one else 'warm-up'}")
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            async with session.post(f"{target.backend}/reset_prefix_cache") as response:
                response.raise_for_status()
            client = Client(session, target, prompts, f"{target.name}-{number}")
            began_s = time.perf_counter()
            if one_by_one:
                outcomes = []
                for program in drawn.programs:
                    outcomes.append(await client.run(program))
                    self.progress.advance(task)
            else:
                outcomes = await client.play(drawn.programs, lambda: self.progress.advance(task))
            took_s = time.perf_counter() - began_s
        self.progress.remove_task(task)
        return outcomes, took_s

    async def measure(self, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Warm up, measure unloaded programs, and play all rounds.

        Args:
            save: called with the results so far after each turn.
        """
        for target in self.targets:
            await self.turn(target, UNLOADED_SEED + 1, CLOSED, WARM_UP_PROGRAMS)
        alone, alone_s = await self.turn(
            self.targets[0], UNLOADED_SEED, CLOSED, self.settings.unloaded, one_by_one=True
        )
        rate = self.settings.load * len(alone) / alone_s
        self.progress.console.print(
            f"unloaded: {alone_s / len(alone):.2f} s a program; {rate:.2f} programs arrive a second"
        )
        turns: list[dict[str, Any]] = []
        results = {"unloaded_s": [outcome.seconds for outcome in alone], "programs_per_s": rate, "turns": turns}
        for number in range(self.settings.rounds):
            first = number % len(self.targets)
            for target in (*self.targets[first:], *self.targets[:first]):
                outcomes, took_s = await self.turn(target, number, rate_name(rate), self.settings.programs)
                summary = summary_of(outcomes)
                self.progress.console.print(
                    f"round {number + 1} {target.name}: mean {summary['seconds']['mean']:.2f} s, "
                    f"p99 {summary['seconds']['p99']:.2f} s, in {took_s:.0f} s"
                )
                turns.append(
                    {
                        "round": number,
                        "server": target.name,
                        "seconds": took_s,
                        "summary": summary,
                        "programs": [asdict(outcome) for outcome in outcomes],
                    }
                )
                save(results)
        return results


def summary_of(outcomes: Sequence[Outcome]) -> Summary:
    return {
        "seconds": summarise([outcome.seconds for outcome in outcomes]),
        "seconds_per_token": summarise([outcome.seconds / outcome.path_tokens for outcome in outcomes]),
    }


def by_server(turns: Sequence[dict[str, Any]]) -> dict[str, list[Summary]]:
    """The summaries of each server, one for each round; the first server is the base."""
    names = sorted({turn["server"] for turn in turns}, key=("fcfs", "weft", "router").index)
    return {
        name: [turn["summary"] for turn in sorted(turns, key=lambda turn: turn["round"]) if turn["server"] == name]
        for name in names
    }


def ratios(servers: dict[str, list[Summary]], name: str, figure: tuple[str, str]) -> list[float]:
    """A figure's ratio to stock vLLM's in each round."""
    kind, statistic = figure
    pairs = zip(servers[name], servers["fcfs"], strict=True)
    return [mine[kind][statistic] / base[kind][statistic] for mine, base in pairs]


def show(servers: dict[str, list[Summary]], title: str) -> None:
    table = Table("server", title=title)
    for heading in FIGURES:
        table.add_column(heading, justify="right")
    for name, rounds in servers.items():
        seconds = [spread([each[kind][statistic] for each in rounds], 3) for kind, statistic in FIGURES.values()]
        table.add_row(f"{name}, s", *seconds)
        if name != "fcfs":
            table.add_row("  to fcfs", *(spread(ratios(servers, name, figure)) for figure in FIGURES.values()))
    Console(width=120).print(table)


def plot(servers: dict[str, list[Summary]], path: Path) -> None:
    """A dot for each round, and a line at the median."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.2))
    names = [name for name in servers if name != "fcfs"]
    for index, name in enumerate(names):
        for column, figure_of in enumerate(FIGURES.values()):
            values = ratios(servers, name, figure_of)
            x = column + (index - (len(names) - 1) / 2) * 0.3
            label = name if column == 0 else None
            axes.scatter([x] * len(values), values, s=14, alpha=0.6, color=f"C{index}", label=label)
            axes.hlines(statistics.median(values), x - 0.1, x + 0.1, color=f"C{index}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xticks(range(len(FIGURES)), FIGURES)
    axes.set_ylabel("ratio to stock vLLM in the same round")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "mixed",
    policy: Annotated[str, typer.Option(help=f"Weft's policy: {', '.join(POLICIES)}.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds, each with new programs.")] = 5,
    programs: Annotated[int, typer.Option(min=2, help="Programs in a round.")] = 40,
    load: Annotated[float, typer.Option(help="The rate of arrival, as a multiple of the unloaded rate.")] = 4.0,
    unloaded: Annotated[int, typer.Option(min=1, help="Programs that run one at a time first.")] = 12,
    scale: Annotated[float, typer.Option(help="A factor of all lengths and times of the workload.")] = 0.2,
    slots: Annotated[int, typer.Option(min=1, help="Calls that a server runs at once.")] = 8,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV cache in tokens (default: 4,096 a slot, times the scale).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of programs, arrivals and prompts.")] = 0,
) -> None:
    """Compare servers in turns, print a table, and write JSON and a plot."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped, too
    settings = Settings(workload, policy, programs, rounds, load, unloaded, scale, seed)
    kv = kv_tokens or round(KV_TOKENS_PER_SLOT * slots * scale)
    capacity = Capacity(slots, kv, max(round(CHUNK_TOKENS * scale), slots), min(4096, kv))
    command = router_command()
    console = Console(stderr=True)
    if command is None:
        console.print("vllm-router is not installed, so it is left out: pip install vllm-router")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(Progress(console=console, transient=True))
        starting = progress.add_task("starting servers", total=None)
        model = make_tiny_llama(folder / "tiny")
        fcfs = stack.enter_context(vllm_server(model, capacity, folder / "fcfs.log"))
        weft = stack.enter_context(vllm_server(model, capacity, folder / "weft.log", {"policy": policy}))
        targets = [Target("fcfs", fcfs, fcfs, no_ids), Target("weft", weft, weft, weft_ids)]
        if command is not None:
            address = stack.enter_context(router(command, fcfs, capacity, folder / "router.log"))
            targets.append(Target("router", address, fcfs, router_ids))
        progress.remove_task(starting)
        setup = {"machine": machine(), "settings": asdict(settings), "capacity": asdict(capacity)}

        def save(results: dict[str, Any]) -> None:
            if out is not None:
                out.write_text(json.dumps(setup | results, indent=1))

        results = asyncio.run(Bench(settings, capacity, targets, progress).measure(save))
    servers = by_server(results["turns"])
    show(
        servers, f"{workload}, {results['programs_per_s']:.2f} programs a second, {rounds} rounds: median (least, most)"
    )
    if out is not None:
        plot(servers, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
