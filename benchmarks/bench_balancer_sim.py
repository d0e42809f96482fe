"""Load balancers in simulation: prefix-cache hits, program latency, recomputed tokens, and scaling to 64 replicas.

    python benchmarks/bench_balancer_sim.py --out bench_balancer_sim.json   # ten minutes of one core
    python benchmarks/bench_balancer_sim.py --seeds 1 --programs 20 --sizes 1,2   # a quick look, a minute
    python benchmarks/bench_balancer_sim.py --sizes ""   # without the scaling curve

The first part compares the balancers on a few replicas, as in Autellix Fig. 14, at arrival rates from light load to
long queues, each without stealing and with it ("+ stealing"). The second part is the scaling of Fig. 15: the highest
arrival rate at which the mean latency of programs is at most a fixed multiple of the latency that the same programs
have alone. All balancers serve the same programs and arrivals. Ratios between balancers are taken for each seed, so
they vary less than the latencies. Parameters were tuned on the seeds from 100, and results begin with seed 0.

- `conversation`: chats of at least 12 turns; most prompts are longer than Algorithm 2's threshold.
- `chat`: all chats, distributed like ShareGPT; half of the prompts are short.
- `search`: tree search.
- `swe`, `web`, `tenants`: SAGA's, cut before a context is longer than a model's.

A replica's KV cache holds 65,536 tokens, which are 8 GiB at 128 KiB per token: about ten long conversations, or most of
one tree. Engines schedule with ATLAS, and a session is one program.

Programs arrive for a limited time only. A cluster may therefore keep the latency at a rate that it could not sustain
for ever. More `--programs` prolong the time.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from arrival_rates import ALONE_PER_S, arriving, highest_rate
from bounded_workloads import WORKLOADS
from common import balancer_config, pyplot, spread
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.core.routing import BALANCERS, StealingConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, simulate

RATES = {  # per replica
    "conversation": (0.05, 0.1, 0.15),
    "chat": (0.2, 0.5, 0.8),
    "search": (0.01, 0.02, 0.04),
    "swe": (0.01, 0.02),
    "web": (0.05, 0.1),
    "tenants": (0.05, 0.1),
}
# A workload's number of programs as a multiple of `--programs`: more of the short ones.
SHARE = {"conversation": 1, "chat": 2, "search": 0.25, "swe": 0.5, "web": 0.5, "tenants": 0.5}
BASE = "round_robin"  # the balancer to which ratios are relative
FOUR = ("round_robin", "least_used", "locality", "affinity")  # Algorithm 2, its baselines, and SAGA
STEALS = " + stealing"
CHOICES = (*BALANCERS, *(name + STEALS for name in BALANCERS))

Rates = dict[str, dict[int, list[float]]]  # by balancer and number of replicas, one for each seed


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    seeds: int
    programs: int  # conversations per replica
    replicas: int
    sizes: tuple[int, ...]  # empty: no scaling curve
    latency_ratio: float
    threshold_tokens: int
    kv_tokens: int
    host_kv_tokens: int
    moves_kv: bool
    workloads: tuple[str, ...]
    stealing: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The balancers that are compared."""
        return CHOICES if self.stealing else tuple(BALANCERS)

    def settings(self, choice: str, replicas: int) -> SimSettings:
        config = balancer_config(choice.removesuffix(STEALS), self.threshold_tokens)
        stealing = StealingConfig() if choice.endswith(STEALS) else None
        return SimSettings(
            balancer=config,
            stealing=stealing,
            replicas=replicas,
            kv_tokens=self.kv_tokens,
            host_kv_tokens=self.host_kv_tokens,
            moves_kv=self.moves_kv,
        )

    def count(self, workload: str, replicas: int) -> int:
        """The number of programs for so many replicas."""
        return math.ceil(self.programs * SHARE[workload] * replicas)

    def seeds_of(self, replicas: int) -> range:
        """The seeds for so many replicas. A small cluster serves few programs and gets more seeds, so that its results
        vary as little as those of a large cluster."""
        return range(max(self.seeds, 16 // replicas if self.seeds > 1 else 1))


@functools.lru_cache(maxsize=8)
def make_programs(workload: str, count: int, seed: int) -> tuple[TraceProgram, ...]:
    """The programs of a seed, without arrivals."""
    rng = random.Random(f"{workload} {seed}")
    return tuple(WORKLOADS[workload](rng, f"p{number}") for number in range(count))


def serve(programs: Iterable[TraceProgram], rate: float, seed: int, settings: SimSettings) -> SimResult:
    """Simulate programs that arrive at random at a rate."""
    return simulate(arriving(programs, rate, seed), settings)


def summary(programs: Iterable[TraceProgram], result: SimResult) -> dict[str, float]:
    """The figures by which balancers are compared.

    Recomputed tokens are those of a call's prefix that an earlier call of the program had in its prompt or output and
    that the call's engine did not hold, and those that preempted calls computed again.
    """
    known = sum(call.shared_prefix_tokens for program in programs for call in program.calls)
    return {
        "hit_rate": result.prefix_hit_rate,
        "mean_s": result.mean_latency,
        "p95_s": result.latency(95),
        "p99_s": result.latency(99),
        "recomputed_tokens": known - result.counts.prefix_hits + result.counts.recomputed,
        "moved_calls": result.counts.moved,
    }


@functools.lru_cache(maxsize=8)
def alone_s(workload: str, replicas: int, seed: int, options: Options) -> float:
    """Mean latency of the programs of a seed when each is alone on an engine."""
    programs = make_programs(workload, options.count(workload, replicas), seed)
    return serve(programs, ALONE_PER_S, seed, options.settings(BASE, 1)).mean_latency


# -- the two parts


def compare(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """The balancers at each rate of each workload, with a summary for each seed."""
    rows: list[dict[str, Any]] = []
    cases = [(workload, rate) for workload in options.workloads for rate in RATES[workload]]
    task = progress.add_task("balancers", total=len(cases) * options.seeds)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = {
            case: [pool.submit(compare_once, *case, seed, options) for seed in range(options.seeds)] for case in cases
        }
        for (workload, rate), of_seeds in runs.items():
            row: dict[str, Any] = {"workload": workload, "rate": rate, "alone_s": [], "balancers": {}}
            for run in of_seeds:
                alone, by_choice = run.result()
                row["alone_s"].append(alone)
                for choice, figures in by_choice.items():
                    row["balancers"].setdefault(choice, []).append(figures)
                progress.advance(task)
            rows.append(row)
    return rows


def compare_once(workload: str, rate: float, seed: int, options: Options) -> tuple[float, dict[str, dict[str, float]]]:
    """The latency of the programs of a seed alone, and the summary of each choice."""
    programs = make_programs(workload, options.count(workload, options.replicas), seed)
    found = {}
    for choice in options.choices:
        result = serve(programs, rate * options.replicas, seed, options.settings(choice, options.replicas))
        found[choice] = summary(programs, result)
    return alone_s(workload, options.replicas, seed, options), found


def latency_ratio(
    programs: tuple[TraceProgram, ...], seed: int, settings: SimSettings, replicas: int, allowed_s: float
) -> Callable[[float], float]:
    """A function from an arrival rate per replica to the mean latency, divided by the allowed latency."""

    def ratio(rate: float) -> float:
        return serve(programs, rate * replicas, seed, settings).mean_latency / allowed_s

    return ratio


def scale(options: Options, progress: Progress) -> Rates:
    """The highest arrival rates of long conversations, by balancer and number of replicas."""
    rates: Rates = {balancer: {} for balancer in BALANCERS}
    total = sum(size * len(options.seeds_of(size)) for size in options.sizes) * len(BALANCERS)
    task = progress.add_task("scaling", total=total)
    guesses = dict.fromkeys(BALANCERS, 0.1)
    for size in options.sizes:
        for seed in options.seeds_of(size):
            programs = make_programs("conversation", options.count("conversation", size), seed)
            allowed_s = options.latency_ratio * alone_s("conversation", size, seed, options)
            for balancer in BALANCERS:
                settings = options.settings(balancer, size)
                ratio = latency_ratio(programs, seed, settings, size, allowed_s)
                found = highest_rate(ratio, guesses[balancer])
                rates[balancer].setdefault(size, []).append(found * size)
                progress.advance(task, size)
        for balancer in BALANCERS:
            guesses[balancer] = statistics.median(rates[balancer][size]) / size
        found_rates = ", ".join(f"{balancer} {guess:.3f}" for balancer, guess in guesses.items())
        progress.console.print(f"{size} replicas, programs per second for each: {found_rates}")
    return rates


# -- tables and plot


def show_comparison(rows: list[dict[str, Any]], options: Options, console: Console) -> None:
    table = Table(
        title=f"{options.replicas} replicas, {options.programs} conversations for each: median (lowest, highest) of "
        f"{options.seeds} seeds; ratios are relative to {BASE}"
    )
    for heading in ("workload", "rate", "balancer"):
        table.add_column(heading)
    for heading in (
        "hit rate",
        "mean, s",
        "to the best",
        "mean ratio",
        "p95 ratio",
        "p99 ratio",
        "recomputed",
        "moved",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        base = row["balancers"][BASE]
        best_s = best_of_four_s(row)
        for balancer, results in row["balancers"].items():

            def ratios(key: str, results: Any = results, base: Any = base) -> str:
                return spread([one[key] / other[key] for one, other in zip(results, base, strict=True)])

            table.add_row(
                row["workload"],
                f"{row['rate']:g}",
                balancer,
                spread([each["hit_rate"] for each in results]),
                spread([each["mean_s"] for each in results], 0),
                f"{statistics.mean(each['mean_s'] for each in results) / best_s:.3f}",
                *(ratios(key) for key in ("mean_s", "p95_s", "p99_s", "recomputed_tokens")),
                f"{statistics.mean(each['moved_calls'] for each in results):.0f}",
            )
        table.add_section()
    console.print(table)


def best_of_four_s(row: dict[str, Any]) -> float:
    """The lowest mean latency, over all seeds, of the four balancers without stealing. The default is held to it."""
    return min(statistics.mean(each["mean_s"] for each in row["balancers"][name]) for name in FOUR)


def show_scaling(rates: Rates, options: Options, console: Console) -> None:
    table = Table(
        "replicas",
        title="long conversations per second and replica at a mean latency of at most "
        f"{options.latency_ratio:g} times that alone: median (lowest, highest); throughput in % of linear scaling",
    )
    for balancer in rates:
        table.add_column(balancer, justify="right")
        table.add_column("%", justify="right")
    for size in options.sizes:
        cells = []
        for of_size in rates.values():
            cells += [spread([rate / size for rate in of_size[size]], 3), f"{100 * of_linear(of_size, size):.0f}"]
        table.add_row(str(size), *cells)
    console.print(table)


def of_linear(of_size: dict[int, list[float]], size: int) -> float:
    """A cluster's throughput as a part of that of the smallest cluster, multiplied by the ratio of their sizes."""
    smallest = min(of_size)
    return statistics.median(of_size[size]) / statistics.median(of_size[smallest]) * smallest / size


def plot(rows: list[dict[str, Any]], rates: Rates, path: Path) -> None:
    """Mean latency over arrival rate for each workload, dotted its 95th percentile, and the scaling curve."""
    workloads = dict.fromkeys(row["workload"] for row in rows)
    count = len(workloads) + bool(rates)
    figure, axes = pyplot().subplots(1, count, figsize=(4 * count, 3.8), layout="constrained")
    colors = {balancer: f"C{number}" for number, balancer in enumerate(BALANCERS)}
    for axis, workload in zip(axes, workloads, strict=False):
        own = [row for row in rows if row["workload"] == workload]
        for balancer, color in colors.items():
            for key, style in (("mean_s", "o-"), ("p95_s", ":")):
                ys = [statistics.median(each[key] for each in row["balancers"][balancer]) for row in own]
                axis.plot(RATES[workload], ys, style, color=color, label=balancer if key == "mean_s" else None)
        axis.set_title(workload)
        axis.set_xlabel("programs per second and replica")
    axes[0].set_ylabel("latency of programs, s (mean; dotted: p95)")
    axes[0].legend()
    if rates:
        plot_scaling(rates, axes[-1], colors)
    figure.savefig(path)


def plot_scaling(rates: Rates, axis: Any, colors: dict[str, str]) -> None:
    for balancer, of_size in rates.items():
        sizes = sorted(of_size)
        medians = [statistics.median(of_size[size]) for size in sizes]
        axis.plot(sizes, medians, "o-", color=colors[balancer], label=balancer)
        axis.plot(sizes, [medians[0] * size / sizes[0] for size in sizes], ":", color=colors[balancer])
    axis.set(title="scaling (dotted: linear)", xlabel="replicas", ylabel="conversations per second")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; small clusters get more, unless it is 1.")] = 3,
    programs: Annotated[int, typer.Option(min=1, help="Conversations per replica.")] = 40,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas in the comparison.")] = 4,
    sizes: Annotated[str, typer.Option(help="Numbers of replicas of the scaling curve, smallest first.")] = "1,4,16,64",
    latency_ratio: Annotated[float, typer.Option(help="Allowed mean latency, as a multiple of that alone.")] = 2.0,
    threshold_tokens: Annotated[int, typer.Option(help="Algorithm 2 (locality) treats longer prompts as long.")] = 2048,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache of a replica holds.")] = 65_536,
    host_kv_tokens: Annotated[int, typer.Option(help="Tokens that the host memory of a replica holds.")] = 0,
    moves_kv: Annotated[bool, typer.Option(help="Whether replicas read each other's host memory.")] = True,
    workloads: Annotated[str, typer.Option(help="Workloads, with commas.")] = ",".join(RATES),
    stealing: Annotated[bool, typer.Option(help="Whether to compare with stealing, too.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for all results; a plot is written next to it.")] = None,
) -> None:
    """Compare load balancers in simulation, print tables, and write JSON and a plot."""
    numbers = tuple(int(size) for size in sizes.split(",") if size)
    options = Options(
        seeds,
        programs,
        replicas,
        numbers,
        latency_ratio,
        threshold_tokens,
        kv_tokens,
        host_kv_tokens,
        moves_kv,
        tuple(workloads.split(",")),
        stealing,
    )
    console = Console()
    with Progress(console=Console(stderr=True)) as progress:
        rows = compare(options, progress)
        show_comparison(rows, options, console)
        rates = scale(options, progress) if numbers else {}
    if rates:
        show_scaling(rates, options, console)
    if out is not None:
        out.write_text(json.dumps({"options": asdict(options), "balancers": rows, "highest_rates": rates}, indent=1))
        plot(rows, rates, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
