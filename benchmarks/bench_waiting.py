"""Who waits, in simulation: calls in the engine over time, and waits ÷ executions by length (Autellix, Figures 4, 6).

    python benchmarks/bench_waiting.py --out waiting.json

Programs arrive at a part of the measured capacity. A call waits from its arrival to its end, except while it is in the
batch. Calls are ranked by output tokens, programs by calls, and the first and the last quarter are compared: the sum of
the waits ÷ the sum of the executions. Calls in the engine are a mean over the time in which programs arrive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, NamedTuple

import typer
from arrival_rates import arriving
from common import machine, spread
from rich.console import Console
from rich.table import Table
from seeds import measured

from weft.core.policies import PolicyConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, capacity, simulate
from weft.core.trace.format import in_order
from weft.core.trace.workloads import generate, poisson

POLICIES: Final = ("fcfs", "mlfq", "atlas", "auto")
PROGRAMS: Final = {"chat": 2.0, "search": 0.2}  # as a multiple of `--programs`
FIGURES: Final = ("running", "waiting", "short_calls", "long_calls", "few_calls", "many_calls")


class Stay(NamedTuple):
    """What a call or a program was in the engine for."""

    size: int  # output tokens of a call, calls of a program
    waited_s: float
    ran_s: float


def stays(programs: Sequence[TraceProgram], result: SimResult) -> tuple[list[Stay], list[tuple[float, float]]]:
    """The stay of each call, and its arrival and end."""
    ran: dict[tuple[str, str], float] = {}
    ended: dict[tuple[str, str], float] = {}
    for run in result.runs:
        key = run.program, run.call_id
        ran[key] = ran.get(key, 0.0) + run.end_s - run.start_s
        ended[key] = max(ended.get(key, 0.0), run.end_s)
    found, times = [], []
    for program in programs:
        for call in in_order(program.calls):
            key = program.program, call.call_id
            after = [ended[program.program, parent] for parent in call.parents]
            arrived_s = max(after, default=program.arrival_s) + call.gap_s
            found.append(Stay(call.output_tokens, ended[key] - arrived_s - ran[key], ran[key]))
            times.append((arrived_s, ended[key]))
    return found, times


def quarters(rows: Sequence[Stay]) -> tuple[float, float]:
    """Waits ÷ executions of the quarter with the least size, and of that with the most."""
    ranked = sorted(rows, key=lambda each: each.size)
    count = max(1, len(ranked) // 4)
    first, last = ranked[:count], ranked[-count:]
    parts = [sum(each.waited_s for each in part) / sum(each.ran_s for each in part) for part in (first, last)]
    return parts[0], parts[1]


def measure(workload: str, seed: int, count: int, load: float, base: SimSettings) -> dict[str, dict[str, float]]:
    """The figures of each policy with the same programs and arrivals."""
    drawn = Random(f"{workload} {seed}")
    made = generate(workload, round(count * PROGRAMS[workload]), poisson(Random(0), 1.0), drawn)
    programs = arriving(made, load * capacity(made, base, tools=False), seed)
    begin_s, end_s = min(each.arrival_s for each in programs), max(each.arrival_s for each in programs)
    found = {}
    for name in POLICIES:
        result = simulate(programs, replace(base, policy=PolicyConfig(name)), runs=True)
        calls, times = stays(programs, result)
        spans = [(run.start_s, run.end_s) for run in result.runs]
        present, running = (
            sum(max(0.0, min(to_s, end_s) - max(from_s, begin_s)) for from_s, to_s in each) / (end_s - begin_s)
            for each in (times, spans)
        )
        rows = result.programs.values()
        of_programs = quarters([Stay(row.calls, row.wait, row.service) for row in rows])
        figures = (running, present - running, *quarters(calls), *of_programs)
        found[name] = dict(zip(FIGURES, figures, strict=True))
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """A row for each workload and policy: median (lowest, highest) of the seeds."""
    table = Table(title=f"calls in the engine, and waits ÷ executions, at {data['load']:g} of the capacity")
    for heading in ("workload", "policy", *(figure.replace("_", " ") for figure in FIGURES)):
        table.add_column(heading)
    for workload, seeds in data["found"].items():
        for policy in POLICIES:
            table.add_row(workload, policy, *(spread([seed[policy][figure] for seed in seeds]) for figure in FIGURES))
    console.print(table)


def main(
    programs: Annotated[int, typer.Option(help="Programs; of chat twice as many, of search a fifth.")] = 150,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    load: Annotated[float, typer.Option(help="Part of the measured capacity.")] = 1.0,
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 16,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Simulate, print a table and write JSON."""
    base = SimSettings(PolicyConfig("fcfs"), batch_size=slots)
    found = measured(tuple(PROGRAMS), seeds, lambda workload, seed: measure(workload, seed, programs, load, base))
    data = {"machine": machine(), "programs": programs, "seeds": seeds, "load": load, "slots": slots, "found": found}
    show(data, Console(width=200))
    if out is not None:
        out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
