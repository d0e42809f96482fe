"""Throughput of several replicas at equal latency, by balancer, simulated (Autellix Fig. 14).

    python benchmarks/bench_balancer_throughput.py --out throughput.json

The method is that of `bench_equal_latency.py`: the highest arrival rate at which the mean latency per token is at most
`--load` times that of programs that are alone. The engines schedule with ATLAS, and the ratio is to round robin.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from arrival_rates import ALONE_PER_S, highest_rate, per_token
from common import balancer_config, machine, spread
from rich.console import Console
from rich.table import Table
from seeds import measured, ratio_panels, write

from weft.core.policies import PolicyConfig
from weft.core.routing import BALANCERS
from weft.core.sim import SimSettings
from weft.core.trace.workloads import generate, poisson

BASE: Final = "round_robin"
SHARE: Final = {"chat": 2, "search": 0.3}  # of `--programs`: the paper's two workloads
GUESSES: Final = {"chat": 0.6, "search": 0.03}  # programs a second and replica
THRESHOLD_TOKENS: Final = 2048  # Algorithm 2


def measure(workload: str, seed: int, programs: int, load: float, base: SimSettings) -> dict[str, float]:
    """By balancer: the programs a second that the replicas carry."""
    count = round(programs * SHARE[workload])
    made = generate(workload, count, poisson(random.Random(0), 1.0), random.Random(f"{workload} {seed}"))
    allowed_s = load * per_token(made, ALONE_PER_S, seed, replace(base, replicas=1))
    found: dict[str, float] = {}
    guess = GUESSES[workload] * base.replicas
    for name in BALANCERS:
        settings = replace(base, balancer=balancer_config(name, THRESHOLD_TOKENS))

        def ratio(rate: float, settings: SimSettings = settings) -> float:
            return per_token(made, rate, seed, settings) / allowed_s

        guess = found[name] = highest_rate(ratio, guess)
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """The table: throughput divided by that of round robin, median (lowest, highest) of the seeds."""
    table = Table(title=f"throughput ÷ {BASE}, at {data['load']:g} times the latency per token alone")
    for heading in ("workload", *BALANCERS):
        table.add_column(heading)
    for workload, seeds in data["rates"].items():
        table.add_row(workload, *(spread([seed[name] / seed[BASE] for seed in seeds]) for name in BALANCERS))
    console.print(table)


def plot(data: Mapping[str, Any], path: Path) -> None:
    """A panel for each workload: the median throughput of each balancer ÷ that of round robin, and its range."""
    panels = {
        workload: {name: [seed[name] / seed[BASE] for seed in seeds] for name in BALANCERS}
        for workload, seeds in data["rates"].items()
    }
    ratio_panels(panels, path, f"throughput ÷ {BASE}", (3, 2.4))


def main(
    programs: Annotated[int, typer.Option(help="Twice as many chats, and 0.3 as many searches.")] = 120,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    load: Annotated[float, typer.Option(help="Allowed latency per token, as a multiple of that alone.")] = 2.0,
    workloads: Annotated[str, typer.Option(help="Workloads, with commas.")] = ",".join(SHARE),
    replicas: Annotated[int, typer.Option(help="Engines.")] = 4,
    slots: Annotated[int, typer.Option(help="Calls that an engine runs at once.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache of an engine holds.")] = 65_536,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
) -> None:
    """Simulate, print a table and write JSON and a picture."""
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens, replicas=replicas, policy=PolicyConfig("atlas"))
    console = Console(width=160)
    rates = measured(workloads.split(","), seeds, lambda workload, seed: measure(workload, seed, programs, load, base))
    data: dict[str, Any] = {"machine": machine(), "programs": programs, "seeds": seeds, "load": load}
    data |= {"replicas": replicas, "slots": slots, "kv_tokens": kv_tokens, "rates": rates}
    show(data, console)
    write(data, out, plot)


if __name__ == "__main__":
    typer.run(main)
