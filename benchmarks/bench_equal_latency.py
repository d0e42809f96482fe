"""Throughput at equal latency, simulated (Autellix Fig. 12): what each baseline carries at the same latency per token.

    python benchmarks/bench_equal_latency.py --out equal.json

For each workload and seed, the benchmark searches for the highest arrival rate at which a baseline's mean latency per
token is at most `--load` times that of programs that are alone. The ratio of a baseline's rate to that of FCFS is its
gain in throughput. `plain` is FCFS without prefix cache and with whole prompts: Autellix's `vLLM`; its `vLLM-opt` is
FCFS. A step of `plain` computes at most 16,384 tokens, which the longest prompt needs, and the others' 2,048.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from arrival_rates import ALONE_PER_S, highest_rate, per_token
from common import machine, spread
from rich.console import Console
from rich.table import Table
from seeds import measured, ratio_panels, write

from weft.core.errors import SimulationError
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings
from weft.core.trace.workloads import AUTELLIX, generate, poisson

BASELINES: Final = ("plain", "fcfs", "mlfq", "atlas", "auto")
SHARE: Final = {"chat": 2, "tools": 2, "search": 0.2, "mixed": 1}  # of `--programs`: more of the short ones
GUESSES: Final = {"chat": 0.7, "tools": 1.0, "search": 0.065, "mixed": 0.2}  # where the search for a rate begins
WHOLE_PROMPT_TOKENS: Final = 16_384


def engine(name: str, base: SimSettings) -> SimSettings:
    """The engine of a baseline."""
    if name == "plain":
        plain = replace(base, prefix_cache=False, chunked_prefill=False, chunk_tokens=WHOLE_PROMPT_TOKENS)
        return replace(plain, policy=PolicyConfig("fcfs"))
    return replace(base, policy=PolicyConfig(name))


def measure(workload: str, seed: int, count: int, load: float, base: SimSettings) -> dict[str, float | None]:
    """By baseline: the rate that it carries, in programs a second; None if it is too slow at every rate."""
    programs = generate(workload, count, poisson(random.Random(0), 1.0), random.Random(f"{workload} {seed}"))
    allowed_s = load * per_token(programs, ALONE_PER_S, seed, engine("fcfs", base))
    found: dict[str, float | None] = {}
    for name in BASELINES:
        settings = engine(name, base)

        def ratio(rate: float, settings: SimSettings = settings) -> float:
            return per_token(programs, rate, seed, settings) / allowed_s

        try:
            found[name] = highest_rate(ratio, GUESSES[workload] * (0.2 if name == "plain" else 1.0))
        except SimulationError:
            found[name] = None
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """The table: throughput divided by that of FCFS, median (lowest, highest) of the seeds."""
    table = Table(title=f"throughput ÷ FCFS, at {data['load']:g} times the latency per token alone")
    for heading in ("workload", *BASELINES, "atlas ÷ plain", "atlas ÷ mlfq"):
        table.add_column(heading)
    for workload, seeds in data["rates"].items():
        pairs = [(name, "fcfs") for name in BASELINES] + [("atlas", "plain"), ("atlas", "mlfq")]
        table.add_row(workload, *(_ratio(seeds, above, below) for above, below in pairs))
    console.print(table)


def _ratio(seeds: Sequence[Mapping[str, float | None]], above: str, below: str) -> str:
    pairs = [(seed[above], seed[below]) for seed in seeds]
    ratios = [one / other for one, other in pairs if one is not None and other is not None]
    return spread(ratios) if len(ratios) == len(pairs) else "not reached"


def plot(data: Mapping[str, Any], path: Path) -> None:
    """A panel for each workload: the median throughput of each baseline divided by that of FCFS, and its range."""
    panels = {
        workload: {name: [(seed[name] or 0.0) / seed["fcfs"] for seed in seeds] for name in BASELINES}
        for workload, seeds in data["rates"].items()
    }
    ratio_panels(panels, path, "throughput ÷ FCFS", (3, 2.8))


def main(
    programs: Annotated[int, typer.Option(help="Programs of `mixed`; of chat and tools twice as many.")] = 120,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    load: Annotated[float, typer.Option(help="Allowed latency per token, as a multiple of that alone.")] = 2.0,
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds; 0 for no bound.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
) -> None:
    """Simulate, print a table and write JSON and a picture."""
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens or math.inf)
    console = Console(width=200)
    counts = {workload: math.ceil(programs * SHARE[workload]) for workload in AUTELLIX}
    rates = measured(AUTELLIX, seeds, lambda workload, seed: measure(workload, seed, counts[workload], load, base))
    settings = {"programs": programs, "seeds": seeds, "slots": slots, "kv_tokens": kv_tokens}
    data = {"machine": machine(), **settings, "load": load, "rates": rates}
    show(data, console)
    write(data, out, plot)


if __name__ == "__main__":
    typer.run(main)
