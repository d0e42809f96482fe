"""Benchmarks that measure each workload with several seeds: the loop, the bars of the results, and their files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common import pyplot
from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")


def measured(workloads: Sequence[str], seeds: int, measure: Callable[[str, int], T]) -> dict[str, list[T]]:
    """By workload, what `measure` finds with each seed. A bar on the terminal shows how far it is."""
    found: dict[str, list[T]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(workloads) * seeds)
        for workload in workloads:
            for seed in range(seeds):
                found.setdefault(workload, []).append(measure(workload, seed))
                progress.advance(task)
    return found


def ratio_panels(
    panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path, label: str, size: tuple[float, float]
) -> None:
    """A panel for each workload, with a bar for each row of ratios: the median of the seeds, and their range.

    Args:
        panels: By workload, the rows; all have the same names.
        label: What the ratios are.
        size: Of a panel, in inches.
    """
    width, height = size
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(width * len(panels), height), sharey=True, layout="constrained", squeeze=False
    )
    for axis, (workload, rows) in zip(axes[0], panels.items(), strict=True):
        medians = [statistics.median(row) for row in rows.values()]
        below = [median - min(row) for median, row in zip(medians, rows.values(), strict=True)]
        above = [max(row) - median for median, row in zip(medians, rows.values(), strict=True)]
        axis.barh(list(rows), medians, xerr=(below, above), color="tab:blue", ecolor="black", capsize=3)
        axis.axvline(1.0, color="0.4", lw=0.8)
        axis.set(title=workload, xlabel=label)
    axes[0][0].invert_yaxis()  # the first row on top
    figure.savefig(path, metadata={"Date": None})


def write(data: Mapping[str, Any], out: Path | None, plot: Callable[[Mapping[str, Any], Path], None]) -> None:
    """Write the results to a JSON file and draw the picture next to it. Without a file, neither."""
    if out is not None:
        out.write_text(json.dumps(data, indent=1))
        plot(data, out.with_suffix(".svg"))
