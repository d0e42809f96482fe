"""How well execution graphs forecast: the next node, its chance, and the service that is left; leave-one-out.

Each program is played alone, with calls as quick as on an idle engine. At the end of each of its calls it is asked what
follows there, and how much service is left of the program, of execution graphs that have learned from all others.

python benchmarks/bench_forecast.py --traces FOLDER --json forecast.json --plot forecast.svg
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from common import machine, pyplot

from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.prediction import Cost, Node, Tier
from weft.core.prediction.execution_graph import Cursor, ProgramCursors
from weft.core.prediction.template import Template
from weft.core.process_rows import CallIdentity
from weft.core.sim import StepTime
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers import TraceImport
from weft.core.trace.workloads import generate, poisson

PUBLIC: Final = {"tau-bench": "tau_bench_airline_gpt4o.json", "BFCL": "bfcl_v4_multi_turn_base.jsonl"}
WORKLOADS: Final = ("chat", "tools", "search", "swe", "web", "tenants", "intercepted")
BINS: Final = 10
SEEN: Final = (30, 60, 100, 150)  # programs, for how the error falls
_STEP: Final = StepTime()


def cost_of(call: TraceCall) -> Cost:
    """What a call costs on an engine that has nothing else to do."""
    prefill = call.prompt_tokens - call.shared_prefix_tokens
    service_s = call.output_tokens * _STEP.step_s(1, 0, call.prompt_tokens) + prefill * _STEP.prefill_token_s
    return Cost(service_s, call.output_tokens, prefill)


class Moment(NamedTuple):
    """A call has just ended."""

    call: TraceCall
    following: Node | None  # the call that arrives first of those that follow; None: none does
    left_s: float  # service of all calls that have not ended
    cursors: tuple[Cursor, ...]
    done_s: float


def play(program: TraceProgram, cursors: ProgramCursors) -> Iterator[Moment]:
    """The ends of all calls of a program, in time. After the last one, the cursors have seen the whole program."""
    children: dict[str, list[TraceCall]] = defaultdict(list)
    missing = {call.call_id: len(call.parents) for call in program.calls}
    for call in program.calls:
        for parent in call.parents:
            children[parent].append(call)
    cost = {call.call_id: cost_of(call) for call in program.calls}
    left_s, done_s = sum(each.service_s for each in cost.values()), 0.0
    order = {call.call_id: number for number, call in enumerate(program.calls)}
    events: list[tuple[float, int, int, TraceCall]] = []  # time, 0 for an end and 1 for an arrival

    def arrives(call: TraceCall, at_s: float) -> None:
        heapq.heappush(events, (at_s + call.gap_s, 1, order[call.call_id], call))

    for call in program.calls:
        if not call.parents:
            arrives(call, 0.0)
    while events:
        now_s, kind, number, call = heapq.heappop(events)
        if kind == 1:
            identity = CallIdentity(
                ProgramId(program.program),
                ThreadId(call.call_id),
                CallId(call.call_id),
                tuple(map(CallId, call.parents)),
            )
            cursors.arrive(identity, "", [call.tool] if call.tool else [], now_s)
            heapq.heappush(events, (now_s + cost[call.call_id].service_s, 0, number, call))
            continue
        cursors.leave(CallId(call.call_id), cost[call.call_id], now_s)
        left_s, done_s = left_s - cost[call.call_id].service_s, done_s + cost[call.call_id].service_s
        for child in children[call.call_id]:
            missing[child.call_id] -= 1
            if not missing[child.call_id]:
                arrives(child, now_s)
        first = min(children[call.call_id], key=lambda child: (child.gap_s, order[child.call_id]), default=None)
        following = None if first is None else Node.of("", [first.tool] if first.tool else [], 0)
        yield Moment(call, following, max(0.0, left_s), cursors.cursors, done_s)


class Found(NamedTuple):
    """What came out for one workload."""

    programs: int
    forecasts: int
    top1: float  # the likeliest next node was right
    most_frequent: float  # the same, of always naming what is most frequent in the workload
    calibration_error: float
    bins: list[tuple[float, float, int]]  # mean chance, share that was right, forecasts
    left_error: float  # mean absolute error of the service that is left ÷ its mean
    left_error_by_age: float  # of what programs that needed more than this one has had had left
    left_error_by_mean: float  # of the mean of all programs less what this one has had
    bias: float  # mean forecast ÷ mean
    within_spread: float  # the share of cases in which the truth is within a standard deviation
    by_seen: dict[int, float]  # programs learned from, and the error of the service that is left


def left_of(template: Template, cursors: Sequence[Cursor]) -> tuple[float, float]:
    """Mean and standard deviation of what is left, as `ExecutionGraphs.remaining_service` adds them up."""
    mean_s = spread_s = 0.0
    for each in cursors:
        left = template.left(each.node)
        if left is not None:
            part = (left.with_call if each.is_running else left.after).service_s
            mean_s, spread_s = mean_s + part.mean, spread_s + part.spread
    return mean_s, spread_s


def measure(programs: Sequence[TraceProgram]) -> Found:
    """Leave each program out in turn, and forecast it from the others of its name."""
    counts, totals = {}, {}
    for program in programs:
        cursors = ProgramCursors()
        moments = list(play(program, cursors))
        counts[program.program], totals[program.program] = cursors.finish(), moments[-1].done_s
    chances: list[tuple[float, bool]] = []
    errors: dict[str, list[float]] = defaultdict(list)
    truths, forecasts_s, within = [], [], 0
    frequent: Counter[Node | None] = Counter()
    by_seen = {seen: list[tuple[float, float]]() for seen in SEEN}
    for program in programs:
        others = [each for each in programs if each.name == program.name and each is not program]
        template = learn([counts[each.program] for each in others])
        if template.tier is not Tier.INFERRED:
            continue
        smaller = {seen: learn([counts[each.program] for each in others[:seen]]) for seen in SEEN}
        works = [totals[each.program] for each in others]
        for moment in play(program, ProgramCursors()):
            own = next((each for each in moment.cursors if each.call_id == moment.call.call_id), None)
            forecast = template.forecast(own.node) if own is not None else None
            if forecast is not None:
                best = forecast.likeliest
                chance = forecast.successors[0].chance if best is not None else forecast.end
                chances.append((chance, best == moment.following))
                frequent[moment.following] += 1
            mean_s, spread_s = left_of(template, moment.cursors)
            more = [work for work in works if work > moment.done_s]
            truths.append(moment.left_s)
            forecasts_s.append(mean_s)
            within += abs(mean_s - moment.left_s) <= spread_s
            errors["graph"].append(abs(mean_s - moment.left_s))
            errors["age"].append(abs(statistics.fmean(more or [moment.done_s]) - moment.done_s - moment.left_s))
            errors["mean"].append(abs(max(0.0, statistics.fmean(works) - moment.done_s) - moment.left_s))
            for seen, each in smaller.items():
                if len(others) >= seen:
                    error = abs(left_of(each, moment.cursors)[0] - moment.left_s)
                    by_seen[seen].append((error, moment.left_s))
    mean_left_s = statistics.fmean(truths)
    bins = binned(chances)
    return Found(
        programs=len(programs),
        forecasts=len(chances),
        top1=statistics.fmean(right for _, right in chances),
        most_frequent=max(frequent.values()) / len(chances),
        calibration_error=sum(size * abs(chance - right) for chance, right, size in bins) / len(chances),
        bins=bins,
        left_error=statistics.fmean(errors["graph"]) / mean_left_s,
        left_error_by_age=statistics.fmean(errors["age"]) / mean_left_s,
        left_error_by_mean=statistics.fmean(errors["mean"]) / mean_left_s,
        bias=statistics.fmean(forecasts_s) / mean_left_s,
        within_spread=within / len(truths),
        by_seen={seen: ratio(found) for seen, found in by_seen.items() if found},
    )


def ratio(found: Sequence[tuple[float, float]]) -> float:
    """The sum of the first numbers ÷ that of the second."""
    return sum(error for error, _ in found) / sum(truth for _, truth in found)


def learn(counts: Sequence[Any]) -> Template:
    """A template of the programs with these counts."""
    template = Template()
    for each in counts:
        template.learn(each)
    return template


def binned(chances: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Mean chance, the share that was right and the number of forecasts in each tenth of the chances."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for chance, right in chances:
        bins[min(BINS - 1, int(chance * BINS))].append((chance, right))
    return [
        (statistics.fmean(chance for chance, _ in each), statistics.fmean(right for _, right in each), len(each))
        for each in bins
        if each
    ]


def plot(found: dict[str, Found], path: Path) -> None:
    """How often forecasts were right over their chance, and the error of what is left next to simpler forecasts."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.5))
    left.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for name, each in found.items():
        shown = [(chance, share) for chance, share, size in each.bins if size >= 20]
        left.plot(*zip(*shown, strict=True), "o-", markersize=3, linewidth=1, label=name)
    left.set(xlabel="chance of the likeliest next node", ylabel="share that was right", xlim=(0, 1), ylim=(0, 1))
    left.legend(fontsize="small")
    kinds = (
        ("execution graph", [each.left_error for each in found.values()]),
        ("by work so far", [each.left_error_by_age for each in found.values()]),
        ("mean less work so far", [each.left_error_by_mean for each in found.values()]),
    )
    for number, (kind, values) in enumerate(kinds):
        right.bar([place + 0.27 * (number - 1) for place in range(len(found))], values, 0.25, label=kind)
    right.set_xticks(range(len(found)), list(found), rotation=25)
    right.set_ylabel("mean error of the service left ÷ its mean")
    right.legend(fontsize="small")
    figure.savefig(path)


