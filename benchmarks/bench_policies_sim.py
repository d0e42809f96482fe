"""Scheduling policies in simulation: program latency of ATLAS against its baselines, on the workloads of Autellix §6.1.

    python benchmarks/bench_policies_sim.py --out bench_policies_sim.json   # ten minutes of one core
    python benchmarks/bench_policies_sim.py --seeds 1 --programs 150   # a look, two minutes

For each workload and seed the arrival rate is found at which first come, first served is at three times the mean
latency that programs have alone. There all policies get the same programs and arrivals, and ratios are taken seed by
seed. Then a curve over arrival rates, as in Autellix Fig. 12; what ATLAS does on other machines, each at its own such
rate; and what its parameters do.

Latency per token is a program's response time by the output tokens on its longest chain of calls (for a program of
calls one after the other, all its tokens). The engine runs `--slots` calls at once, and by default its KV cache never
fills, so that only scheduling is compared; `machines` has one that does.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from bench_balancer_sim import ALONE_PER_S, highest_rate, spread
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.bench.measures import summarise
from weft.core.policies import Atlas, Call, Policy, PolicyConfig, Rank
from weft.core.sim import SimResult, SimSettings, TraceProgram, simulate
from weft.core.trace.format import path_tokens
from weft.core.trace.workloads import WORKLOADS, generate, poisson

POLICIES = ("fcfs", "priority", "mlfq", "plas", "atlas", "rr", "srpt")
SHARE = {"chat": 2, "tools": 2, "search": 0.2, "mixed": 1}  # of the programs asked for: short ones are many
GUESSES = {"chat": 0.7, "tools": 1.0, "search": 0.065, "mixed": 0.2}  # programs a second, where the search begins
OF_RATE = (0.4, 0.6, 0.8, 1.0, 1.2)  # the curve, as parts of the rate at which FCFS is at 3 times
KEYS = ("mean", "p95", "p99")
COUNTS = ("preemptions", "recomputed_tokens")
Named = Literal["priority", "srpt"]
Summary = dict[str, Any]
# Workload or machine, what is compared, its summaries, and those that they are divided by, seed by seed.
Ratio = tuple[str, str, Sequence[Summary], Sequence[Summary]]


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    seeds: int
    programs: int
    slots: int
    load: float


@dataclass(frozen=True)
class Load:
    """Programs of a workload and seed, and how fast they arrive."""

    workload: str
    seed: int
    programs: tuple[TraceProgram, ...]
    rate: float = math.nan

    def arriving(self) -> list[TraceProgram]:
        """At another rate, the same arrivals closer together or further apart."""
        arrivals_s = poisson(random.Random(f"arrivals {self.seed}"), self.rate)
        return [replace(program, arrival_s=next(arrivals_s)) for program in self.programs]

    def call_service_s(self, settings: SimSettings) -> float:
        """The 90th percentile of the service of its calls under FCFS: the first bound that calibration aims at."""
        runs = simulate(self.arriving(), with_policy(settings, "fcfs"), runs=True).runs
        return statistics.quantiles((run.end_s - run.start_s for run in runs), n=10)[-1]

    def play(self, settings: SimSettings, policy: PolicyConfig | str) -> Summary:
        """Simulate it under a policy."""
        return summary(self.programs, simulate(self.arriving(), with_policy(settings, policy)))


class InTurn(Atlas):
    """ATLAS whose queues are first come, first served by program, not by call: an experiment, not Algorithm 1."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places: dict[int, int] = {}  # by identity; the simulator keeps all of them

    def _enter(self, call: Call, level: int) -> None:
        super()._enter(call, level)
        place = self._places.setdefault(id(call.program), len(self._places))
        call.rank = Rank(call.rank.level, place + call.rank.order * 1e-9)


class InTurnConfig(PolicyConfig):
    """Makes that."""

    def make(self) -> Policy:
        return InTurn(() if isinstance(self.bounds_s, str) else self.bounds_s, self.beta)


