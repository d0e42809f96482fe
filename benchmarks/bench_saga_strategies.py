"""Many programs open at once, or one after the other, simulated (SAGA, Table 8).

    python benchmarks/bench_saga_strategies.py --out strategies.json

All programs are there at once. Breadth first serves calls first come, first served, so that all programs are open.
Depth first serves programs in the order of their arrival to their ends. The paper's third strategy, "hybrid", is not
defined; in its place are SAGA as a whole and Weft's default. Completion times and throughput are ratios to breadth
first on the same programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from bench_saga_sim import ALL, arrivals, cluster
from common import machine, spread
from rich.console import Console
from rich.table import Table
from seeds import measured, ratio_panels, write

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate

BREADTH: Final = "breadth first"
MEASURES: Final = ("mean", "p95", "throughput", "again")


def settings(base: SimSettings) -> dict[str, SimSettings]:
    """Affinity and LRU in all of them but SAGA and Weft's default with a KV policy."""
    stock = cluster(frozenset({"affinity"}), base)
    auto = replace(stock, policy=PolicyConfig("auto"))
    next_use = {"kv_policy": KvPolicyConfig("next-use"), "host_kv_tokens": 8 * base.kv_tokens}
    return {
        BREADTH: stock,
        "depth first": replace(stock, policy=PolicyConfig("priority")),
        "auto": auto,
        "SAGA": cluster(ALL, base),
        "auto, next-use": replace(auto, **next_use),
    }


def measure(workload: str, seed: int, count: int, base: SimSettings) -> dict[str, dict[str, float]]:
    """By strategy: mean and p95 of the completion time and the throughput, as ratios to breadth first, and the part of
    the prompt tokens that are computed again."""
    made, _ = arrivals(workload, seed, count, 1.0, base)
    programs = [replace(each, arrival_s=0.0) for each in made]
    found: dict[str, dict[str, float]] = {}
    for name, each in settings(base).items():
        result = simulate(programs, each)
        again = result.counts.again / max(1, result.counts.prompt)
        found[name] = {
            "mean": result.mean_latency,
            "p95": result.latency(95),
            "throughput": result.throughput,
            "again": again,
        }
    breadth = dict(found[BREADTH])
    for row in found.values():
        for key in ("mean", "p95", "throughput"):
            row[key] /= breadth[key]
    return found


def show(found: Mapping[str, list[dict[str, dict[str, float]]]], console: Console) -> None:
    """A table for each workload: median (lowest, highest) of the seeds."""
    for workload, seeds in found.items():
        table = Table(title=f"{workload}: ÷ breadth first")
        for heading in ("strategy", "mean", "p95", "throughput", "computed again"):
            table.add_column(heading)
        for name in seeds[0]:
            table.add_row(name, *(spread([seed[name][key] for seed in seeds]) for key in MEASURES))
        console.print(table)


def plot(data: Mapping[str, Any], path: Path) -> None:
    """A panel for each workload: the mean completion time of each strategy ÷ that of breadth first."""
    panels = {
        workload: {name: [seed[name]["mean"] for seed in seeds] for name in seeds[0] if name != BREADTH}
        for workload, seeds in data["found"].items()
    }
    ratio_panels(panels, path, "completion time ÷ breadth first", (3.2, 2.2))


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 80,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    workloads: Annotated[str, typer.Option(help="Workloads, with commas.")] = "swe,web,tenants",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
) -> None:
    """Simulate, print tables and write JSON and a picture."""
    base = SimSettings(batch_size=16, kv_tokens=65_536, replicas=4)
    found = measured(workloads.split(","), seeds, lambda workload, seed: measure(workload, seed, programs, base))
    show(found, Console(width=120))
    write({"machine": machine(), "programs": programs, "seeds": seeds, "found": found}, out, plot)


if __name__ == "__main__":
    typer.run(main)
