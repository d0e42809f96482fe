"""Fair shares that read execution graphs, simulated: does a better forecast of what is left help tenants?

    python benchmarks/bench_fair_forecast.py --out fair_forecast.json

`fair` divides the engine by the work that programs have left over their slack. Three forecasts of it are compared on
the same programs and arrivals: *learned*, by the work so far, which is the policy as it is; *graph*, by the execution
graph of the program's name, once 30 have ended; and *oracle*, which is the bound of what any forecast can gain.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Self, cast

import typer
from arrival_rates import ALONE_PER_S, arriving
from common import machine
from rich.console import Console
from rich.table import Table
from sim_measures import attainment, begin_in, fairness

from weft.core.ids import CallId
from weft.core.policies import PolicyConfig
from weft.core.policies.fair_shares.fair import Fair, FairParameters, LearnedRemaining
from weft.core.policies.policy import PolicyEvent, register, registration
from weft.core.policies.view import Call, ProgramEnded, ProgramView
from weft.core.prediction import ExecutionGraphs
from weft.core.prediction.execution_graph import Cost
from weft.core.sim import SimSettings, capacity, simulate
from weft.core.sim.sim_programs import SimCall
from weft.core.trace.workloads import generate, poisson

KINDS = ("heavy", "medium", "light")
SLO = 1.5


class Oracle(LearnedRemaining):
    """Knows the work that programs have left."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[ProgramView, float] = {}

    def remaining_tokens(self, program: ProgramView, done_tokens: float) -> float:
        total = self.totals.setdefault(program, program.predicted_tokens)
        return program.predicted_tokens if done_tokens else total

    def ended(self, program: ProgramView, done_tokens: float) -> None:
        self.totals.pop(program, None)


class Graphs(LearnedRemaining):
    """Reads what is left from the execution graph of the program's name. Its service is work in output tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = ExecutionGraphs()

    def remaining_tokens(self, program: ProgramView, done_tokens: float) -> float:
        left = self.graphs.remaining_service(program.program_id) if done_tokens else None
        return super().remaining_tokens(program, done_tokens) if left is None else left.mean


class _FairWith(Fair):
    forecasts: ClassVar[type[LearnedRemaining]]

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        found = registration(parameters.inner)
        inner = found.kind.from_parameters(found.parameters())
        return cls(inner, dict(parameters.weights), parameters.slo, cls.forecasts())


@register("fair-oracle", "fair with known work", FairParameters, simulation_only=True)
class FairOracle(_FairWith):
    forecasts = Oracle


@register("fair-graph", "fair with execution graphs", FairParameters, simulation_only=True)
class FairGraph(_FairWith):
    forecasts = Graphs

    @property
    def graphs(self) -> ExecutionGraphs:
        return cast("Graphs", self._remaining).graphs

    def arrive(self, call: Call, now_s: float) -> None:
        if call not in self.queue.entered:
            begin_in(self.graphs, cast("SimCall", call), now_s)
        super().arrive(call, now_s)

    def leave(self, call: Call) -> None:
        found = cast("SimCall", call)
        cost = Cost(service_s=self._work(call))
        self.graphs.leave(found.owner.view.program_id, CallId(found.spec.call_id), cost, max(0.0, self._now_s))
        super().leave(call)

    def on_event(self, event: PolicyEvent) -> None:
        if isinstance(event, ProgramEnded):
            self.graphs.end(event.program.program_id)
        super().on_event(event)


def measure(seed: int, programs: int, load: float, base: SimSettings, inner: str) -> dict[str, dict[str, float]]:
    """By forecast: the programs in time of each class of tenants, Jain's index, and the mean time in seconds."""
    made = generate("tenants", programs, poisson(Random(0), 1.0), Random(f"programs {seed}"))
    fcfs = replace(base, policy=PolicyConfig("fcfs"))
    alone = {name: row.latency for name, row in simulate(arriving(made, ALONE_PER_S, seed), fcfs).programs.items()}
    rate = load * capacity(made, base)
    tenants = {each.program: each.tenant or "" for each in made}
    groups = {kind: [each.program for each in made if kind in ("all", each.name)] for kind in (*KINDS, "all")}
    found = {}
    for name in ("fair", "fair-graph", "fair-oracle"):
        result = simulate(arriving(made, rate, seed), replace(base, policy=PolicyConfig(name, inner=inner)))
        found[name] = {kind: attainment(result, alone, SLO, group) for kind, group in groups.items()}
        found[name] |= {"jain": fairness(result, alone, tenants), "mean_s": result.mean_latency}
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """The table: means over seeds."""
    for load, inners in data["found"].items():
        table = Table(title=f"load {load}, {data['programs']} programs, seeds {data['seeds']}: in time, %")
        for heading in ("policy", *KINDS, "all", "Jain", "mean s"):
            table.add_column(heading)
        for inner, seeds in inners.items():
            for name in seeds[0]:
                means = {key: statistics.fmean(seed[name][key] for seed in seeds) for key in seeds[0][name]}
                shares = (f"{100 * means[kind]:.1f}" for kind in (*KINDS, "all"))
                table.add_row(f"{name} ({inner})", *shares, f"{means['jain']:.3f}", f"{means['mean_s']:.1f}")
        console.print(table)


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 200,
    seeds: Annotated[str, typer.Option(help="Seeds of the programs.")] = "10,11,12",
    loads: Annotated[str, typer.Option(help="Parts of the measured capacity.")] = "0.8,1.2",
    slots: Annotated[int, typer.Option(help="Calls that the engine runs at once.")] = 4,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Simulate, print tables and write JSON."""
    base = SimSettings(batch_size=slots, kv_tokens=math.inf)
    found: dict[str, dict[str, list[dict[str, dict[str, float]]]]] = {}
    for load in map(float, loads.split(",")):
        for inner in ("fcfs", "atlas"):
            runs = [measure(int(seed), programs, load, base, inner) for seed in seeds.split(",")]
            found.setdefault(f"{load:g}", {})[inner] = runs
    data = {"machine": machine(), "programs": programs, "seeds": seeds, "slots": slots, "found": found}
    show(data, Console(width=120))
    if out is not None:
        out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
