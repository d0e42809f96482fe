"""`weft sim` and `weft trace`: simulate a trace, and make one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.core.errors import PolicyError, SimulationError, WeftError
from weft.core.policies import DEFAULT_BETA, PolicyConfig
from weft.core.sim.settings import SimSettings
from weft.core.sim.simulator import SimResult, simulate

_SHOWN = 20  # programs in the table


def sim(  # noqa: PLR0917  typer reads options off the signature
    file: Annotated[Path, typer.Argument(help="A program trace (docs/simulator.md); `weft trace` makes some.")],
    policy: Annotated[
        Literal["fcfs", "priority", "mlfq", "plas", "atlas", "rr", "srpt"],
        typer.Option(help="The scheduling policy; priority: programs in order of arrival; srpt knows the future."),
    ] = "atlas",
    batch_size: Annotated[int, typer.Option(help="Calls that an engine runs at once.")] = 64,
    queue_bounds: Annotated[
        str | None, typer.Option(help="Inner bounds of the queues, such as 2,3; rr: its quantum (default: calibrated).")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Promote at this ratio of wait to service; inf: never (default: 8).")
    ] = None,
    unit_steps: Annotated[
        bool, typer.Option("--unit-steps", help="A token each unit of time, prompts for free: small examples.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Engines.")] = 1,
    balancer: Annotated[
        Literal["locality", "round_robin", "least_used", "affinity"], typer.Option(help="How calls reach engines.")
    ] = "locality",
    kv_tokens: Annotated[int, typer.Option(help="Tokens that an engine's KV cache holds.")] = 262_144,
    preemption: Annotated[
        Literal["recompute", "swap"], typer.Option(help="What becomes of a preempted call's KV.")
    ] = "recompute",
    gantt: Annotated[Path | None, typer.Option(help="Draw who ran when into this .svg file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Simulate engines that serve the programs of a trace."""
    from weft.core.routing import BalancerConfig
    from weft.core.trace.format import read
    from weft.views.gantt import MOST_CALLS
    from weft.views.gantt import gantt as draw

    settings = SimSettings(
        policy=policy if policy in {"priority", "srpt"} else _policy(policy, queue_bounds, beta),
        batch_size=batch_size,
        replicas=replicas,
        balancer=BalancerConfig(balancer),
        kv_tokens=kv_tokens,
        chunk_tokens=max(2048, batch_size),
        preemption=preemption,
        unit_steps=unit_steps,
    )
    programs = read(file)
    if gantt is not None and (gantt.suffix != ".svg" or sum(len(p.calls) for p in programs) > MOST_CALLS):
        raise SimulationError(f"{gantt} cannot be drawn: name an .svg file, and simulate up to {MOST_CALLS} calls.")
    with _progress_bar(len(programs)) as progress:
        result = simulate(programs, settings, progress=progress, runs=gantt is not None)
    if gantt is not None:
        try:
            gantt.write_text(draw(result), encoding="utf-8")
        except OSError as error:
            raise WeftError(f"{gantt} cannot be written: {error.strerror or error}. Choose another --gantt.") from None
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
    else:
        _print(result, unit="" if unit_steps else " s")


def trace(  # noqa: PLR0917  likewise
    source: Annotated[
        str, typer.Argument(help="chat, tools, search or mixed (Autellix §6.1); or a file of tau-bench or BFCL.")
    ],
    out: Annotated[Path, typer.Option(help="The trace file to write.")] = Path("trace.jsonl"),
    programs: Annotated[int, typer.Option(min=1, help="How many programs (of a file: at most).")] = 100,
    rate: Annotated[float, typer.Option(help="Programs that arrive a second, on average.")] = 1.0,
    bursty: Annotated[bool, typer.Option("--bursty", help="They arrive in bursts (default: Poisson).")] = False,
    seed: Annotated[int, typer.Option(help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a program trace: a generated workload, or a public trace in Weft's format."""
    from weft.core.sim import workloads
    from weft.core.trace.converters import convert
    from weft.core.trace.format import write

    arrivals = (workloads.bursty if bursty else workloads.poisson)(random.Random(f"arrivals {seed}"), rate)  # noqa: S311
    if source in workloads.WORKLOADS:
        made = workloads.generate(source, programs, arrivals, random.Random(f"programs {seed}"))  # noqa: S311
    else:
        made = convert(Path(source), arrivals)[:programs]
    write(made, out)
    typer.echo(out)


def _policy(name: str, queue_bounds: str | None, beta: float | None) -> PolicyConfig:
    bounds_s: tuple[float, ...] | Literal["auto"] = "auto"
    if queue_bounds is not None:
        try:
            bounds_s = tuple(float(bound) for bound in queue_bounds.split(",") if bound.strip())
        except ValueError:
            raise PolicyError(f"--queue-bounds is {queue_bounds!r}; give numbers with commas, such as 2,3.") from None
    if name == "rr" and not bounds_s:
        raise PolicyError("rr needs a quantum: give it as --queue-bounds, such as 2.")
    return PolicyConfig(name, bounds_s, DEFAULT_BETA if beta is None else None if math.isinf(beta) else beta)


@contextmanager
def _progress_bar(programs: int) -> Iterator[Callable[[int], object]]:
    """A bar on standard error; where that is no terminal, nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("simulating", total=programs)
        yield lambda ended: bars.update(task, completed=ended)


def _print(result: SimResult, unit: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    slowest = sorted(result.programs.items(), key=lambda each: -each[1].latency)[:_SHOWN]
    table = Table(title="programs, the slowest first", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("program", overflow="fold")
    for heading in ("arrival", "finish", "wait", "service", "calls"):
        table.add_column(heading, justify="right")
    for name, row in slowest:
        table.add_row(name, *(f"{value:.2f}" for value in row[:4]), str(row.calls))
    console = Console(highlight=False, markup=False)
    console.print(table)
    if len(result.programs) > len(slowest):
        console.print(f"and {len(result.programs) - len(slowest)} more")
    latencies = f"{result.mean_latency:.2f}, 95 %: {result.latency(95):.2f}, 99 %: {result.latency(99):.2f}{unit}"
    console.print(f"{result.policy}: latency {latencies}; makespan {result.makespan:.2f}{unit}")
    console.print(f"wait {result.total_wait:.2f}{unit}, {result.counts.preemptions} preemptions")
    if result.counts.prompt:
        recomputed, swapped = result.counts.recomputed, result.counts.swapped
        hits = f"{result.prefix_hit_rate:.1%} of prompt tokens in the prefix cache"
        console.print(f"{hits}, {recomputed} tokens recomputed, {swapped} swapped out")