def main(
    traces: Annotated[Path | None, typer.Option(help="A folder with the files of tau-bench and BFCL.")] = None,
    programs: Annotated[int, typer.Option(help="Programs of each name of a generated workload, about.")] = 200,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="A picture (.svg).")] = None,
) -> None:
    """Print a table: accuracy and calibration of the next node, and the error of the service that is left."""
    loads = {name: list(TraceImport([traces / file])) for name, file in PUBLIC.items()} if traces is not None else {}
    for name in WORKLOADS:
        rng = random.Random(f"forecast {name}")
        loads[name] = generate(name, programs, poisson(rng, 1.0), rng)
    found = {}
    typer.echo(
        "| workload | top-1 | most frequent | calibration error | error of what is left | by work so far "
        "| mean less work so far | bias | within spread |"
    )
    typer.echo("|---" * 9 + "|")
    for name, load in loads.items():
        each = found[name] = measure(load)
        cells = (
            *(each.top1, each.most_frequent, each.calibration_error, each.left_error),
            *(each.left_error_by_age, each.left_error_by_mean, each.bias, each.within_spread),
        )
        typer.echo(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    if json_path is not None:
        data = {"machine": machine(), "workloads": {name: each._asdict() for name, each in found.items()}}
        json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if plot_path is not None:
        plot(found, plot_path)


if __name__ == "__main__":
    typer.run(main)