def bounds(first_s: float, queues: int, ratio: float = 2.0) -> tuple[float, ...]:
    return tuple(first_s * ratio**number for number in range(queues - 1))


# By the first bound: where calibration puts it, the 90th percentile of the service of calls.
VARIANTS: dict[str, Callable[[float], PolicyConfig]] = {
    "as it is (5 queues)": lambda _: PolicyConfig(),
    "7 queues": lambda b: PolicyConfig(bounds_s=bounds(b, 7)),
    "4 queues": lambda b: PolicyConfig(bounds_s=bounds(b, 4)),
    "3 queues": lambda b: PolicyConfig(bounds_s=bounds(b, 3)),
    "bounds 4 times apart": lambda b: PolicyConfig(bounds_s=bounds(b, 5, 4)),
    "first bound halved": lambda b: PolicyConfig(bounds_s=bounds(b / 2, 5)),
    "beta 1": lambda _: PolicyConfig(beta=1.0),
    "never promoted": lambda _: PolicyConfig(beta=None),
    "decide_every 8": lambda _: PolicyConfig(decide_every=8),
    "token_s 0.02": lambda _: PolicyConfig(token_s=0.02),
    "PLAS": lambda _: PolicyConfig("plas"),
    "PLAS, 4 queues": lambda b: PolicyConfig("plas", bounds_s=bounds(b, 4)),
    "programs in turn, 5 queues": lambda b: InTurnConfig(bounds_s=bounds(b, 5)),
}


def engine(slots: int) -> SimSettings:
    """Whose KV cache never fills."""
    return SimSettings(batch_size=slots, kv_tokens=math.inf)


def machines(slots: int) -> dict[str, SimSettings]:
    """Other engines to compare on. KV of 262,144 tokens is 32 GiB at 128 KiB a token."""
    base = engine(slots)
    return {
        "8 slots": replace(base, batch_size=8),
        "64 slots": replace(base, batch_size=64),
        f"{slots} slots, KV 262,144": replace(base, kv_tokens=262_144),
    }


def with_policy(settings: SimSettings, policy: PolicyConfig | str) -> SimSettings:
    if isinstance(policy, PolicyConfig):
        return replace(settings, policy=policy)
    named: dict[str, Named] = {"priority": "priority", "srpt": "srpt"}
    return replace(settings, policy=named[policy] if policy in named else PolicyConfig(policy))


def summary(programs: Sequence[TraceProgram], result: SimResult) -> Summary:
    """What a simulation is compared by, times in seconds. By kind: mean latency of the programs of each name."""
    latencies = [result.programs[program.program].latency for program in programs]
    kinds: dict[str, list[float]] = {}
    for program, latency in zip(programs, latencies, strict=True):
        kinds.setdefault(program.name or "", []).append(latency)
    outputs = [[call.output_tokens for call in program.calls] for program in programs]
    both = list(zip(programs, latencies, outputs, strict=True))
    waited_s, served_s = result.total_wait, sum(row.service for row in result.programs.values())
    return {
        "latency": summarise(latencies),
        "per_token": summarise([latency / path_tokens(program.calls) for program, latency, _ in both]),
        "per_token_of_all": summarise([latency / sum(tokens) for _, latency, tokens in both]),
        "kinds": {kind: statistics.fmean(found) for kind, found in sorted(kinds.items())},
        "tokens_per_s": sum(map(sum, outputs)) / result.makespan,
        "wait_share": waited_s / (waited_s + served_s),
        "hit_rate": result.prefix_hit_rate,
        "preemptions": result.counts.preemptions,
        "recomputed_tokens": result.counts.recomputed,
    }


def loaded(workload: str, seed: int, options: Options, settings: SimSettings) -> Load:
    """Programs that arrive so fast that FCFS is at `options.load` times their mean latency alone."""
    count = math.ceil(options.programs * SHARE[workload])
    drawn = generate(workload, count, poisson(random.Random(0), 1.0), random.Random(f"{workload} {seed}"))
    load = Load(workload, seed, tuple(drawn))
    allowed_s = options.load * replace(load, rate=ALONE_PER_S).play(settings, "fcfs")["latency"]["mean"]

    def ratio(rate: float) -> float:
        return float(replace(load, rate=rate).play(settings, "fcfs")["latency"]["mean"] / allowed_s)

    return replace(load, rate=highest_rate(ratio, GUESSES[workload]))


