"""The chance of reuse from execution graphs, simulated: does SAGA's P_reuse (eq. 4) help a KV cache?

    python benchmarks/bench_kv_forecast.py --traces FOLDER --out kv_forecast.json

WA-LRU and SAGA weigh a context by the chance that a call continues it. Four sources of this chance are compared on the
same programs and arrivals: *age*, counted by the program's name and the calls since, as the policies have it; *graph*,
from the execution graph of the name, once 30 programs have ended, and by age until then and for what a later call of
the program has left behind; *constant*, one half for every context, which switches the chance off; and *oracle*, which
knows what is continued. All of them are under FCFS, so nothing else differs. `FOLDER` has the folders weka, tau-bench
and bfcl; what it has not is left out.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final
from unittest.mock import patch

import typer
from bounded_workloads import WORKLOADS
from common import machine, spread
from leaderboard_settings import Data
from rich.console import Console
from rich.table import Table
from sim_measures import begin_in

from weft.core.ids import CallId
from weft.core.kv_cache.policies import Context, KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.prediction import ExecutionGraphs
from weft.core.prediction.execution_graph import Cost
from weft.core.sim import SimSettings, simulate
from weft.core.sim.kv_cache import policy_cache
from weft.core.sim.kv_cache.cache import Segment
from weft.core.sim.kv_cache.segment_contexts import SegmentContexts
from weft.core.sim.sim_programs import SimCall, SimProgram
from weft.core.sim.study.load import with_load
from weft.core.trace.format import TraceProgram
from weft.core.trace.workloads import poisson

# By source: slots, tokens of the KV cache, and programs.
ENGINES: Final = {
    "swe": (16, 196_608, 100),
    "search": (16, 32_768, 90),
    "tau-bench": (16, 49_152, 100),
    "bfcl": (16, 12_288, 100),
    "weka, gaps to 60 s": (64, 500_000, 120),
}
HOST_TIMES: Final = 4
LOAD: Final = 0.9
KV: Final = ("wa-lru", "saga", "next-use")  # the last two with host memory


class Constant(SegmentContexts):
    """Each context is as likely to be continued as not."""

    _left: SimCall | None = None  # the call that leaves a context now; None: it was preempted

    def _chance(self, call: SimCall, found: float) -> float:
        return 0.5

    def call_left(self, call: SimCall, segment: Segment, called_s: float | None, now_s: float) -> None:
        """A call has ended: the context that it leaves gets another chance before the policy decides on it."""
        self._left = call if called_s is None else None
        super().call_left(call, segment, called_s, now_s)

    def _make_context(self, *given: Any, **named: Any) -> Context:
        context = super()._make_context(*given, **named)
        if self._left is not None:  # otherwise the call was preempted, and goes on
            context.chance = self._chance(self._left, context.chance)
        return context

    def call_began(self, call: SimCall, waited_s: float, now_s: float) -> None:
        """A call starts. What its program has left otherwise keeps its chance."""
        before = {each: each.chance for each in self._contexts.get(call.owner.number, {}).values()}
        super().call_began(call, waited_s, now_s)
        for context, chance in before.items():
            context.chance = self._later(context.chance, chance)

    def _later(self, by_age: float, before: float) -> float:
        return before


class Oracle(Constant):
    """Knows which contexts are continued. A branch that was not taken is known to be none."""

    def _chance(self, call: SimCall, found: float) -> float:
        owner, call_id = call.owner, call.spec.call_id
        children = (owner.spec.calls[child] for child in owner.children[call.index])
        return float(any(each.parents[0] == call_id for each in children))


class Graph(Constant):
    """The chance that a call follows, from the execution graph (SAGA eq. 4)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.graphs = ExecutionGraphs()

    def call_began(self, call: SimCall, waited_s: float, now_s: float) -> None:
        """A call starts. It moves on from the nodes of its parents."""
        begin_in(self.graphs, call, now_s)
        super().call_began(call, waited_s, now_s)

    def call_left(self, call: SimCall, segment: Segment, called_s: float | None, now_s: float) -> None:
        """A call has ended, unless it was preempted."""
        if called_s is None:
            self.graphs.leave(call.owner.view.program_id, CallId(call.spec.call_id), Cost(), now_s)
        super().call_left(call, segment, called_s, now_s)

    def end_program(self, program: SimProgram) -> None:
        """No call of a program will come."""
        self.graphs.end(program.view.program_id)
        super().end_program(program)

    def _chance(self, call: SimCall, found: float) -> float:
        cursors = self.graphs.cursors(call.owner.view.program_id)
        node = next((each.node for each in cursors if each.call_id == call.spec.call_id), None)
        template = self.graphs.templates.get(call.owner.view.name)
        forecast = template.forecast(node) if node is not None and template is not None else None
        return found if forecast is None else 1 - forecast.end

    def _later(self, by_age: float, before: float) -> float:
        return by_age


