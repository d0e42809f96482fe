"""How much each of SAGA's parameters matters, simulated (SAGA, Table 9).

    python benchmarks/bench_saga_parameters.py --out parameters.json

SAGA as a whole serves its workloads as in `bench_saga_sim.py`. Each parameter is set to the ends of its range in the
paper, while the others keep their defaults. Figures are mean completion times ÷ that with all defaults, with the same
programs and arrivals.
"""

from __future__ import annotations

import statistics
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
from weft.core.routing import BalancerConfig, StealingConfig
from weft.core.sim import SimSettings, simulate

# Where Weft has the parameter, its name there, and the range of the paper. The thresholds of confidence have no
# counterpart: Weft weighs forecasts by their chance.
RANGES: Final[dict[str, tuple[str, str, float, float]]] = {
    "weight of recency": ("kv", "recency", 0.2, 0.4),
    "weight of reuse": ("kv", "reuse", 0.4, 0.6),
    "weight of size": ("kv", "size", 0.1, 0.3),
    "pressure begins": ("kv", "low", 0.6, 0.8),
    "nothing is held": ("kv", "high", 0.85, 0.95),
    "longest hold, s": ("kv", "most_s", 120.0, 600.0),
    "overloaded from": ("balancer", "threshold", 0.6, 0.95),
    "idle for, s": ("stealing", "idle_s", 0.05, 0.2),
    "ratio of loads": ("stealing", "load_ratio", 1.5, 3.0),
}


def settings(base: SimSettings) -> dict[str, SimSettings]:
    """SAGA as a whole, and with each parameter at the two ends of its range."""
    saga = cluster(ALL, base)
    found = {"defaults": saga}
    for label, (where, name, *ends) in RANGES.items():
        for value in ends:
            own: dict[str, Any] = {name: value}
            if where == "kv":
                changed = replace(saga, kv_policy=KvPolicyConfig("saga", **own))
            elif where == "balancer":
                changed = replace(saga, balancer=BalancerConfig("affinity", **own))
            else:
                changed = replace(saga, stealing=StealingConfig(**own))
            found[f"{label} {value:g}"] = changed
    return found


def measure(workload: str, seed: int, count: int, load: float, base: SimSettings) -> dict[str, float]:
    """By setting, the mean completion time ÷ that with all defaults."""
    programs, _ = arrivals(workload, seed, count, load, base)
    means = {name: simulate(programs, each).mean_latency for name, each in settings(base).items()}
    return {name: mean / means["defaults"] for name, mean in means.items()}


def show(found: Mapping[str, list[dict[str, float]]], console: Console) -> None:
    """The table: for each setting and workload the median and range of the seeds, and the largest change of all."""
    table = Table(title="SAGA's parameters: mean completion time ÷ that with all defaults")
    for heading in ("setting", *found):
        table.add_column(heading)
    names = list(next(iter(found.values()))[0])
    for name in names:
        table.add_row(name, *(spread([seed[name] for seed in seeds], 3) for seeds in found.values()))
    console.print(table)
    medians = [statistics.median(seed[name] for seed in seeds) for seeds in found.values() for name in names]
    console.print(f"largest change of a median: {max(abs(each - 1) for each in medians):.1%}")


def plot(data: Mapping[str, Any], path: Path) -> None:
    """A panel for each workload: the completion time of each setting ÷ that with all defaults."""
    panels = {
        workload: {name: [seed[name] for seed in seeds] for name in seeds[0] if name != "defaults"}
        for workload, seeds in data["found"].items()
    }
    ratio_panels(panels, path, "completion time ÷ defaults", (3.2, 4.8))


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 40,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    load: Annotated[float, typer.Option(help="Part of the measured capacity.")] = 0.8,
    workloads: Annotated[str, typer.Option(help="Workloads, with commas.")] = "swe,web,tenants",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
) -> None:
    """Simulate, print a table and write JSON and a picture."""
    base = SimSettings(batch_size=16, kv_tokens=65_536, replicas=4)
    found = measured(workloads.split(","), seeds, lambda workload, seed: measure(workload, seed, programs, load, base))
    show(found, Console(width=120))
    write({"machine": machine(), "programs": programs, "seeds": seeds, "load": load, "found": found}, out, plot)


if __name__ == "__main__":
    typer.run(main)
