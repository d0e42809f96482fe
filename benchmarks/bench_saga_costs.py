"""What SAGA's coordinator and its execution graphs cost here: CPU time of a choice and of a graph (SAGA, Table 7).

    python benchmarks/bench_saga_costs.py

The rows of balancers have the time to send a call to one of many engines, and to note its end. *Call* is what an
execution graph notes of one call, its arrival and its end. *Graph* is to add a program that has ended to the graph of
its name, and to ask once what is left after a call, which works the graph out again. Only the thread's own CPU time
counts.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Annotated, Final, cast

import typer
from bench_forecast import Moment, left_of, play
from rich.console import Console
from rich.table import Table

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.prediction import ExecutionGraph
from weft.core.prediction.execution_graph import Cursor, ProgramCursors
from weft.core.prediction.template import Template
from weft.core.routing import BALANCERS, Arrival, BalancerConfig
from weft.core.routing.replicas import ReplicaSet
from weft.core.trace.workloads import generate, poisson

ENGINES: Final = (64, 256, 1024)
WORKLOADS: Final = ("swe", "web", "tenants")


def took_us(work: Callable[[], object]) -> float:
    """Microseconds of CPU time."""
    before_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - before_ns) / 1000


def choices_us(balancer: str, engines: int, calls: int) -> Iterator[float]:
    """The time of each choice of an engine and an end of a call. Ten calls for each engine are in flight."""
    rng, replicas, in_flight = Random(0), ReplicaSet(BalancerConfig(balancer).make(), max_calls=16), list[EngineId]()
    for number in range(engines):
        replicas.add(EngineId(f"e{number}"))
        replicas.ready(EngineId(f"e{number}"), 0.0)
    for number in range(10 * engines + calls):
        name = f"p{rng.randrange(20 * engines)}"
        arrival = Arrival(ProgramId(name), SessionId(name), rng.choice((100, 1000, 10_000)))
        if number < 10 * engines:
            in_flight.append(cast("EngineId", replicas.dispatch(arrival)))
            continue
        leaver = rng.randrange(len(in_flight))

        def choose(arrival: Arrival = arrival, leaver: int = leaver) -> None:
            replicas.leave(in_flight[leaver])
            in_flight[leaver] = cast("EngineId", replicas.dispatch(arrival))

        yield took_us(choose)


def learn_one(template: Template, counts: ExecutionGraph, cursors: Sequence[Cursor]) -> None:
    """Add a program to the graph of its name, and ask what is left where some calls are."""
    template.learn(counts)
    left_of(template, cursors)


def main(
    programs: Annotated[int, typer.Option(help="Programs of a workload.")] = 100,
    calls: Annotated[int, typer.Option(help="Choices of an engine.")] = 10_000,
) -> None:
    """Measure, and print a table."""
    cases = [(balancer, engines) for balancer in BALANCERS for engines in ENGINES]
    rows = {f"{balancer}, {engines}": list(choices_us(balancer, engines, calls)) for balancer, engines in cases}
    for workload in WORKLOADS:
        made = generate(workload, programs, poisson(Random(0), 1.0), Random(workload))
        templates: dict[str | None, Template] = defaultdict(Template)
        by_call, by_graph = rows[f"{workload}, call"], rows[f"{workload}, graph"] = [], []
        for program in made:
            cursors, template, moments = ProgramCursors(), templates[program.name], list[Moment]()
            all_us = took_us(partial(moments.extend, play(program, cursors)))
            by_call.append(all_us / len(program.calls))
            by_graph.append(took_us(partial(learn_one, template, cursors.finish(), moments[0].cursors)))
    table = Table(title="microseconds of CPU time")
    for heading in ("what", "mean", "median", "p95"):
        table.add_column(heading)
    for name, times_us in rows.items():
        figures = statistics.fmean(times_us), statistics.median(times_us), statistics.quantiles(times_us, n=20)[-1]
        table.add_row(name, *(f"{figure:,.1f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
