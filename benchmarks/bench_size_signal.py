"""What would an order of programs gain that knew how long they will be, and does anything tell it? Simulated.

    python benchmarks/bench_size_signal.py weka.jsonl --out size_signal.json

The first table has what programs have left after so many calls, and how it goes with what an engine sees of them. Where
the mean does not grow with the calls, no order that is blind to sizes beats the order of arrival. The second one has
orders of programs on one engine with host memory under LRU: blind ones; ones that know sizes, exactly or within a
factor whose logarithm is normal; and `auto`, which learns from the names of programs, with names that tell nothing, in
which half of the sizes a program is, or in which quarter.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table
from seeds import write

from weft.core.ids import ProgramId
from weft.core.policies.orders import Priority
from weft.core.policies.policy import register
from weft.core.policies.view import Call, Rank
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.sim.study.leaderboard import HOST_LRU, Rival
from weft.core.sim.study.load import with_load
from weft.core.trace.format import read

CALLS: Final = (0, 1, 3, 8, 20, 40, 60)  # that programs have made
PROMPT_WEIGHT: Final = 0.05  # of a new token of a prompt, in output tokens
_places: dict[ProgramId, float] = {}


@register("by-place", "in an order that is given, for this benchmark", simulation_only=True)
class ByPlace(Priority):
    """The programs with the lowest places go first, and among equal ones those that came first."""

    def rank(self, call: Call, now_s: float) -> Rank:
        program = call.program
        return Rank(0, _places[program.program_id] + program.arrival_order * 1e-9, next(self._order))


def work(program: TraceProgram, first: int = 0) -> float:
    """The work of a program's calls from the first of them on, in output tokens."""
    new = (max(0, call.prompt_tokens - call.shared_prefix_tokens) for call in program.calls[first:])
    return sum(call.output_tokens for call in program.calls[first:]) + PROMPT_WEIGHT * sum(new)


def together(first: Sequence[float], second: Sequence[float]) -> float:
    """The rank correlation of two measures."""
    ranks = ([sorted(measure).index(each) for each in measure] for measure in (first, second))
    return statistics.correlation(*ranks)


def left(programs: Sequence[TraceProgram]) -> Iterator[dict[str, float]]:
    """What programs have left after so many calls, and its rank correlation with what is known by then."""
    for had in CALLS:
        alive = [program for program in programs if len(program.calls) > had]
        if len(alive) < 10:
            return
        rest = [work(program, had) for program in alive]
        contexts = [program.calls[had].prompt_tokens for program in alive]
        outputs = [sum(call.output_tokens for call in program.calls[:had]) for program in alive]
        waits_s = [sum(call.gap_s for call in program.calls[1 : had + 1]) for program in alive]
        seen = {"output": together(outputs, rest), "waits": together(waits_s, rest)} if had else {}
        yield {
            "calls": had,
            "programs": len(alive),
            "mean_calls_left": statistics.mean(len(program.calls) - had for program in alive),
            "mean_work_left": statistics.mean(rest),
            "context": together(contexts, rest),
        } | seen


def orders(programs: Sequence[TraceProgram], seed: int) -> Iterator[tuple[str, Callable[[TraceProgram], float]]]:
    """Where each program stands, by the name of the order."""
    rng = random.Random(f"orders {seed}")
    sizes = {program.program: work(program) for program in programs}
    middle = statistics.median(sizes.values())

    def guessed(spread: float) -> Callable[[TraceProgram], float]:
        return lambda program: sizes[program.program] * math.exp(rng.gauss(0.0, spread))

    yield "by arrival", lambda _: 0.0
    yield "last come, first served", lambda program: -program.arrival_s
    yield "at random", lambda _: rng.random()
    yield "the longest first prompt first", lambda program: -program.calls[0].prompt_tokens
    yield "the shortest first prompt first", lambda program: program.calls[0].prompt_tokens
    for spread in (2.0, 1.0, 0.5):
        yield f"by size, known within a factor of {math.exp(spread):.1f}", guessed(spread)
    yield "the shorter half first", lambda program: float(sizes[program.program] > middle)
    yield "by size", lambda program: sizes[program.program]


def named(programs: Sequence[TraceProgram], parts: int) -> list[TraceProgram]:
    """The programs, whose names tell in which of so many equal parts their sizes are."""
    places = {program.program: place for place, program in enumerate(sorted(programs, key=work))}
    return [replace(each, name=f"part {places[each.program] * parts // len(programs)}") for each in programs]


def plot(data: Mapping[str, Any], path: Path) -> None:
    """The mean and the 99th percentile under each order, beside those by arrival."""
    rows, (first, *_) = data["orders"], data["orders"]
    figure, axis = pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    for measure, marker in (("mean_s", "o"), ("p99_s", "x")):
        axis.plot([row[measure] / first[measure] for row in rows], [row["name"] for row in rows], marker, label=measure)
    axis.axvline(1.0, color="gray", linewidth=1)
    axis.set(xlabel="÷ by arrival", xlim=(0, None))
    axis.invert_yaxis()
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def main(
    trace: Annotated[Path, typer.Argument(help="A trace.")],
    load: Annotated[float, typer.Option(help="A multiple of what the engine can take.")] = 0.9,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Of the KV cache; host memory has eight times as many.")
    ] = 500_000,
    seed: Annotated[int, typer.Option(min=0, help="Draws the random orders and the errors of sizes.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for all results; a plot is written next to it.")] = None,
) -> None:
    """Print what is left after so many calls, play each order, and print what came of it."""
    console = Console()
    base = SimSettings(batch_size=64, kv_tokens=kv_tokens, host_kv_tokens=8 * kv_tokens)
    programs = list(read(trace))
    rests = list(left(programs))
    table = Table(
        "calls made", "programs", "mean calls left", "mean work left", "context", "output so far", "waits so far"
    )
    for rest in rests:
        counts, correlations = list(rest.values())[:4], list(rest.values())[4:]
        table.add_row(*(f"{each:,.0f}" for each in counts), *(f"{each:+.2f}" for each in correlations))
    console.print(table)
    chosen = with_load(programs, load, base)
    rows: list[dict[str, Any]] = []

    def play(name: str, played: Sequence[TraceProgram], policy: str) -> None:
        result = simulate(played, Rival(policy, False, HOST_LRU).settings(base))
        rows.append({"name": name, "mean_s": result.mean_latency} | {f"p{q}_s": result.latency(q) for q in (95, 99)})

    for name, place in track(list(orders(chosen, seed)), "orders", console=Console(stderr=True)):
        _places.update((ProgramId(program.program), place(program)) for program in chosen)
        play(name, chosen, "by-place")
    for parts in (1, 2, 4):
        play(f"auto, {parts} {'name' if parts == 1 else 'names'}", named(chosen, parts), "auto")
    table = Table("order of programs", "mean, s", "÷ by arrival", "p95, s", "p99, s")
    for row in rows:
        ratio = row["mean_s"] / rows[0]["mean_s"]
        table.add_row(
            row["name"], f"{row['mean_s']:,.0f}", f"{ratio:.2f}", f"{row['p95_s']:,.0f}", f"{row['p99_s']:,.0f}"
        )
    console.print(table)
    write({"trace": trace.name, "load": load, "seed": seed, "left": rests, "orders": rows}, out, plot)


if __name__ == "__main__":
    typer.run(main)
