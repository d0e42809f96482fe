"""Astraea's figures in simulation: completion times on tools of six kinds, over loads and memory, and its parameters.

    python benchmarks/bench_astraea_sim.py --out astraea.json

The workload is `intercepted` (Astraea §5.1). Rates are multiples of the measured capacity (`weft.core.sim.capacity`,
with tools that take no time), and memory is a part of `--kv-tokens`. All figures are ratios to stock FCFS with the same
programs, arrivals and memory. Those with an oracle know the output lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import typer
from arrival_rates import arriving
from common import machine, spread
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, TraceProgram, capacity, simulate
from weft.core.trace.workloads import generate, poisson

THRESHOLDS: Final = (128, 256, 384, 512, 640)
HOST: Final = "KV manager, "  # least-waste with host memory
VARIANTS: Final = {
    "sjf (oracle)": PolicyConfig("sjf"),
    "plas": PolicyConfig("plas"),
    "astraea": PolicyConfig("astraea"),
    "astraea (oracle)": PolicyConfig("astraea-oracle"),
    "half thresholds": PolicyConfig("astraea", tuple(each // 2 for each in THRESHOLDS)),
    "double thresholds": PolicyConfig("astraea", tuple(each * 2 for each in THRESHOLDS)),
    "tau 2.5": PolicyConfig("astraea", THRESHOLDS, 2.5),
    "tau 10": PolicyConfig("astraea", THRESHOLDS, 10.0),
    "no aging": PolicyConfig("astraea", THRESHOLDS, 1e9),
    f"{HOST}fcfs": PolicyConfig("fcfs"),
    f"{HOST}astraea": PolicyConfig("astraea"),
    f"{HOST}astraea (oracle)": PolicyConfig("astraea-oracle"),
}


def measure(programs: Sequence[TraceProgram], rate: float, seed: int, base: SimSettings) -> dict[str, float]:
    """By variant: the mean completion time as a ratio to stock FCFS."""
    made = arriving(programs, rate, seed)
    stock = simulate(made, replace(base, policy=PolicyConfig("fcfs"))).mean_latency
    found = {}
    for name, policy in VARIANTS.items():
        settings = replace(base, policy=policy)
        if name.startswith(HOST):
            host_kv_tokens = 8 * base.kv_tokens
            settings = replace(settings, kv_policy=KvPolicyConfig("least-waste"), host_kv_tokens=host_kv_tokens)
        found[name] = simulate(made, settings).mean_latency / stock
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """Completion time ÷ FCFS by setting: median (lowest, highest) of the seeds."""
    table = Table(title=f"mean completion time ÷ FCFS, {data['programs']} programs, {data['seeds']} seeds")
    table.add_column("variant")
    for setting in data["ratios"]:
        table.add_column(setting, justify="right")
    for name in VARIANTS:
        table.add_row(name, *(spread([seed[name] for seed in seeds]) for seeds in data["ratios"].values()))
    console.print(table)


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 200,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    loads: Annotated[str, typer.Option(help="Multiples of the measured capacity.")] = "0.5,0.8,1.1",
    memory: Annotated[str, typer.Option(help="Parts of the KV cache.")] = "0.3,0.9",
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the whole KV cache holds.")] = 65_536,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Simulate, print a table and write JSON."""
    console = Console(width=160)
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens)
    settings = [(float(load), float(part)) for part in memory.split(",") for load in loads.split(",")]
    ratios: dict[str, list[dict[str, float]]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=seeds * len(settings))
        for seed in range(seeds):
            made = generate("intercepted", programs, poisson(Random(0), 1.0), Random(f"intercepted {seed}"))
            most = capacity(made, base, tools=False)
            for load, part in settings:
                engine = replace(base, kv_tokens=round(part * kv_tokens))
                found = measure(made, load * most, seed, engine)
                ratios.setdefault(f"load {load:g}, memory {part:.0%}", []).append(found)
                progress.advance(task)
    data = {"machine": machine(), "programs": programs, "seeds": seeds, "slots": slots, "kv_tokens": kv_tokens}
    data |= {"ratios": ratios}
    show(data, console)
    if out is not None:
        out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
