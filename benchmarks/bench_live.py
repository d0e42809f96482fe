"""Programs on a real engine: Weft against stock vLLM, side by side.

    python benchmarks/bench_live.py --out bench_live.json            # ATLAS against stock first come, first served
    python benchmarks/bench_live.py --workload alone                 # one program at a time: what Weft costs

Every round draws new programs, which all rivals play, in turns of one engine step (A B A B ...), so that noise hits all
alike; arrivals are counted in steps too. Latencies are given in steps and in seconds that the engine was at work. All
engines live in this process: two processes of the same engine differ by several per cent. Ratios are per round, then
median and spread over rounds. The model is the tests' tiny random Llama.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from live_engine import Play, ProgramSpec, Rival, Round, Stepper, alone, mixed, unloaded_steps

from tiny_model import make_tiny_llama
from weft.core.policies import DEFAULT_BOUNDS_S

RIVALS = {
    "stock-fcfs": Rival(stock="fcfs"),
    "stock-again": Rival(stock="fcfs"),  # against stock-fcfs: how much is noise
    "stock-priority": Rival(stock="priority"),
    **{name: Rival(weft={"name": name}) for name in ("fcfs", "mlfq", "plas", "atlas")},
    "atlas-swap": Rival(weft={"name": "atlas"}, swaps=True),
    "atlas-fixed": Rival(weft={"name": "atlas", "bounds_s": DEFAULT_BOUNDS_S}),
    "atlas-tokens": Rival(weft={"name": "atlas", "token_s": 0.01}),
}
_ENDED = object()
MEASURES = ("mean", "p50", "p95", "p99")


def summarise(values: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(values, n=100, method="inclusive")
    return {"mean": statistics.fmean(values), "p50": quantiles[49], "p95": quantiles[94], "p99": quantiles[98]}


def measure(result: Round) -> dict[str, Any]:
    """Program latency in steps and seconds, and latency for each token generated (Autellix §6.1)."""
    return {
        "steps": summarise([program.steps for program in result.programs]),
        "seconds": summarise([program.seconds for program in result.programs]),
        "steps_per_token": summarise([program.steps / program.tokens for program in result.programs]),
        "tokens_per_step": sum(program.tokens for program in result.programs) / result.steps,
        "tokens_per_s": sum(program.tokens for program in result.programs) / result.seconds,
        "median_step_s": result.step_s,
        "preemptions": result.preemptions,
    }


def ratios(rounds: list[dict[str, Any]], base: list[dict[str, Any]], *path: str) -> tuple[float, float, float]:
    """Median, lowest and highest of rival ÷ base over rounds."""

    def value(measured: dict[str, Any]) -> float:
        for key in path:
            measured = measured[key]
        return float(measured)  # type: ignore[arg-type]

    found = [value(ours) / value(theirs) for ours, theirs in zip(rounds, base, strict=True)]
    return statistics.median(found), min(found), max(found)


def main(
    out: Annotated[Path | None, typer.Option(help="Write the results here as JSON, and a plot beside it.")] = None,
    rivals: Annotated[str, typer.Option(help=f"Comma-separated, the first is the base: {', '.join(RIVALS)}.")] = (
        "stock-fcfs,atlas"
    ),
    workload: Annotated[Literal["mixed", "alone"], typer.Option(help="What arrives.")] = "mixed",
    programs: Annotated[int, typer.Option(min=2, help="Programs in a round.")] = 80,
    every_steps: Annotated[float, typer.Option(help="Mean steps from one arrival to the next (mixed).")] = 27.0,
    slots: Annotated[int, typer.Option(min=1, help="Calls that run at once (max_num_seqs).")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the programs.")] = 0,
    steps_clock: Annotated[
        bool, typer.Option("--steps-clock", help="Weft's clock counts 10 ms a step: repeatable to the digit.")
    ] = False,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console(width=120)
    names = rivals.split(",")
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise typer.BadParameter(f"unknown rival {unknown[0]!r}; choose from {', '.join(RIVALS)}")
    draws = [
        mixed(rng, programs, every_steps) if workload == "mixed" else alone(rng, programs)
        for rng in (random.Random(seed * 1000 + number) for number in range(rounds))
    ]
    results = play(console, names, draws, slots, steps_clock=steps_clock)
    measured = {name: [measure(result) for result in rounds] for name, rounds in results.items()}
    show(console, measured, statistics.fmean(unloaded_steps(spec) for specs in draws for spec in specs))
    if out is not None:
        settings = {"workload": workload, "programs": programs, "every_steps": every_steps, "slots": slots}
        settings |= {"rounds": rounds, "seed": seed, "steps_clock": steps_clock}
        machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.platform()}
        schedules = {name: asdict(RIVALS[name]) for name in names}
        written = {"machine": machine, "settings": settings, "rivals": schedules, "rounds": measured}
        out.write_text(json.dumps(written, indent=1))
        plot(results, out.with_suffix(".svg"))


def play(
    console: Console, names: list[str], draws: list[list[ProgramSpec]], slots: int, *, steps_clock: bool
) -> dict[str, list[Round]]:
    """Every draw on every rival, in turns."""
    results: dict[str, list[Round]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        with console.status("starting an engine for each rival"):
            model = make_tiny_llama(Path(folder) / "tiny")
            engines = {name: Stepper(model, RIVALS[name], slots, steps_clock=steps_clock) for name in names}
        lockstep(engines, alone(random.Random(0), 3))  # to warm up
        for number, specs in enumerate(track(draws, "playing rounds", console=console, transient=True)):
            turn = number % len(names)
            order = names[turn:] + names[:turn]  # nobody is always first
            for name, result in lockstep({name: engines[name] for name in order}, specs).items():
                results[name].append(result)
    return results


def lockstep(engines: dict[str, Stepper], specs: list[ProgramSpec]) -> dict[str, Round]:
    """Play the same programs on every engine, a step of one after a step of another, so that noise hits all alike."""
    plays = {name: Play(engine, specs) for name, engine in engines.items()}
    running = {name: play.run() for name, play in plays.items()}
    while running:
        for name in list(running):
            if next(running[name], _ENDED) is _ENDED:
                del running[name]
    return {name: play.result for name, play in plays.items()}


def show(console: Console, measured: dict[str, list[dict[str, Any]]], unloaded: float) -> None:
    base_name, base = next(iter(measured.items()))
    loaded = statistics.fmean(result["steps"]["mean"] for result in base)
    console.print(f"{base_name}: mean program latency {loaded:.0f} steps, {loaded / unloaded:.1f} times the unloaded\n")
    table = Table(title=f"ratio to {base_name}: median over rounds (lowest, highest)")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    lines = (
        [("steps", m) for m in MEASURES]
        + [("seconds", m) for m in MEASURES]
        + [("steps_per_token", m) for m in MEASURES]
    )
    for path in [*lines, ("tokens_per_step",), ("tokens_per_s",), ("median_step_s",)]:
        cells = ["{:.3f} ({:.2f}, {:.2f})".format(*ratios(rounds, base, *path)) for rounds in measured.values()]
        table.add_row(" ".join(path), *cells)
    table.add_row(
        "preemptions a round",
        *(f"{statistics.median(r['preemptions'] for r in rounds):.0f}" for rounds in measured.values()),
    )
    console.print(table)


def plot(results: dict[str, list[Round]], path: Path) -> None:
    """What share of programs took at most so many steps, over all rounds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, rounds in results.items():
        axes.ecdf([program.steps for result in rounds for program in result.programs], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("program latency, engine steps")
    axes.set_ylabel("share of programs")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
