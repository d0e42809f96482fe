"""Ten tenants at a part of what the engine can serve, simulated: who is in time under which policy.

    python benchmarks/bench_fair.py
    python benchmarks/bench_fair.py --plot fair.json  # draw again

The capacity is measured (`weft.core.sim.capacity`). A program is in time if it takes at most 1.5 times what it takes
on an idle engine. All predictions are learned in the run; none is an oracle's.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import typer
from arrival_rates import ALONE_PER_S, arriving
from common import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table
from seeds import write
from sim_measures import attainment, fairness

from weft.core.policies import PolicyConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, capacity, simulate
from weft.core.trace.workloads import generate, poisson

POLICIES: Final = {
    "fcfs": PolicyConfig("fcfs"),
    "atlas": PolicyConfig("atlas"),
    "auto": PolicyConfig("auto"),
    "astraea": PolicyConfig("astraea"),
    "fair (fcfs)": PolicyConfig("fair", inner="fcfs"),
    "fair (atlas)": PolicyConfig("fair", inner="atlas"),
    "fair": PolicyConfig("fair"),
}
KINDS: Final = ("heavy", "medium", "light")
SLO: Final = 1.5
MULTIPLES: Final = (1.0, 1.1, 1.2, 1.3, 1.4, SLO, 1.75, 2.0, 2.5, 3.0, 5.0)
_DRAWN: Final = {"fcfs": "0.45", "atlas": "C0", "fair (atlas)": "C1", "fair": "C3"}


def in_time(result: SimResult, programs: Sequence[TraceProgram], alone: Mapping[str, float]) -> dict[str, list[float]]:
    """The part of the programs in time, at each of the multiples, by class of tenants."""
    names = {kind: [each.program for each in programs if kind in ("all", each.name)] for kind in (*KINDS, "all")}
    return {kind: [attainment(result, alone, multiple, of) for multiple in MULTIPLES] for kind, of in names.items()}


def measure(
    seed: int, programs: int, load: float, base: SimSettings, policies: Sequence[str], *, at_once: bool
) -> dict[str, dict[str, Any]]:
    """The policies on the programs of one seed.

    Returns:
        By policy: the parts in time, Jain's index, the mean time in seconds, and the throughput when all programs are
        there at once, as a part of the capacity.
    """
    fcfs = replace(base, policy=POLICIES["fcfs"])
    made = generate("tenants", programs, poisson(Random(0), 1.0), Random(f"programs {seed}"))
    crowd = [replace(each, arrival_s=0.0) for each in made]
    tenants = {each.program: each.tenant or "" for each in made}
    alone = {name: row.latency for name, row in simulate(arriving(made, ALONE_PER_S, seed), fcfs).programs.items()}
    most = capacity(made, base)
    found: dict[str, dict[str, Any]] = {}
    for name in policies:
        policy = POLICIES[name]
        result = simulate(arriving(made, load * most, seed), replace(base, policy=policy))
        found[name] = {
            "in_time": in_time(result, made, alone),
            "jain": fairness(result, alone, tenants),
            "mean_s": result.mean_latency,
        }
        if at_once:
            crowded = simulate(crowd, replace(base, policy=policy, kv_tokens=math.inf))
            found[name]["throughput"] = crowded.throughput / most
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """The table: means over the seeds, and of the light tenants also the lowest."""
    at = MULTIPLES.index(SLO)
    table = Table(title=f"{data['programs']} programs, {len(data['seeds'])} seeds, load {data['load']:.0%}: in time, %")
    for heading in ("policy", *KINDS, "all", "lowest light", "Jain", "mean s", "throughput"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name in data["seeds"][0]:
        runs = [seed[name] for seed in data["seeds"]]
        shares = {kind: [100 * run["in_time"][kind][at] for run in runs] for kind in (*KINDS, "all")}
        table.add_row(
            name,
            *(f"{statistics.fmean(values):.1f}" for values in shares.values()),
            f"{min(shares['light']):.1f}",
            f"{statistics.fmean(run['jain'] for run in runs):.3f}",
            f"{statistics.fmean(run['mean_s'] for run in runs):.1f}",
            f"{statistics.fmean(run['throughput'] for run in runs):.3f}" if "throughput" in runs[0] else "",
        )
    console.print(table)


def plot(data: Mapping[str, Any], path: Path) -> None:
    """Draw the part of the programs in time over the multiple, by class of tenants."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # text that is not drawn as curves makes a smaller file
    figure, plots = plt.subplots(1, len(KINDS), figsize=(9, 3), sharey=True, layout="constrained")
    for axes, kind in zip(plots, KINDS, strict=True):
        for name, color in ((each, color) for each, color in _DRAWN.items() if each in data["seeds"][0]):
            runs = [seed[name]["in_time"][kind] for seed in data["seeds"]]
            means = [100 * statistics.fmean(values) for values in zip(*runs, strict=True)]
            axes.plot(MULTIPLES, means, label=name, color=color, linewidth=1.6)
        axes.axvline(SLO, color="0.8", linewidth=0.8, zorder=0)
        axes.set(title=f"{kind} tenants", xlabel="times the time alone", xlim=(1, 3), ylim=(0, 102))
        axes.spines[["top", "right"]].set_visible(False)
    plots[0].set_ylabel("programs in time, %")
    plots[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    first_seed: Annotated[int, typer.Option(help="Of the first run.")] = 0,
    load: Annotated[float, typer.Option(help="Part of the measured capacity.")] = 0.8,
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 4,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 262_144,
    replicas: Annotated[int, typer.Option(help="Replicas, each with so many slots and tokens.")] = 1,
    policies: Annotated[str, typer.Option(help="Which policies, with commas between them.")] = ",".join(POLICIES),
    at_once: Annotated[bool, typer.Option(help="Whether to measure the throughput, too.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
    plot_only: Annotated[Path | None, typer.Option("--plot", help="Draw the results of this file again.")] = None,
) -> None:
    """Simulate, print a table and write JSON and a picture."""
    console = Console()
    if plot_only is not None:
        plot(json.loads(plot_only.read_text()), plot_only.with_suffix(".svg"))
        return
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens, replicas=replicas)
    data: dict[str, Any] = {"programs": programs, "load": load, "slots": slots, "replicas": replicas}
    data["kv_tokens"] = kv_tokens
    data["first_seed"] = first_seed
    data["multiples"] = MULTIPLES
    data["seeds"] = [
        measure(seed, programs, load, base, policies.split(","), at_once=at_once)
        for seed in track(range(first_seed, first_seed + seeds), "seeds", console=console, transient=True)
    ]
    show(data, console)
    write(data, out, plot)


if __name__ == "__main__":
    typer.run(main)
