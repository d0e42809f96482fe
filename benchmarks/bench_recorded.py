"""The default policy beside plain rivals on samples of recorded sessions, in simulation: with and without host memory.

weft trace import FILES --max-context 128000 --max-turns 80 --gap-cap 60 --out sessions.jsonl
python benchmarks/bench_recorded.py sessions.jsonl --out build/recorded

A sample that is in the JSON file already is not simulated again, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from common import machine, pyplot

from weft.commands.simulate.leaderboard import simulate_all
from weft.core.sim import SimSettings
from weft.core.sim.study.leaderboard import HOST_LRU, HOST_NEXT_USE, NO_HOST, Rival, alone, score
from weft.core.sim.study.load import with_load
from weft.core.trace.format import TraceProgram, read
from weft.core.trace.workloads import poisson

RIVALS: Final = (
    Rival("fcfs", False, NO_HOST),
    Rival("priority", False, NO_HOST),
    Rival("priority", True, NO_HOST),
    Rival("auto", None, NO_HOST),
    Rival("srpt", True, NO_HOST),
    Rival("fcfs", False, HOST_LRU),
    Rival("fcfs", False, HOST_NEXT_USE),
    Rival("auto", None, HOST_NEXT_USE),
)
LABELS: Final = (
    "stock order (FCFS)",
    "FCFS by program",
    "FCFS by program, plain gate",
    "Weft without host memory",
    "shortest remaining first, told sizes, gate",
    "FCFS + host memory by LRU",
    "FCFS + host memory by next use",
    "Weft's default",
)
TICKS: Final = (0.1, 0.2, 0.3, 0.5, 0.7, 1)
PLAIN_GATE: Final = RIVALS[2].name
PLAIN_HOST: Final = RIVALS[6].name


class Sample(NamedTuple):
    """Sessions that are drawn, and the engine that they arrive at."""

    seed: int
    sessions: int
    load: float
    kv_tokens: int

    @property
    def key(self) -> str:
        return f"{self.sessions} sessions, load {self.load:g}, KV {self.kv_tokens:,}, seed {self.seed}"


SAMPLES: Final = (
    Sample(101, 40, 1.5, 500_000),
    Sample(102, 60, 0.9, 500_000),
    Sample(103, 60, 1.5, 500_000),
    Sample(104, 80, 0.9, 500_000),
    Sample(105, 100, 0.9, 500_000),
    Sample(106, 120, 0.9, 500_000),
    Sample(107, 60, 1.1, 1_000_000),
    Sample(108, 60, 0.9, 4_000_000),
)


def drawn(sessions: Sequence[TraceProgram], sample: Sample, base: SimSettings) -> list[TraceProgram]:
    """The sessions of a sample, with Poisson arrivals."""
    rng = random.Random(f"sessions {sample.seed}")
    arrivals = poisson(random.Random(f"arrivals {sample.seed}"), 1.0)
    chosen = rng.sample(list(sessions), min(sample.sessions, len(sessions)))
    return with_load([replace(each, arrival_s=next(arrivals)) for each in chosen], sample.load, base)


def measure(sessions: Sequence[TraceProgram], sample: Sample, host_tokens: int) -> dict[str, dict[str, float]]:
    """By rival, what it makes of a sample."""
    base = SimSettings(batch_size=64, kv_tokens=sample.kv_tokens)
    programs = drawn(sessions, sample, base)
    alone_s = alone(programs, base)
    engines = [rival.settings(replace(base, host_kv_tokens=host_tokens)) for rival in RIVALS]
    results = simulate_all(sample.key, programs, engines)
    return {
        rival.name: score(rival, result, programs, alone_s).measures
        for rival, result in zip(RIVALS, results, strict=True)
    }


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]], to: str, names: Sequence[str]) -> list[str]:
    """The mean completion times as ratios to those of one rival, and the 99th percentiles of the last one's."""
    lines = [f"| ÷ {to} | " + " | ".join(names) + f" | p99 of {names[-1]} |", "|---" * (len(names) + 2) + "|"]
    for key, rows in found.items():
        ratios = [f"{rows[name]['mean_s'] / rows[to]['mean_s']:.2f}" for name in names]
        lines.append(f"| {key} | " + " | ".join(ratios) + f" | {rows[names[-1]]['p99_s'] / rows[to]['p99_s']:.2f} |")
    medians = [
        statistics.median(rows[name]["mean_s"] / rows[to]["mean_s"] for rows in found.values()) for name in names
    ]
    p99 = statistics.median(rows[names[-1]]["p99_s"] / rows[to]["p99_s"] for rows in found.values())
    return [*lines, "| median | " + " | ".join(f"{each:.2f}" for each in medians) + f" | {p99:.2f} |"]


def plot(found: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path) -> None:
    """Mean completion time of each rival as a ratio to FCFS, a point for each sample."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"
    names = [rival.name for rival in RIVALS]
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for place, name in enumerate(reversed(names)):
        ratios = [rows[name]["mean_s"] / rows[names[0]]["mean_s"] for rows in found.values()]
        is_ours = name.startswith("auto")
        axis.plot(ratios, [place] * len(ratios), "o", alpha=0.5, color="tab:orange" if is_ours else "tab:grey")
        axis.plot(math.exp(statistics.fmean(map(math.log, ratios))), place, "|", markersize=16, color="black")
    axis.set_yticks(range(len(names)), list(reversed(LABELS)))
    axis.set(xscale="log", xlabel="mean completion time ÷ that in the stock order (bar: geometric mean)")
    axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axis.minorticks_off()
    figure.savefig(path)


def main(
    trace: Annotated[Path, typer.Argument(help="Recorded sessions, as `weft trace import` writes them.")],
    out: Annotated[Path, typer.Option(help="A folder for the JSON file and the picture.")],
    host_tokens: Annotated[int, typer.Option(help="Tokens of host memory of the rivals that have some.")] = 1_500_000,
) -> None:
    """Print two tables: without host memory beside a plain gate, and with it beside FCFS with host memory."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recorded.json"
    saved = json.loads(file.read_text()) if file.exists() else {"machine": machine(), "samples": {}}
    sessions = read(trace)
    for sample in SAMPLES:
        if sample.key not in saved["samples"]:
            saved["samples"][sample.key] = measure(sessions, sample, host_tokens)
            file.write_text(json.dumps(saved, indent=1))
    found = saved["samples"]
    typer.echo("\n".join(table(found, PLAIN_GATE, [RIVALS[0].name, RIVALS[1].name, RIVALS[4].name, RIVALS[3].name])))
    typer.echo("\n".join(["", *table(found, PLAIN_HOST, [RIVALS[5].name, RIVALS[7].name])]))
    plot(found, out / "recorded.svg")


if __name__ == "__main__":
    typer.run(main)
