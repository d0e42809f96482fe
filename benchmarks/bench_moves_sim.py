"""The default balancer with KV that moves to other replicas and without, on recorded or generated programs, simulated.

    python benchmarks/bench_moves_sim.py weka.jsonl --programs 160 --replicas 16
    python benchmarks/bench_moves_sim.py tenants.jsonl --programs 60 --replicas 4 --load 0.6
    python benchmarks/bench_moves_sim.py weka.jsonl --programs 160 --replicas 16 --joining 4

A seed draws the programs from the trace and the times of their arrivals. If the trace has too few, they come again with
blocks of their own. Replicas have KV for 262,144 tokens and host memory for four times as many.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from common import pyplot, spread
from rich.console import Console
from rich.progress import track
from rich.table import Table
from seeds import write

from weft.core.ids import EngineId, ProgramId
from weft.core.routing import BalancerConfig
from weft.core.routing.balancer import Arrival, EngineLoad, Loads, register
from weft.core.routing.balancers import AdaptiveLocality
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.sim.study.load import with_load
from weft.core.trace.format import read

KV_TOKENS = 262_144
MEASURES = ("mean_s", "p95_s", "p99_s")


@dataclass(frozen=True, slots=True)
class JoiningParameters:
    """How many engines join, and how many programs come before that."""

    engines: int = 0
    programs: int = 0


@register("joining", "the default, with engines that join later", JoiningParameters)
class Joining(AdaptiveLocality):
    """The default balancer. The last engines take no call until some programs have come."""

    def __init__(self, engines: int, programs: int) -> None:
        super().__init__()
        self._engines, self._programs = engines, programs
        self._late: list[tuple[int, EngineLoad]] | None = None
        self._come: set[ProgramId] = set()

    def choose(self, arrival: Arrival, loads: Loads) -> EngineId:
        if self._late is None:
            numbered = list(enumerate(loads.able()))  # none has a call, so they are in order
            self._late = numbered[len(numbered) - self._engines :]
            for _, each in self._late:
                loads.close(each.engine_id)
        self._come.add(arrival.program_id)
        if len(self._come) >= self._programs:
            for number, each in self._late:
                loads.open(each.engine_id, number)
            self._late = []
        return super().choose(arrival, loads)


def drawn(programs: list[TraceProgram], count: int, seed: int) -> list[TraceProgram]:
    """Programs in a random order, which arrive at random."""
    rng = random.Random(f"moves {seed}")
    blocks = 1 + max((each for program in programs for call in program.calls for each in call.hash_ids), default=0)
    found: list[TraceProgram] = []
    at_s = 0.0
    while len(found) < count:
        turn = len(found) // len(programs)
        for program in rng.sample(programs, min(len(programs), count - len(found))):
            at_s += rng.expovariate(1.0)
            ids = (array("q", (each + turn * blocks for each in call.hash_ids)) for call in program.calls)
            calls = tuple(replace(call, hash_ids=own) for call, own in zip(program.calls, ids, strict=True))
            found.append(replace(program, program=f"{program.program}/{turn}", arrival_s=at_s, calls=calls))
    return found


def latencies(programs: list[TraceProgram], settings: SimSettings) -> dict[str, float]:
    """How long programs take."""
    result = simulate(programs, settings)
    return {"mean_s": result.mean_latency, "p95_s": result.latency(95), "p99_s": result.latency(99)}


def plot(data: Mapping[str, Any], path: Path) -> None:
    """The ratios of each seed."""
    figure, axis = pyplot().subplots(figsize=(5, 3.2), layout="constrained")
    for number, measure in enumerate(MEASURES):
        axis.plot([number] * len(data["ratios"]), [each[measure] for each in data["ratios"]], "o", color="C0")
    axis.axhline(1.0, color="gray", linewidth=1)
    axis.set(xticks=range(len(MEASURES)), xticklabels=MEASURES, ylabel="with KV that moves ÷ without")
    figure.savefig(path, metadata={"Date": None})


def main(
    trace: Annotated[Path, typer.Argument(help="A trace.")],
    programs: Annotated[int, typer.Option(min=2, help="How many of its programs.")] = 160,
    replicas: Annotated[int, typer.Option(min=2, help="Replicas.")] = 16,
    load: Annotated[float, typer.Option(help="A multiple of what they can take.")] = 0.9,
    joining: Annotated[int, typer.Option(min=0, help="Replicas that join when half of the programs have come.")] = 0,
    first_seed: Annotated[int, typer.Option(min=0, help="The default was chosen on 1 to 3.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file for all results; a plot is written next to it.")] = None,
) -> None:
    """Simulate each seed twice, and print the ratios."""
    if joining >= replicas:
        raise typer.BadParameter(f"{joining} of {replicas} replicas cannot join; one at least has to be there.")
    known = list(read(trace))
    settings = SimSettings(replicas=replicas, kv_tokens=KV_TOKENS, host_kv_tokens=4 * KV_TOKENS)
    engines = settings  # the load is a multiple of what all of them can take
    if joining:
        engines = replace(settings, balancer=BalancerConfig("joining", engines=joining, programs=programs // 2))
    ratios = []
    for seed in track(range(first_seed, first_seed + seeds), "seeds", console=Console(stderr=True)):
        chosen = with_load(drawn(known, programs, seed), load, settings)
        moving, staying = (latencies(chosen, replace(engines, moves_kv=each)) for each in (True, False))
        ratios.append({measure: moving[measure] / staying[measure] for measure in MEASURES})
    table = Table("with KV that moves ÷ without", "median (lowest, highest)")
    for measure in MEASURES:
        table.add_row(measure, spread([each[measure] for each in ratios], 3))
    Console().print(table)
    write({"trace": trace.name, "replicas": replicas, "load": load, "joining": joining, "ratios": ratios}, out, plot)


if __name__ == "__main__":
    typer.run(main)