# -- the parts


def compare(options: Options, progress: Progress) -> tuple[dict[str, list[Load]], dict[str, Any]]:
    """All policies at that load: for each workload and policy, a summary for each seed."""
    settings = engine(options.slots)
    task = progress.add_task("policies", total=len(WORKLOADS) * options.seeds * len(POLICIES))
    loads: dict[str, list[Load]] = {}
    found: dict[str, Any] = {}
    for workload in WORKLOADS:
        for seed in range(options.seeds):
            load = loaded(workload, seed, options, settings)
            loads.setdefault(workload, []).append(load)
            for policy in POLICIES:
                found.setdefault(workload, {}).setdefault(policy, []).append(load.play(settings, policy))
                progress.advance(task)
    return loads, found


def sweep(loads: dict[str, list[Load]], options: Options, progress: Progress) -> dict[str, Any]:
    """Over arrival rates, as parts of the one at which FCFS is at 3 times: for each workload, part and policy a summary
    for each of the first two seeds. Its rate is the median over all seeds."""
    settings = engine(options.slots)
    task = progress.add_task("arrival rates", total=len(loads) * len(OF_RATE) * len(POLICIES))
    found: dict[str, Any] = {}
    for workload, each in loads.items():
        middle = statistics.median(load.rate for load in each)
        for part in OF_RATE:
            row: dict[str, Any] = {"rate": part * middle}
            for policy in POLICIES:
                row[policy] = [replace(load, rate=part * load.rate).play(settings, policy) for load in each[:2]]
                progress.advance(task)
            found.setdefault(workload, []).append(row)
    return found


def compare_machines(options: Options, progress: Progress) -> dict[str, Any]:
    """On other machines, each at the rate at which FCFS is at 3 times there: summaries of up to two seeds."""
    kinds, seeds = machines(options.slots), range(min(options.seeds, 2))
    task = progress.add_task("machines", total=len(kinds) * len(WORKLOADS) * len(seeds))
    found: dict[str, Any] = {}
    for machine, settings in kinds.items():
        for workload in WORKLOADS:
            row = found.setdefault(machine, {}).setdefault(workload, {})
            for seed in seeds:
                load = loaded(workload, seed, options, settings)
                seven = VARIANTS["7 queues"](load.call_service_s(settings))
                for name, policy in (("fcfs", "fcfs"), ("atlas", "atlas"), ("7 queues", seven), ("srpt", "srpt")):
                    row.setdefault(name, []).append(load.play(settings, policy))
                progress.advance(task)
    return found


def vary(loads: dict[str, list[Load]], options: Options, progress: Progress) -> dict[str, Any]:
    """ATLAS with other parameters, at the load of the comparison: a summary for each of up to three seeds."""
    settings = engine(options.slots)
    task = progress.add_task("parameters", total=len(VARIANTS) * sum(len(each[:3]) for each in loads.values()))
    found: dict[str, Any] = {}
    for workload, each in loads.items():
        for load in each[:3]:
            first_s = load.call_service_s(settings)
            for name, make in VARIANTS.items():
                result = load.play(settings, make(first_s))
                found.setdefault(name, {}).setdefault(workload, []).append(result)
                progress.advance(task)
    return found


# -- showing it


def ratios(ours: Sequence[Summary], theirs: Sequence[Summary], what: str, key: str) -> str:
    """Of the same seeds: median (lowest, highest)."""
    return spread([own[what][key] / its[what][key] for own, its in zip(ours, theirs, strict=False)])


