"""Chats that are all there at the start, simulated: the makespan under each policy ÷ FCFS (Autellix Fig. 16).

    python benchmarks/bench_all_at_once.py --out at-once.json

MLFQ and ATLAS swap the KV of calls that they preempt, as in the paper; there is no limit to the host memory for it.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from common import machine, spread
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate
from weft.core.trace.workloads import generate, poisson

POLICIES: Final = ("fcfs", "mlfq", "atlas", "auto")
SWAP: Final = ("mlfq", "atlas")


def measure(programs: int, seed: int, base: SimSettings) -> dict[str, float]:
    """By policy: the makespan ÷ that of FCFS."""
    made = generate("chat", programs, poisson(random.Random(0), 1.0), random.Random(f"chat {seed}"))
    crowd = [replace(each, arrival_s=0.0) for each in made]
    found = {}
    for name in POLICIES:
        settings = replace(base, policy=PolicyConfig(name), preemption="swap" if name in SWAP else "recompute")
        found[name] = simulate(crowd, settings).makespan
    return {name: makespan / found["fcfs"] for name, makespan in found.items()}


def main(
    programs: Annotated[str, typer.Option(help="Numbers of chats, with commas.")] = "100,400",
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 64,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 65_536,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Simulate, print a table and write JSON."""
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens)
    console = Console(width=120)
    ratios = {
        count: [measure(count, seed, base) for seed in track(range(seeds), f"{count} chats", transient=True)]
        for count in map(int, programs.split(","))
    }
    table = Table(title="makespan ÷ FCFS, all chats at once")
    for heading in ("chats", *POLICIES):
        table.add_column(heading)
    for count, runs in ratios.items():
        table.add_row(str(count), *(spread([run[name] for run in runs]) for name in POLICIES))
    console.print(table)
    if out is not None:
        data = {"machine": machine(), "seeds": seeds, "slots": slots, "kv_tokens": kv_tokens, "ratios": ratios}
        out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
