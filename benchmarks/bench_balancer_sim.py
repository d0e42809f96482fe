"""Load balancers in simulation: prefix-cache hits, program latency, recomputed tokens, and scaling to 64 replicas.

    python benchmarks/bench_balancer_sim.py --out bench_balancer_sim.json   # ten minutes of one core
    python benchmarks/bench_balancer_sim.py --seeds 1 --sizes 1,4   # a look, half a minute

First the four balancers on a few replicas, as in Autellix Fig. 14: arrival rates from light load to long queues. Then
the scaling of Fig. 15: the highest arrival rate at which the mean latency of programs stays below a fixed multiple of
what the same programs take alone. All balancers are given the same programs and arrivals, so that the ratios between
them, taken seed by seed, vary less than the latencies do.

`conversation`: chats of at least 12 turns, most of whose prompts are longer than Algorithm 2's threshold. `chat`: all
chats, as ShareGPT has them; half of the prompts are short. `search`: tree search. A replica's KV cache holds 65,536
tokens, 8 GiB at 128 KiB a token: about ten long conversations, or most of one tree. Engines schedule with ATLAS, and a
session is one program.

Programs arrive for a limited time, so a rate that a cluster could not keep up for ever may still meet the latency:
more `--programs` prolong it.
"""

from __future__ import annotations

import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.core.errors import SimulationError
from weft.core.routing import BALANCERS, BalancerConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, simulate
from weft.core.trace.workloads import chat, poisson, search

TURNS = 12
CONTEXT_TOKENS = 32_768  # a model's longest context: longer conversations are not drawn
RATES = {"conversation": (0.05, 0.1, 0.15), "chat": (0.2, 0.5, 0.8), "search": (0.01, 0.02, 0.04)}  # per replica
SHARE = {"conversation": 1, "chat": 2, "search": 0.25}  # of the programs asked for: short ones are many
ALONE_PER_S = 1e-4  # so few programs that each has its engine to itself
PRECISION = 0.02  # of the latency at which the search for a rate ends; the rate is then closer
BASE = "round_robin"