def show_policies(loads: dict[str, list[Load]], found: dict[str, Any], console: Console) -> None:
    table = Table(title="medians over seeds: latency in s, then in ms a token")
    for heading in ("workload (rate)", "policy", *(["mean", "p50", "p95", "p99"] * 2), "tok/s", "preempted"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    table.add_column("recomputed", justify="right")
    for workload, by_policy in found.items():
        rate = f"{workload} ({statistics.median(load.rate for load in loads[workload]):.3f})"
        for policy, each in by_policy.items():
            cells = [
                f"{statistics.median(one[what][key] for one in each) * scale:.1f}"
                for what, scale in (("latency", 1), ("per_token", 1000))
                for key in ("mean", "p50", "p95", "p99")
            ]
            rest = (statistics.median(one[key] for one in each) for key in ("tokens_per_s", *COUNTS))
            table.add_row(rate, policy, *cells, *(f"{value:.0f}" for value in rest))
        table.add_section()
    console.print(table)


def show_ratios(title: str, rows: Iterable[Ratio], console: Console) -> None:
    table = Table(title=f"{title}: median (lowest, highest)")
    headings = ("", "", *(f"latency {key}" for key in KEYS), *(f"per token {key}" for key in KEYS))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for workload, name, ours, theirs in rows:
        table.add_row(workload, name, *(ratios(ours, theirs, w, k) for w in ("latency", "per_token") for k in KEYS))
    console.print(table)


def plot(curve: dict[str, Any], path: Path) -> None:
    """Mean latency a token over arrival rate, dotted its 99th percentile; one panel for each workload."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a smaller file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(curve), figsize=(4 * len(curve), 3.8), layout="constrained")
    for axis, (workload, rows) in zip(axes, curve.items(), strict=True):
        for number, policy in enumerate(POLICIES):
            for key, style in (("mean", "o-"), ("p99", ":")):
                ys = [1000 * statistics.median(one["per_token"][key] for one in row[policy]) for row in rows]
                label = policy if key == "mean" else None
                axis.plot([row["rate"] for row in rows], ys, style, color=f"C{number}", label=label, markersize=3)
        axis.set(title=workload, xlabel="programs a second", yscale="log")
    axes[0].set_ylabel("latency, ms a token (mean; dotted: p99)")
    axes[0].legend()
    figure.savefig(path)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the comparison; the other parts take fewer.")] = 5,
    programs: Annotated[int, typer.Option(min=20, help="Programs of the mixed workload; the others go by it.")] = 300,
    slots: Annotated[int, typer.Option(min=1, help="Calls that the engine runs at once.")] = 16,
    load: Annotated[float, typer.Option(help="Latency of FCFS at the load of the comparison, times that alone.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Where to write all of it (JSON) and, beside it, a plot.")] = None,
) -> None:
    """Compare scheduling policies in simulation, print tables, and write JSON and a plot."""
    options = Options(seeds, programs, slots, load)
    console = Console(width=160)
    with Progress(console=Console(stderr=True)) as progress:
        loads, found = compare(options, progress)
        show_policies(loads, found, console)
        baselines = ((w, p, each["atlas"], each[p]) for w, each in found.items() for p in POLICIES if p != "atlas")
        show_ratios("ATLAS ÷ each", baselines, console)
        by_machine = compare_machines(options, progress)
        pairs = ((m, w, each) for m, row in by_machine.items() for w, each in row.items())
        three = ((m, f"{w}, {p}", each[p], each["fcfs"]) for m, w, each in pairs for p in ("atlas", "7 queues", "srpt"))
        show_ratios("other machines: ÷ FCFS", three, console)
        varied = vary(loads, options, progress)
        those = ((w, name, row[w], found[w]["fcfs"]) for w in WORKLOADS for name, row in varied.items())
        show_ratios("ATLAS with other parameters ÷ FCFS", those, console)
        curve = sweep(loads, options, progress)
    if out is not None:
        rates = {workload: [load.rate for load in each] for workload, each in loads.items()}
        parts = {"policies": found, "machines": by_machine, "parameters": varied, "curve": curve}
        out.write_text(json.dumps({"options": asdict(options), "rates": rates, **parts}, indent=1))
        plot(curve, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
