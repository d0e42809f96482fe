"""Plots of a session, like Autellix Fig. 12, 13, 16 and 18."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.bench.load import CLOSED
from weft.bench.results.measures import CALL_PARTS, FiguresByLoad, figure, rates_of
from weft.bench.results.records import Round
from weft.bench.results.sim_comparison import SimComparison
from weft.core.errors import BenchError


def pyplot() -> Any:
    """Returns matplotlib's `pyplot`, set up to draw into SVG files only, or raises BenchError."""
    try:
        importlib.import_module("matplotlib").use("svg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise BenchError("pictures are drawn with matplotlib, which is not installed: pip install matplotlib") from None


def save_plots(
    folder: Path, rounds: Sequence[Round], figures: FiguresByLoad, comparisons: Sequence[SimComparison]
) -> list[str]:
    """Write all plots for which there are data; returns the names of their files, in the order of the report."""
    plt = pyplot()
    plots = {
        "latency.svg": _latency_over_rates(plt, figures, ("mean",)),
        "tail.svg": _latency_over_rates(plt, figures, ("p95", "p99")),
        "distribution.svg": _distributions(plt, rounds),
        "breakdown.svg": _breakdown(plt, figures),
        "makespan.svg": _makespans(plt, figures),
        "simulated.svg": _simulated_latency(plt, comparisons),
    }
    for name, plot in plots.items():
        if plot is not None:
            plot.savefig(folder / name, metadata={"Date": None})
            plt.close(plot)
    return [name for name, plot in plots.items() if plot is not None]


def _latency_over_rates(plt: Any, figures: FiguresByLoad, statistics_: Sequence[str]) -> Any:
    """Latency per token over the arrival rate, one panel for each statistic: a line for the median over rounds, and an
    area from the lowest to the highest round."""
    loads = rates_of(figures)
    if not loads:
        return None
    plot, axes = plt.subplots(
        1, len(statistics_), figsize=(6 * len(statistics_), 4), layout="constrained", squeeze=False
    )
    rates = [float(load) for load in loads]
    for statistic, axis in zip(statistics_, axes[0], strict=True):
        for name in figures[loads[0]]:
            rows = [[figure(row, f"steps_per_token.{statistic}") for row in figures[load][name]] for load in loads]
            (line,) = axis.plot(rates, [statistics.median(row) for row in rows], marker="o", label=name)
            axis.fill_between(rates, *zip(*((min(r), max(r)) for r in rows), strict=True), alpha=0.15, lw=0)
            line.set_markersize(4)
        axis.set(xlabel="programs per second", ylabel=f"{statistic} latency, steps per token", yscale="log")
        axis.legend()
    return plot


def _distributions(plt: Any, rounds: Sequence[Round]) -> Any:
    """The distribution of latency per token, over all programs of the last load that is not a closed batch."""
    loads = list(dict.fromkeys(round_.load for round_ in rounds if round_.load != CLOSED))
    if not loads:
        return None
    plot, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    chosen = [round_ for round_ in rounds if round_.load == loads[-1]]
    for name in chosen[0].measurements:
        programs = [program for round_ in chosen for program in round_.measurements[name].programs]
        axis.ecdf([program.steps / program.path_tokens for program in programs], label=name)
    axis.set(
        xlabel=f"latency at {loads[-1]} programs per second, steps per token", ylabel="share of programs", xscale="log"
    )
    axis.legend()
    return plot


def _breakdown(plt: Any, figures: FiguresByLoad) -> Any:
    """Where the time of a call goes, one panel for each load: medians over rounds of the mean call, and their range."""
    baselines = list(next(iter(figures.values())))
    plot, axes = plt.subplots(
        1, len(figures), figsize=(5 * len(figures), 1 + 0.4 * len(baselines)), layout="constrained", squeeze=False
    )
    for (load, rows), axis in zip(figures.items(), axes[0], strict=True):
        ends = [0.0] * len(baselines)
        for part in CALL_PARTS:
            widths = [statistics.median(1e3 * row["call_seconds"][part] for row in rows[name]) for name in baselines]
            axis.barh(baselines, widths, left=ends, label=part)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for index, name in enumerate(baselines):
            totals = [1e3 * sum(row["call_seconds"].values()) for row in rows[name]]
            axis.plot((min(totals), max(totals)), (index, index), color="black", lw=1, marker="|")
        axis.invert_yaxis()
        axis.set(xlabel="milliseconds of a call in the engine", title=load)
    axes[0][0].legend(fontsize="small")
    return plot


def _makespans(plt: Any, figures: FiguresByLoad) -> Any:
    """The makespan of a closed batch: a bar for the median over rounds, a whisker from the lowest to the highest."""
    if CLOSED not in figures:
        return None
    rows = {name: [row["makespan_steps"] for row in rounds] for name, rounds in figures[CLOSED].items()}
    return _bars(plt, rows, "makespan of a closed batch, steps")


def _simulated_latency(plt: Any, comparisons: Sequence[SimComparison]) -> Any:
    """Mean program latency simulated in steps of equal length, also of SRPT, which knows the future."""
    loads = list(dict.fromkeys(each.load for each in comparisons if each.load != CLOSED))
    rows: dict[str, list[float]] = {}
    for each in comparisons:
        if loads and each.load == loads[-1] and each.simulated_steps is not None:
            rows.setdefault(each.baseline, []).append(each.simulated_steps)
    return _bars(plt, rows, f"mean latency at {loads[-1]} programs per second, simulated steps") if rows else None


def _bars(plt: Any, rows: dict[str, list[float]], label: str) -> Any:
    plot, axis = plt.subplots(figsize=(6, 0.5 + 0.4 * len(rows)), layout="constrained")
    medians = [statistics.median(row) for row in rows.values()]
    below = [median - min(row) for median, row in zip(medians, rows.values(), strict=True)]
    above = [max(row) - median for median, row in zip(medians, rows.values(), strict=True)]
    axis.barh(list(rows), medians, xerr=(below, above), color="tab:blue", ecolor="black", capsize=3)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    return plot
