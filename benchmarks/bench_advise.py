"""How often the interval of `weft advise` holds what real engines did: the tiny model, five workloads, two loads each.

    python benchmarks/bench_advise.py --out advise
    python benchmarks/bench_advise.py --out advise --clock steps

`weft bench` plays the programs of a workload on stock vLLM and under Weft's default, step by step in turns. The same
programs are then written as a trace, for which `weft advise` says how Weft's default changes their mean completion
time. On the clock of seconds, the engine of the advice is what `weft profile` measured. On the clock of steps, every
step takes the same time, in the advice too, so that only the rules are tested and not the step times. The folder keeps
what was measured; what it has is not measured again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from common import machine, pyplot

from weft.bench.load import CLOSED
from weft.bench.rounds import EQUAL_STEPS, programs_of_round
from weft.bench.settings import BenchSettings
from weft.core.sim.study.engine_profile import EngineProfile
from weft.core.sim.study.load import capacity
from weft.core.trace.format import write

Clock = Literal["seconds", "steps"]
Row = Mapping[str, Any]

STOCK: Final = "stock-fcfs"
WEFT: Final = "auto"  # the default without host memory
PROGRAMS: Final = {"mixed": 20, "tools": 24, "chat": 30, "search": 6, "swe": 8}
LOAD: Final = 0.9  # of what the engine can serve; the other load is all programs at once
SIZES: Final = ("--batch-size", "8", "--kv-tokens", "3264")  # eight contexts of about 400 tokens
SCALE: Final = 0.1  # of lengths and times


def profiled(folder: Path, clock: Clock) -> EngineProfile:
    """The engine as `weft advise` is told of it."""
    path = folder / "profile.json"
    if not path.exists():
        chunk_tokens = str(BenchSettings("chat", scale=SCALE).chunk_tokens)
        _weft(
            "profile",
            "tiny",
            "--out",
            str(path),
            "--max-num-seqs",
            *SIZES[1:],
            "--max-num-batched-tokens",
            chunk_tokens,
        )
    engine = EngineProfile.read(path)
    return engine if clock == "seconds" else replace(engine, source="steps of one length", step_time=EQUAL_STEPS)


def made(workload: str, seed: int, clock: Clock, folder: Path) -> Iterator[Row]:
    """Play a workload at both loads, ask for advice, and compare.

    The engine is profiled just before, because a shared machine may be half as fast again a few minutes later.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engine = profiled(folder, clock)
    count, kv_tokens = PROGRAMS[workload], int(SIZES[-1])
    settings = BenchSettings(workload, count, seed, SCALE, (STOCK, WEFT), int(SIZES[1]), kv_tokens, clock, "tiny")
    engine.write(folder / "engine.json")
    crowd = programs_of_round(settings, CLOSED, 0, kv_tokens).programs
    rate = f"{LOAD * capacity(crowd, engine.settings(), tools=False) * SCALE:.3g}"
    _weft(
        *("bench", workload, "--programs", str(count), "--seed", str(seed), "--scale", str(SCALE), *SIZES),
        *("--baselines", f"{STOCK},{WEFT}", "--rates", rate, "--closed", "--rounds", "1", "--clock", clock),
        *("--out", str(folder / "bench")),
    )
    for played in json.loads((folder / "bench" / "results.json").read_text())["rounds"]:
        trace = folder / f"{played['load']}.jsonl"
        write(programs_of_round(settings, played["load"], 0, played["max_call_tokens"]).programs, trace)
        advice = json.loads(_weft("advise", str(trace), "--engine", str(folder / "engine.json"), *SIZES, "--json"))
        (change,) = (way["mean_change"] for way in advice["ways"] if way["way"]["name"] == "Weft")
        stock, weft = (
            statistics.fmean(program[clock] for program in played["measurements"][name]["programs"])
            for name in (STOCK, WEFT)
        )
        name = f"{workload}, {'at once' if played['load'] == CLOSED else f'load {LOAD}'}"
        yield {"run": name, "measured": weft / stock - 1, "advised": change["value"], **change}


def covers(row: Row) -> bool:
    """Whether the interval of the advice holds what was measured."""
    return bool(row["low"] <= row["measured"] <= row["high"])


def draw(rows: Sequence[Row], path: Path) -> None:
    """What was advised, with its interval, and what was measured, for each run."""
    figure, axes = pyplot().subplots(figsize=(7, 0.35 * len(rows) + 1.2), layout="constrained")
    for y, row in enumerate(rows):
        low, value, high = (100 * row[name] for name in ("low", "advised", "high"))
        color = "tab:blue" if covers(row) else "tab:red"
        axes.plot((low, high), (y, y), color=color, lw=5, alpha=0.4, solid_capstyle="butt")
        axes.plot(value, y, "|", color=color, ms=10)
        axes.plot(100 * row["measured"], y, "o", color="black", ms=5)
    axes.set_yticks(range(len(rows)), [row["run"] for row in rows])
    axes.invert_yaxis()
    axes.axvline(0, color="0.6", lw=0.8)
    axes.set_xlabel("change of the mean completion time, %: measured (dots), and the intervals of the advice")
    figure.savefig(path, metadata={"Date": None})


def main(
    out: Annotated[Path, typer.Option(help="Folder for what is measured, and for CLOCK-SEED.json and .svg.")],
    clock: Annotated[
        str, typer.Option(help="seconds or steps: by what calls arrive and times are counted.")
    ] = "seconds",
    seed: Annotated[int, typer.Option(help="Of the programs.")] = 11,
    only: Annotated[str, typer.Option(help="These workloads, such as chat,mixed; others if the folder has them.")] = "",
) -> None:
    """Compare, and say how many intervals hold what was measured."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for workload in PROGRAMS:
        folder = out / f"{clock}-{seed}-{workload}"
        if (folder / "bench" / "results.json").exists() or workload in (only.split(",") if only else PROGRAMS):
            counted: Clock = "steps" if clock == "steps" else "seconds"
            rows += made(workload, seed, counted, folder)
    for row in rows:
        interval = f"{row['advised']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        typer.echo(
            f"{row['run']:18} measured {row['measured']:+.1%}, advised {interval}{'' if covers(row) else ' MISSED'}"
        )
    worst = max(abs((1 + row["measured"]) / (1 + row["advised"]) - 1) for row in rows)
    typer.echo(f"The interval holds {sum(map(covers, rows))} of {len(rows)}. The ratio is off by {worst:.1%} at most.")
    (out / f"{clock}-{seed}.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))
    draw(rows, out / f"{clock}-{seed}.svg")


def _weft(*arguments: str) -> str:
    """What a command of Weft prints."""
    command = [sys.executable, "-m", "weft", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


if __name__ == "__main__":
    typer.run(main)
