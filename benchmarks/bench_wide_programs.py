"""CPU time of Weft's bookkeeping for a call, in programs of 1,000, 10,000 and 100,000 calls. No model is needed.

    python benchmarks/bench_wide_programs.py --out bench_wide_programs.json

The shapes are those of `wide_programs.py`. The sizes are measured in turn (A B C A B C ...), so that other load on the
machine affects all of them alike. The time includes a program's runs, lineage, graph and row in the process table, at
the beginning and at the end of each call.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine, pyplot, spread
from rich.console import Console
from rich.progress import track
from rich.table import Table
from wide_programs import SHAPES, Bookkeeping

SIZES: Final = (1_000, 10_000, 100_000)


class Timer:
    """Sums up the time of each call's bookkeeping.

    Args:
        calls: how many calls the program may have.
    """

    def __init__(self, calls: int) -> None:
        self.times_s = array("d", bytes(8 * (calls + 1)))  # some shapes round up by a call

    @contextmanager
    def __call__(self, number: int) -> Iterator[None]:
        start_s = time.thread_time()
        yield
        self.times_s[number] += time.thread_time() - start_s


def measure(shape: str, calls: int) -> dict[str, float]:
    """Statistics of the microseconds of one call's bookkeeping, in a program of so many calls."""
    timer = Timer(calls)
    gc.collect()
    gc.disable()
    SHAPES[shape](Bookkeeping(timer), calls)
    gc.enable()
    times_us = [each * 1e6 for each in timer.times_s if each]
    quantiles = statistics.quantiles(times_us, n=100)
    return {
        "mean_us": statistics.fmean(times_us),
        "median_us": statistics.median(times_us),
        "p95_us": quantiles[94],
        "p99_us": quantiles[98],
    }


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    rounds: Annotated[int, typer.Option(help="How often each shape and size is measured.", min=1)] = 5,
    largest: Annotated[int, typer.Option(help="Leave out larger programs.", min=SIZES[0])] = SIZES[-1],
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console()
    sizes = [size for size in SIZES if size <= largest]
    results: dict[str, dict[int, list[dict[str, float]]]] = {shape: {size: [] for size in sizes} for shape in SHAPES}
    steps = [(shape, size) for _ in range(rounds) for shape in SHAPES for size in sizes]
    for shape, size in track(steps, "measuring", console=console, transient=True):
        results[shape][size].append(measure(shape, size))
    table = Table(title=f"bookkeeping of a call, microseconds: mean (lowest, highest) of {rounds} rounds, p95, p99")
    table.add_column("shape")
    for size in sizes:
        table.add_column(f"{size:,} calls", justify="right")
    table.add_column(f"{sizes[-1]:,} ÷ {sizes[0]:,}", justify="right")
    for shape, by_size in results.items():
        first, last = by_size[sizes[0]], by_size[sizes[-1]]
        ratios = [b["mean_us"] / a["mean_us"] for a, b in zip(first, last, strict=True)]
        table.add_row(shape, *(_cell(by_size[size]) for size in sizes), spread(ratios))
    console.print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "rounds": rounds, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def _cell(measured: list[dict[str, float]]) -> str:
    tails = (statistics.median(each[name] for each in measured) for name in ("p95_us", "p99_us"))
    return ", ".join([spread([each["mean_us"] for each in measured], 0), *(f"{tail:.0f}" for tail in tails)])


def plot(results: dict[str, dict[int, list[dict[str, Any]]]], path: Path) -> None:
    """A line for each shape: the mean over the size of the program, with the lowest and highest round as whiskers."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for shape, by_size in results.items():
        means = [[each["mean_us"] for each in measured] for measured in by_size.values()]
        medians = [statistics.median(each) for each in means]
        whiskers = [
            [middle - min(each) for middle, each in zip(medians, means, strict=True)],
            [max(each) - middle for middle, each in zip(medians, means, strict=True)],
        ]
        axes.errorbar(list(by_size), medians, yerr=whiskers, marker="o", capsize=3, label=shape)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("calls of the program")
    axes.set_ylabel("bookkeeping of a call, microseconds (mean)")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