Rates = dict[str, dict[int, list[float]]]  # by balancer and number of replicas, one of each seed


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    seeds: int
    programs: int  # conversations per replica
    replicas: int
    sizes: tuple[int, ...]
    latency_ratio: float
    threshold_tokens: int
    kv_tokens: int

    def settings(self, balancer: str, replicas: int) -> SimSettings:
        own = {"threshold_tokens": self.threshold_tokens} if balancer == "locality" else {}
        config = BalancerConfig(balancer, **own)
        return SimSettings(balancer=config, replicas=replicas, kv_tokens=self.kv_tokens)

    def count(self, workload: str, replicas: int) -> int:
        """How many programs come to so many replicas."""
        return math.ceil(self.programs * SHARE[workload] * replicas)

    def seeds_of(self, replicas: int) -> range:
        """A small cluster serves few programs, whose chances even out over more seeds."""
        return range(max(self.seeds, 16 // replicas if self.seeds > 1 else 1))


def conversation(rng: random.Random, program: str) -> TraceProgram:
    """A chat of at least 12 turns."""
    while True:
        drawn = bounded_chat(rng, program)
        if len(drawn.calls) >= TURNS:
            return drawn


def bounded_chat(rng: random.Random, program: str) -> TraceProgram:
    """A chat that fits in a model's context."""
    while True:
        drawn = chat(rng, program)
        if drawn.calls[-1].prompt_tokens + drawn.calls[-1].output_tokens <= CONTEXT_TOKENS:
            return drawn


MAKERS: dict[str, Callable[[random.Random, str], TraceProgram]] = {
    "conversation": conversation,
    "chat": bounded_chat,
    "search": search,
}


@functools.lru_cache(maxsize=8)
def draw(workload: str, count: int, seed: int) -> tuple[TraceProgram, ...]:
    """Programs of a seed, not yet with their arrivals."""
    rng = random.Random(f"{workload} {seed}")
    return tuple(MAKERS[workload](rng, f"p{number}") for number in range(count))


def serve(programs: Iterable[TraceProgram], rate: float, seed: int, settings: SimSettings) -> SimResult:
    """Simulate programs that arrive at random; at another rate, the same arrivals closer together or further apart."""
    arrivals_s = poisson(random.Random(f"arrivals {seed}"), rate)
    return simulate([TraceProgram(p.program, p.calls, next(arrivals_s), p.name) for p in programs], settings)


def summary(programs: Iterable[TraceProgram], result: SimResult) -> dict[str, float]:
    """What a simulation is compared by. Recomputed are tokens of a call's prefix that a call before it in its program
    had in its prompt or answer and that its engine did not hold, and what preempted calls had to compute again."""
    known = sum(call.shared_prefix_tokens for program in programs for call in program.calls)
    return {
        "hit_rate": result.prefix_hit_rate,
        "mean_s": result.mean_latency,
        "p95_s": result.latency(95),
        "p99_s": result.latency(99),
        "recomputed_tokens": known - result.counts.prefix_hits + result.counts.recomputed,
    }


@functools.lru_cache(maxsize=8)
def alone_s(workload: str, replicas: int, seed: int, options: Options) -> float:
    """Mean latency of the programs of a seed, each alone on an engine."""
    programs = draw(workload, options.count(workload, replicas), seed)
    return serve(programs, ALONE_PER_S, seed, options.settings(BASE, 1)).mean_latency


# -- the two parts


def compare(options: Options, progress: Progress) -> list[dict[str, Any]]:
    """The balancers by workload and rate, a summary for each seed."""
    rows: list[dict[str, Any]] = []
    cases = [(workload, rate) for workload, rates in RATES.items() for rate in rates]
    task = progress.add_task("balancers", total=len(cases) * len(BALANCERS) * options.seeds)
    for workload, rate in cases:
        row: dict[str, Any] = {"workload": workload, "rate": rate, "alone_s": [], "balancers": {}}
        for seed in range(options.seeds):
            programs = draw(workload, options.count(workload, options.replicas), seed)
            row["alone_s"].append(alone_s(workload, options.replicas, seed, options))
            for balancer in BALANCERS:
                settings = options.settings(balancer, options.replicas)
                result = serve(programs, rate * options.replicas, seed, settings)
                row["balancers"].setdefault(balancer, []).append(summary(programs, result))
                progress.advance(task)
        rows.append(row)
    return rows


def highest_rate(latency_ratio: Callable[[float], float], guess: float) -> float:
    """The highest rate at which a latency, as a ratio to what is allowed, stays at or below 1; by false position.

    It ends within `PRECISION` of the latency, or where the latency jumps over that.

    Raises:
        SimulationError: even programs that come all at once keep to it, or none do.
    """
    low, high = (0.0, 0.0), (0.0, 0.0)  # rate and logarithm of the ratio there: low is at most 0, high above
    rate = guess
    for _ in range(12):
        ratio = math.log(latency_ratio(rate))
        if ratio <= 0:
            low = (rate, ratio)
        else:
            high = (rate, ratio)
        if not low[0] or not high[0]:
            rate *= 1.2 if not high[0] else 1 / 1.2
            continue
        if low[1] > -PRECISION or high[0] < low[0] * (1 + PRECISION / 4):
            break
        share = min(0.9, max(0.1, (-PRECISION / 2 - low[1]) / (high[1] - low[1])))
        rate = low[0] + share * (high[0] - low[0])
    if not low[0] or not high[0]:
        raise SimulationError("no rate gives the latency asked for; give more programs, or another latency.")
    return low[0]


def scale(options: Options, progress: Progress) -> Rates:
    """The highest arrival rates of long conversations, by balancer and number of replicas."""
    rates: Rates = {balancer: {} for balancer in BALANCERS}
    total = sum(size * len(options.seeds_of(size)) for size in options.sizes) * len(BALANCERS)
    task = progress.add_task("scaling", total=total)
    guesses = dict.fromkeys(BALANCERS, 0.1)
    for size in options.sizes:
        for seed in options.seeds_of(size):
            programs = draw("conversation", options.count("conversation", size), seed)
            allowed_s = options.latency_ratio * alone_s("conversation", size, seed, options)
            for balancer in BALANCERS:
                settings = options.settings(balancer, size)

                def ratio(
                    rate: float,
                    programs: tuple[TraceProgram, ...] = programs,
                    seed: int = seed,
                    size: int = size,
                    settings: SimSettings = settings,
                    allowed_s: float = allowed_s,
                ) -> float:
                    return serve(programs, rate * size, seed, settings).mean_latency / allowed_s

                found = highest_rate(ratio, guesses[balancer])
                rates[balancer].setdefault(size, []).append(found * size)
                progress.advance(task, size)
        for balancer in BALANCERS:
            guesses[balancer] = statistics.median(rates[balancer][size]) / size
        found_rates = ", ".join(f"{balancer} {guess:.3f}" for balancer, guess in guesses.items())
        progress.console.print(f"{size} replicas, programs a second for each: {found_rates}")
    return rates


# -- showing it


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (lowest, highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}, {max(values):.{digits}f})"


def show_comparison(rows: list[dict[str, Any]], options: Options, console: Console) -> None:
    table = Table(
        title=f"{options.replicas} replicas, {options.programs} conversations for each: median (lowest, highest) of "
        f"{options.seeds} seeds; ratios are to {BASE}"
    )
    for heading in ("workload", "rate", "balancer"):
        table.add_column(heading)
    for heading in ("hit rate", "mean, s", "mean ratio", "p95 ratio", "p99 ratio", "recomputed ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        base = row["balancers"][BASE]
        for balancer, results in row["balancers"].items():

            def ratios(key: str, results: Any = results, base: Any = base) -> str:
                return spread([own[key] / its[key] for own, its in zip(results, base, strict=True)])

            table.add_row(
                row["workload"],
                f"{row['rate']:g}",
                balancer,
                spread([each["hit_rate"] for each in results]),
                spread([each["mean_s"] for each in results], 0),
                *(ratios(key) for key in ("mean_s", "p95_s", "p99_s", "recomputed_tokens")),
            )
        table.add_section()
    console.print(table)


def show_scaling(rates: Rates, options: Options, console: Console) -> None:
    table = Table(
        "replicas",
        title="long conversations a second for each replica with a mean latency of at most "
        f"{options.latency_ratio:g} times that alone: median (lowest, highest); and throughput, % of linear",
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
    """Throughput, where so many times that of the smallest cluster, by size, is 1."""
    smallest = min(of_size)
    return statistics.median(of_size[size]) / statistics.median(of_size[smallest]) * smallest / size


def plot(rows: list[dict[str, Any]], rates: Rates, path: Path) -> None:
    """Mean latency over arrival rate for each workload, with p95 dashed, and the scaling curve."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(RATES) + 1, figsize=(4 * len(RATES) + 4, 3.8), layout="constrained")
    colors = {balancer: f"C{number}" for number, balancer in enumerate(BALANCERS)}
    for axis, workload in zip(axes, RATES, strict=False):
        own = [row for row in rows if row["workload"] == workload]
        for balancer, color in colors.items():
            for key, style in (("mean_s", "o-"), ("p95_s", ":")):
                ys = [statistics.median(each[key] for each in row["balancers"][balancer]) for row in own]
                axis.plot(RATES[workload], ys, style, color=color, label=balancer if key == "mean_s" else None)
        axis.set_title(workload)
        axis.set_xlabel("programs a second for each replica")
    axes[0].set_ylabel("latency of programs, s (mean; dotted: p95)")
    axes[0].legend()
    for balancer, of_size in rates.items():
        sizes = sorted(of_size)
        medians = [statistics.median(of_size[size]) for size in sizes]
        axes[-1].plot(sizes, medians, "o-", color=colors[balancer], label=balancer)
        axes[-1].plot(sizes, [medians[0] * size / sizes[0] for size in sizes], ":", color=colors[balancer])
    axes[-1].set(title="scaling (dotted: linear)", xlabel="replicas", ylabel="conversations a second")
    axes[-1].set_xscale("log", base=2)
    axes[-1].set_yscale("log", base=2)
    figure.savefig(path)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds; small clusters get more, unless it is 1.")] = 3,
    programs: Annotated[int, typer.Option(min=1, help="Conversations per replica.")] = 40,
    replicas: Annotated[int, typer.Option(min=1, help="Of the comparison.")] = 4,
    sizes: Annotated[str, typer.Option(help="Replicas of the scaling curve, smallest first.")] = "1,4,16,64",
    latency_ratio: Annotated[float, typer.Option(help="The fixed latency, a multiple of that alone.")] = 2.0,
    threshold_tokens: Annotated[int, typer.Option(help="Of Algorithm 2: longer prompts are long.")] = 2048,
    kv_tokens: Annotated[int, typer.Option(help="KV cache of each replica.")] = 65_536,
    out: Annotated[Path | None, typer.Option(help="Where to write all of it (JSON) and, beside it, a plot.")] = None,
) -> None:
    """Compare load balancers in simulation, print tables, and write JSON and a plot."""
    numbers = tuple(int(size) for size in sizes.split(","))
    options = Options(seeds, programs, replicas, numbers, latency_ratio, threshold_tokens, kv_tokens)
    console = Console()
    with Progress(console=Console(stderr=True)) as progress:
        rows = compare(options, progress)
        show_comparison(rows, options, console)
        rates = scale(options, progress)
    show_scaling(rates, options, console)
    if out is not None:
        out.write_text(json.dumps({"options": asdict(options), "balancers": rows, "highest_rates": rates}, indent=1))
        plot(rows, rates, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
