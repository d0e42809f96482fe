"""KV policies against Bélády: prompt tokens that they compute on one sequence of accesses, as a multiple of the least.

    python benchmarks/bench_kv_replay.py --seeds 11,12,13,14,15 --out kv_replay.json
    python benchmarks/bench_kv_replay.py --seeds 11 --only tau --tau /path/of/tau_bench_airline_gpt4o.json

The accesses are those of a simulation under `--policy`. A seed draws other programs and other arrivals; of a file of
tau-bench it draws which 50 runs, and when they arrive. Programs with a call that the KV cache cannot hold are left out.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from common import machine
from rich.console import Console
from rich.table import Table

from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, TraceProgram
from weft.core.sim.kv_cache.kv_replay import replay_all
from weft.core.trace.importers import TraceImport
from weft.core.trace.workloads import generate, poisson

PROGRAMS: Final = {"tools": (60, 2.0), "chat": (60, 2.0), "search": (8, 0.2), "mixed": (30, 0.3)}  # and a second
TAU: Final = (50, 2.0)
KV_TOKENS: Final = (24_576, 32_768, 65_536)


class Row(NamedTuple):
    """One rule in one setting; each list has a figure for each seed."""

    workload: str
    kv_tokens: int
    rule: str
    ratios: list[float]  # computed prompt tokens, as a multiple of Bélády's
    found: list[float]  # share of the prompt tokens that were in the cache


def programs_of(workload: str, seed: int, tau: Path | None) -> list[TraceProgram]:
    """The programs of a seed, with their arrivals."""
    count, rate = PROGRAMS.get(workload, TAU)
    arrivals = poisson(random.Random(f"arrivals {seed}"), rate)
    if workload in PROGRAMS:
        return generate(workload, count, arrivals, random.Random(f"programs {seed}"))
    runs = list(TraceImport([tau], arrivals=arrivals)) if tau is not None else []
    drawn = random.Random(f"runs {seed}").sample(runs, min(count, len(runs)))
    return [replace(run, arrival_s=early.arrival_s) for run, early in zip(drawn, runs, strict=False)]


def rows_of(workload: str, kv_tokens: int, seeds: Sequence[int], policy: str, tau: Path | None) -> list[Row]:
    """Replay each seed against each rule."""
    rows: dict[str, Row] = {}
    for seed in seeds:
        settings = SimSettings(PolicyConfig(policy), kv_tokens=kv_tokens)
        programs = [each for each in programs_of(workload, seed, tau) if _most_tokens(each) <= kv_tokens]
        best, *others = replay_all(programs, settings)
        for result in (best, *others):
            row = rows.setdefault(result.rule, Row(workload, kv_tokens, result.rule, [], []))
            row.ratios.append(result.ratio(best))
            row.found.append(result.hit_tokens / result.prompt_tokens)
    return list(rows.values())


def _most_tokens(program: TraceProgram) -> int:
    return max(call.prompt_tokens + call.output_tokens for call in program.calls)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print medians, and below them the worst seed."""
    rules = [rule for rule in dict.fromkeys(row.rule for row in rows) if not rule.startswith("belady")]
    by_cell = {(row.workload, row.kv_tokens, row.rule): row for row in rows}
    table = Table(title="computed prompt tokens ÷ Bélády: median (highest)")
    for heading in ("workload", "KV tokens", "Bélády finds", *rules):
        table.add_column(heading)
    for (workload, kv_tokens, rule), best in by_cell.items():
        if rule.startswith("belady"):
            cells = (by_cell[workload, kv_tokens, each].ratios for each in rules)
            figures = (f"{statistics.median(ratios):.3f} ({max(ratios):.3f})" for ratios in cells)
            table.add_row(workload, f"{kv_tokens:,}", f"{statistics.median(best.found):.0%}", *figures)
    console.print(table)


def main(
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "11,12,13,14,15",
    policy: Annotated[str, typer.Option(help="The scheduling policy that gives the times.")] = "fcfs",
    only: Annotated[str, typer.Option(help="Only workloads whose name contains this.")] = "",
    tau: Annotated[Path | None, typer.Option(help="A file of tau-bench; without it there is none.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results (.json).")] = None,
) -> None:
    """Compare all KV policies with the optimum."""
    rows: list[Row] = []
    numbers = [int(seed) for seed in seeds.split(",")]
    for workload in (*PROGRAMS, *(["tau-bench"] if tau is not None else [])):
        for kv_tokens in KV_TOKENS if only in workload else ():
            rows += rows_of(workload, kv_tokens, numbers, policy, tau)
            typer.echo(f"{workload} {kv_tokens}", err=True)
            if out is not None:
                options = {"seeds": numbers, "policy": policy}
                results = {"options": options, "machine": machine(), "rows": [row._asdict() for row in rows]}
                out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    show(rows, Console(width=200))


if __name__ == "__main__":
    typer.run(main)