SOURCES: Final[dict[str, type[SegmentContexts]]] = {
    "age": SegmentContexts,
    "graph": Graph,
    "constant": Constant,
    "oracle": Oracle,
}


def programs_of(source: str, seed: int, count: int, data: Data | None) -> list[TraceProgram]:
    """The programs of a source and seed, with arrivals of no particular rate. Empty: they are not there."""
    if source in WORKLOADS:
        rng, arrivals = random.Random(f"{source} {seed}"), poisson(random.Random(seed), 1.0)
        made = (WORKLOADS[source](rng, f"p{number}") for number in range(count))
        return [replace(each, arrival_s=next(arrivals)) for each in made]
    return data.programs(source, count, seed) if data is not None and data.has(source) else []


def engine(source: str, kv_policy: str) -> SimSettings:
    """The engine of a source with a KV policy."""
    slots, kv_tokens, _ = ENGINES[source]
    host_tokens = 0 if kv_policy == "wa-lru" else HOST_TIMES * kv_tokens
    kept = KvPolicyConfig(kv_policy)
    return SimSettings(
        policy=PolicyConfig("fcfs"), batch_size=slots, kv_tokens=kv_tokens, host_kv_tokens=host_tokens, kv_policy=kept
    )


def measure(source: str, kv_policy: str, programs: list[TraceProgram]) -> dict[str, dict[str, float]]:
    """By source of the chance: the mean and the 99th percentile of completion times in seconds, and the percentage of
    prompt tokens that were computed again."""
    settings, found = engine(source, kv_policy), {}
    for name, contexts in SOURCES.items():
        with patch.object(policy_cache, "SegmentContexts", contexts):
            result = simulate(programs, settings)
        counts = result.counts
        again = 100 * (counts.again + counts.recomputed) / counts.prompt
        found[name] = {"mean_s": result.mean_latency, "p99_s": result.latency(99), "again_percent": again}
    return found


def show(found: dict[str, dict[str, list[dict[str, dict[str, float]]]]], console: Console) -> None:
    """The table: each source of the chance ÷ that by age on the same programs, median (lowest, highest) over seeds."""
    table = Table(title="mean completion time ÷ that by age; prompt tokens computed again, %")
    for heading in ("programs", "KV policy", *SOURCES):
        table.add_column(heading)
    for source, policies in found.items():
        for kv_policy, seeds in policies.items():
            cells = []
            for name in SOURCES:
                ratios = [seed[name]["mean_s"] / seed["age"]["mean_s"] for seed in seeds]
                again = [seed[name]["again_percent"] for seed in seeds]
                cells.append(f"{spread(ratios, 3)}; {spread(again, 1)}")
            table.add_row(source, kv_policy, *cells)
    console.print(table)


def main(
    traces: Annotated[Path | None, typer.Option(help="The folder with recorded programs.")] = None,
    kept: Annotated[Path, typer.Option(help="Where imported programs are kept.")] = Path("build/leaderboard-traces"),
    seeds: Annotated[str, typer.Option(help="Seeds of the programs.")] = "21,22,23",
    only: Annotated[str, typer.Option(help="Sources whose name has this.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Simulate, print the table and write JSON."""
    console = Console(width=180)
    data = None if traces is None else Data(traces, kept, "reporting")
    found: dict[str, dict[str, list[dict[str, dict[str, float]]]]] = {}
    for source, (_, _, count) in ENGINES.items():
        for seed in map(int, seeds.split(",")) if only in source else ():
            made = programs_of(source, seed, count, data)
            for kv_policy in KV if made else ():
                arrived = with_load(made, LOAD, engine(source, kv_policy))
                found.setdefault(source, {}).setdefault(kv_policy, []).append(measure(source, kv_policy, arrived))
                console.print(f"{source}, seed {seed}, {kv_policy}: done", style="dim")
    show(found, console)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "seeds": seeds, "load": LOAD, "found": found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
