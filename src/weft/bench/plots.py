"""Pictures of a session, like Autellix Fig. 12, 13, 16 and 18."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.bench.agreement import Agreement
from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.measures import Measured, figure
from weft.bench.records import Round
from weft.core.errors import BenchError


def pyplot() -> Any:
    """matplotlib, which draws into files only.

    Raises:
        BenchError: it is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("svg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise BenchError("`weft bench` draws with matplotlib, which is not installed: pip install matplotlib") from None


def draw(folder: Path, rounds: Sequence[Round], measured: Measured, agreements: Sequence[Agreement]) -> list[str]:
    """Write the pictures there are data for; returns their names, in their order on the page."""
    plt = pyplot()
    figures = {
        "latency.svg": _over_rates(plt, measured, ("mean",)),
        "tail.svg": _over_rates(plt, measured, ("p95", "p99")),
        "distribution.svg": _distributions(plt, rounds),
        "makespan.svg": _makespans(plt, measured),
        "simulated.svg": _simulated(plt, agreements),
    }
    for name, drawn in figures.items():
        if drawn is not None:
            drawn.savefig(folder / name, metadata={"Date": None})
            plt.close(drawn)
    return [name for name, drawn in figures.items() if drawn is not None]


def _over_rates(plt: Any, measured: Measured, of: Sequence[str]) -> Any:
    """Latency per token over the arrival rate: median over rounds, and from the lowest to the highest."""
    rates = _rates(measured)
    if not rates:
        return None
    drawn, axes = plt.subplots(1, len(of), figsize=(6 * len(of), 4), layout="constrained", squeeze=False)
    for each, axis in zip(of, axes[0], strict=True):
        for name in measured[rates[0]]:
            rows = [[figure(row, f"steps_per_token.{each}") for row in measured[rate][name]] for rate in rates]
            places = [float(rate) for rate in rates]
            (line,) = axis.plot(places, [statistics.median(row) for row in rows], marker="o", label=name)
            axis.fill_between(places, *zip(*((min(r), max(r)) for r in rows), strict=True), alpha=0.15, lw=0)
            line.set_markersize(4)
        axis.set(xlabel="programs a second", ylabel=f"{each} latency, steps a token", yscale="log")
        axis.legend()
    return drawn


def _distributions(plt: Any, rounds: Sequence[Round]) -> Any:
    """Which share of programs had at most so much latency a token, over all rounds of the busiest open load."""
    loads = list(dict.fromkeys(round_.load for round_ in rounds if round_.load != CLOSED))
    if not loads:
        return None
    drawn, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    busiest = [round_ for round_ in rounds if round_.load == loads[-1]]
    for name in busiest[0].runs:
        axis.ecdf([p.steps / p.path_tokens for round_ in busiest for p in round_.runs[name].programs], label=name)
    axis.set(
        xlabel=f"latency at {loads[-1]} programs a second, steps a token", ylabel="share of programs", xscale="log"
    )
    axis.legend()
    return drawn


def _makespans(plt: Any, measured: Measured) -> Any:
    """How long a closed batch took: median over rounds, and from the lowest to the highest."""
    if CLOSED not in measured:
        return None
    rows = {name: [row["makespan_steps"] for row in figures] for name, figures in measured[CLOSED].items()}
    return _bars(plt, rows, "makespan of a closed batch, steps")


def _simulated(plt: Any, agreements: Sequence[Agreement]) -> Any:
    """Mean program latency simulated in identical steps, with SRPT, which knows the future."""
    loads = list(dict.fromkeys(each.load for each in agreements if each.load != CLOSED))
    rows: dict[str, list[float]] = {}
    for each in agreements:
        if loads and each.load == loads[-1] and each.simulated_steps is not None:
            rows.setdefault(each.baseline, []).append(each.simulated_steps)
    return _bars(plt, rows, f"mean latency at {loads[-1]} programs a second, simulated steps") if rows else None


def _bars(plt: Any, rows: dict[str, list[float]], label: str) -> Any:
    drawn, axis = plt.subplots(figsize=(6, 0.5 + 0.4 * len(rows)), layout="constrained")
    middles = [statistics.median(row) for row in rows.values()]
    below = [middle - min(row) for middle, row in zip(middles, rows.values(), strict=True)]
    above = [max(row) - middle for middle, row in zip(middles, rows.values(), strict=True)]
    axis.barh(list(rows), middles, xerr=(below, above), color="tab:blue", ecolor="black", capsize=3)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    return drawn


def _rates(measured: Measured) -> list[str]:
    return [load for load in measured if load not in {AS_RECORDED, CLOSED}]
