"""One page of results, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.bench.agreement import Agreement
from weft.bench.clock import STEP_S
from weft.bench.load import AS_RECORDED, CLOSED
from weft.bench.measures import STATISTICS, Figures, Measured, Spread, figure, gains, ratio
from weft.bench.records import Round
from weft.bench.settings import BenchSettings
from weft.core.sim import StepTime

_AGAINST = ("stock-fcfs", "stock-priority", "fcfs", "mlfq")  # atlas is also compared with each of these


@dataclass(frozen=True, slots=True)
class Results:
    """All that came of a session."""

    settings: BenchSettings
    rounds: Sequence[Round]
    measured: Measured
    agreements: Sequence[Agreement]
    step_time: StepTime
    machine: dict[str, Any]


def page(results: Results, pictures: Sequence[str]) -> Iterator[str]:
    """The report's lines.

    Args:
        pictures: names of files beside it.
    """
    settings, measured = results.settings, results.measured
    yield f"# weft bench: {Path(settings.source).name}\n"
    yield from _setting(settings, results.rounds)
    for load, baselines in measured.items():
        yield f"\n## {_title(load)}\n"
        yield from _latencies(settings, baselines)
        yield ""
        yield from _costs(baselines)
        if "atlas" in baselines:
            yield ""
            best = [each.in_steps for each in results.agreements if (each.load, each.baseline) == (load, "srpt")]
            yield from _pairs(baselines, [figures for figures in best if figures])
    yield from _equal(settings, measured)
    yield from _agreement(results.agreements, results.step_time)
    yield from (f"\n![{Path(name).stem}]({name})" for name in pictures)
    yield "\n## Machine\n"
    yield ", ".join(f"{key} {value}" for key, value in results.machine.items()) + "\n"


def _title(load: str) -> str:
    titles = {AS_RECORDED: "Arrivals as recorded", CLOSED: "A closed batch: all programs at once"}
    return titles.get(load, f"{load} programs a second")


def _setting(settings: BenchSettings, rounds: Sequence[Round]) -> Iterator[str]:
    numbers = len({round_.number for round_ in rounds})
    cut, longest = sum(round_.cut_calls for round_ in rounds), rounds[0].longest_tokens
    programs = len(next(iter(rounds[0].runs.values())).programs)
    yield (
        f"{programs} programs a round, {numbers} rounds, the same programs for every baseline, a step of one in turn "
        f"with a step of the others. Model: {settings.model}; {settings.batch_size} calls at once, {settings.room_tokens} "
        f"tokens of KV cache, at most {settings.chunk_tokens} tokens a step. Lengths and times are {settings.scale:g} "
        f"of those of the trace, so a rate is one of the unscaled trace; {cut} calls longer than {longest} tokens were "
        "cut."
    )
    how = f"engine steps, each counted as {STEP_S * 1e3:g} ms" if settings.clock == "steps" else "seconds at work"
    yield (
        f"\nArrivals go by {how}. Figures are medians over rounds, with (lowest, highest); ratios are taken round by "
        "round. *Latency* is a program's response time divided by the output tokens on its critical path; *of all*: by "
        "those of all its calls (Autellix §6.2). *Unloaded* is what programs take alone, simulated."
    )


def _table(headings: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
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
    headings = ("latency, steps a token", *STATISTICS, "mean of all", "times unloaded")
    ratios = (f"mean ÷ {base_name}", "in seconds", "program latency", "in seconds", "makespan, steps")

    def rows() -> Iterator[Sequence[str]]:
        for name, figures in baselines.items():
            paths = ("steps_per_token.mean", "seconds_per_token.mean", "steps.mean", "seconds.mean")
            yield (
                name,
                *(f"{_median(figures, f'steps_per_token.{each}'):.2f}" for each in STATISTICS),
                f"{_median(figures, 'steps_per_token_of_all.mean'):.2f}",
                f"{_median(figures, 'load_factor'):.2f}",
                *(_spread(ratio(figures, base, path)) for path in paths),
                f"{_median(figures, 'makespan_steps'):.0f}",
            )

    yield from _table((*headings, *ratios), rows())


def _costs(baselines: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    headings = ("", "tokens a step", "tokens a second", "ms a step", "of it schedule(), µs", "update, µs")
    counts = ("cache hits", "preemptions", "recomputed tokens", "swapped tokens")

    def rows() -> Iterator[Sequence[str]]:
        for name, figures in baselines.items():
            yield (
                name,
                f"{_median(figures, 'tokens_per_step'):.2f}",
                f"{_median(figures, 'tokens_per_second'):.0f}",
                f"{_median(figures, 'step_seconds') * 1e3:.2f}",
                f"{_median(figures, 'schedule_seconds_per_step') * 1e6:.0f}",
                f"{_median(figures, 'update_seconds_per_step') * 1e6:.0f}",
                f"{_median(figures, 'cache_hit_rate'):.1%}",
                *(f"{_median(figures, f):.0f}" for f in ("preemptions", "recomputed_tokens", "swapped_tokens")),
            )

    yield from _table((*headings, *counts), rows())


def _pairs(baselines: Mapping[str, Sequence[Figures]], best: Sequence[Figures]) -> Iterator[str]:
    others = {name: baselines[name] for name in _AGAINST if name in baselines} | (
        {"srpt, simulated": best} if best else {}
    )
    paths = [f"{path}.{each}" for path in ("steps_per_token", "steps") for each in STATISTICS]

    def rows() -> Iterator[Sequence[str]]:
        for name, figures in others.items():
            yield name, *(_spread(ratio(baselines["atlas"], figures, path)) for path in paths)

    labels = [f"{what}{each}" for what in ("", "program latency ") for each in STATISTICS]
    yield from _table(("latency in steps, atlas ÷", *labels), rows())


def _equal(settings: BenchSettings, measured: Measured) -> Iterator[str]:
    base = settings.baselines[0]
    found = gains(base, measured)
    if not found:
        return
    yield "\n## Throughput at equal latency\n"
    yield f"The rate at which a baseline has the mean latency that {base} has at its own.\n"
    rates = [each.base_rate for each in found[base]]

    def cell(name: str, rate: float) -> str:
        for each in found[name]:
            if each.base_rate == rate:
                return f"{'at least ' if each.is_bound else ''}{each.rate:.3g} ({each.gain:.2f} times)"
        return "not reached"

    headings = ("", *(f"{base} at {rate:g}" for rate in rates))
    yield from _table(headings, iter([(name, *(cell(name, rate) for rate in rates)) for name in found if name != base]))


def _agreement(agreements: Sequence[Agreement], step_time: StepTime) -> Iterator[str]:
    yield "\n## Simulator and engine\n"
    yield (
        "Mean program latency, simulated with the same programs, policy, batch size and KV cache. Seconds: steps that "
        "take what was fitted to the steps of the same round; steps: identical ones. Over all rounds a step takes "
        f"{step_time.fixed_s * 1e3:.3g} ms, and for each call that decodes {step_time.decode_token_s * 1e6:.3g} µs, "
        f"prompt token {step_time.prefill_token_s * 1e6:.3g} µs, token of context {step_time.context_token_s * 1e9:.3g}"
        " ns. srpt knows the future, and is only simulated.\n"
    )
    groups: dict[tuple[str, str], list[Agreement]] = {}
    for each in agreements:
        groups.setdefault((each.load, each.baseline), []).append(each)

    def rows() -> Iterator[Sequence[str]]:
        for (load, baseline), group in groups.items():
            yield (
                load,
                baseline,
                *(_values([getattr(each, name) for each in group], 2) for name in ("real_s", "simulated_s")),
                _off([each.off for each in group]),
                *(_values([getattr(each, name) for each in group], 0) for name in ("real_steps", "simulated_steps")),
                _off([each.steps_off for each in group]),
            )

    headings = ("load", "baseline", "engine, s", "simulated, s", "off", "engine, steps", "simulated, steps", "off")
    yield from _table(headings, rows())


def _values(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else ""


def _off(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):+.1%} ({min(known):+.1%}, {max(known):+.1%})" if known else ""
