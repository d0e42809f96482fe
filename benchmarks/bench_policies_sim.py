"""Scheduling policies in simulation: program latency of ATLAS and its baselines on the workloads of Autellix §6.1.

    python benchmarks/bench_policies_sim.py --out bench_policies_sim.json   # half an hour of one core, or more
    python benchmarks/bench_policies_sim.py --seeds 1 --programs 150   # a quick look, two minutes

For each workload and seed, the benchmark searches for the arrival rate at which first come, first served (FCFS) has
three times the mean latency that programs have alone. At this rate, all policies serve the same programs and arrivals,
and ratios are taken for each seed. Three more parts follow: ATLAS on other machines, each at its own such rate; ATLAS
with other parameters; and a curve over arrival rates, as in Autellix Fig. 12.

Latency per token is a program's response time divided by the output tokens on its longest chain of calls. For a program
whose calls follow each other, these are all its tokens. The engine runs `--slots` calls at once. Its KV cache never
fills, so that only scheduling is compared; two of the other machines have KV caches that do.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from common import pyplot, spread
from policy_loads import Load, Summary, loaded
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.core.policies import SIMULATED_POLICIES, PolicyConfig
from weft.core.sim import SimSettings
from weft.core.trace.workloads import AUTELLIX

RATE_FACTORS = (0.4, 0.6, 0.8, 1.0, 1.2)  # the curve's rates, as multiples of the rate of the comparison
KEYS = ("mean", "p95", "p99")
COUNTS = ("preemptions", "recomputed_tokens")
# Workload or machine, policy or variant, and its summaries and those of the base, one for each seed.
Ratio = tuple[str, str, Sequence[Summary], Sequence[Summary]]


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    seeds: int
    programs: int
    slots: int
    load: float


def bounds(first_s: float, queues: int, ratio: float = 2.0) -> tuple[float, ...]:
    return tuple(first_s * ratio**number for number in range(queues - 1))


# Functions of the first bound, which is the 90th percentile of the service of calls, as calibration finds it.
VARIANTS: dict[str, Callable[[float], PolicyConfig]] = {
    "default (5 queues)": lambda _: PolicyConfig(),
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
    "queues by program, 5 queues": lambda b: PolicyConfig("atlas_by_program", bounds_s=bounds(b, 5)),
    "behind the gate": lambda _: PolicyConfig(gate=True),
    "learned, behind the gate": lambda _: PolicyConfig("learned", gate=True),
}


# Those that are simulated on the other engines as well.
MACHINE_VARIANTS = (
    "7 queues",
    "3 queues",
    "queues by program, 5 queues",
    "behind the gate",
    "learned, behind the gate",
)


def engine(slots: int) -> SimSettings:
    """An engine whose KV cache never fills."""
    return SimSettings(batch_size=slots, kv_tokens=math.inf)


def machines(slots: int) -> dict[str, SimSettings]:
    """The other engines. KV of 262,144 tokens is 32 GiB at 128 KiB per token, and of 65,536 tokens 8 GiB."""
    base = engine(slots)
    return {
        "8 slots": replace(base, batch_size=8),
        "64 slots": replace(base, batch_size=64),
        f"{slots} slots, KV 262,144": replace(base, kv_tokens=262_144),
        f"{slots} slots, KV 65,536": replace(base, kv_tokens=65_536),
    }


# -- the four parts


def compare(options: Options, progress: Progress) -> tuple[dict[str, list[Load]], dict[str, Any]]:
    """All policies at the rate of the comparison.

    Returns:
        The loads of each workload, one for each seed; and by workload and policy, a summary for each seed.
    """
    settings = engine(options.slots)
    task = progress.add_task("policies", total=len(AUTELLIX) * options.seeds * len(SIMULATED_POLICIES))
    loads: dict[str, list[Load]] = {}
    found: dict[str, Any] = {}
    for workload in AUTELLIX:
        for seed in range(options.seeds):
            load = loaded(workload, seed, options.programs, options.load, settings)
            loads.setdefault(workload, []).append(load)
            for policy in SIMULATED_POLICIES:
                found.setdefault(workload, {}).setdefault(policy, []).append(load.simulate(settings, policy))
                progress.advance(task)
    return loads, found


def sweep(loads: dict[str, list[Load]], options: Options, progress: Progress) -> dict[str, Any]:
    """All policies over arrival rates, which are multiples of the rate of the comparison.

    Returns:
        For each workload a list with one entry for each rate: the rate, which is a median over all seeds, and by policy
        a summary for each of the first two seeds.
    """
    settings = engine(options.slots)
    task = progress.add_task("arrival rates", total=len(loads) * len(RATE_FACTORS) * len(SIMULATED_POLICIES))
    found: dict[str, Any] = {}
    for workload, each in loads.items():
        median = statistics.median(load.rate for load in each)
        for factor in RATE_FACTORS:
            row: dict[str, Any] = {"rate": factor * median}
            for policy in SIMULATED_POLICIES:
                row[policy] = [replace(load, rate=factor * load.rate).simulate(settings, policy) for load in each[:2]]
                progress.advance(task)
            found.setdefault(workload, []).append(row)
    return found


def compare_machines(options: Options, progress: Progress) -> dict[str, Any]:
    """FCFS, ATLAS and SRPT on other machines, each at its own rate of the comparison.

    Returns:
        By machine, workload and policy, a summary for each seed: all seeds where the KV cache is small, because they
        differ much there, and else the first two.
    """
    kinds = machines(options.slots)
    task = progress.add_task("machines", total=len(kinds) * len(AUTELLIX))
    found: dict[str, Any] = {}
    for machine, settings in kinds.items():
        seeds = options.seeds if settings.kv_tokens < math.inf else min(options.seeds, 2)
        for workload in AUTELLIX:
            row = found.setdefault(machine, {}).setdefault(workload, {})
            for seed in range(seeds):
                load = loaded(workload, seed, options.programs, options.load, settings)
                first_s = load.call_service_s(settings)
                variants = {name: VARIANTS[name](first_s) for name in MACHINE_VARIANTS}
                for name, policy in {"fcfs": "fcfs", "atlas": "atlas", **variants, "srpt": "srpt"}.items():
                    row.setdefault(name, []).append(load.simulate(settings, policy))
            progress.advance(task)
    return found


def vary(loads: dict[str, list[Load]], options: Options, progress: Progress) -> dict[str, Any]:
    """ATLAS with other parameters, at the rate of the comparison.

    Returns:
        By variant and workload, a summary for each of the first three seeds.
    """
    settings = engine(options.slots)
    task = progress.add_task("parameters", total=len(VARIANTS) * sum(len(each[:3]) for each in loads.values()))
    found: dict[str, Any] = {}
    for workload, each in loads.items():
        for load in each[:3]:
            first_s = load.call_service_s(settings)
            for name, make in VARIANTS.items():
                result = load.simulate(settings, make(first_s))
                found.setdefault(name, {}).setdefault(workload, []).append(result)
                progress.advance(task)
    return found


# -- tables and plot


def ratios(ours: Sequence[Summary], theirs: Sequence[Summary], what: str, key: str) -> str:
    """The ratios of a figure, taken for each seed: median (lowest, highest)."""
    return spread([our[what][key] / their[what][key] for our, their in zip(ours, theirs, strict=False)])


def show_policies(loads: dict[str, list[Load]], found: dict[str, Any], console: Console) -> None:
    table = Table(title="medians over seeds: latency in s, then in ms per token")
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


def compared_with_atlas(found: dict[str, Any]) -> Iterator[Ratio]:
    for workload, by_policy in found.items():
        for policy, summaries in by_policy.items():
            if policy != "atlas":
                yield workload, policy, by_policy["atlas"], summaries


def compared_on_machines(found: dict[str, Any]) -> Iterator[Ratio]:
    for machine, by_workload in found.items():
        for workload, by_policy in by_workload.items():
            for policy in ("atlas", *MACHINE_VARIANTS, "srpt"):
                yield machine, f"{workload}, {policy}", by_policy[policy], by_policy["fcfs"]


def plot(curve: dict[str, Any], path: Path) -> None:
    """Mean latency per token over arrival rate, dotted its 99th percentile; one panel for each workload."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # Text that is not drawn as curves makes a smaller file.
    figure, axes = plt.subplots(1, len(curve), figsize=(4 * len(curve), 3.8), layout="constrained")
    for axis, (workload, rows) in zip(axes, curve.items(), strict=True):
        for number, policy in enumerate(SIMULATED_POLICIES):
            for key, style in (("mean", "o-"), ("p99", ":")):
                ys = [1000 * statistics.median(one["per_token"][key] for one in row[policy]) for row in rows]
                label = policy if key == "mean" else None
                axis.plot([row["rate"] for row in rows], ys, style, color=f"C{number}", label=label, markersize=3)
        axis.set(title=workload, xlabel="programs per second", yscale="log")
    axes[0].set_ylabel("latency, ms per token (mean; dotted: p99)")
    axes[0].legend()
    figure.savefig(path)


def main(
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds of the comparison; the other parts use fewer.")
    ] = 5,
    programs: Annotated[
        int, typer.Option(min=20, help="Programs of the mixed workload; the other workloads have multiples of it.")
    ] = 300,
    slots: Annotated[int, typer.Option(min=1, help="Calls that the engine runs at once.")] = 16,
    load: Annotated[
        float, typer.Option(help="Mean latency of FCFS at the rate of the comparison, as a multiple of that alone.")
    ] = 3.0,
    out: Annotated[Path | None, typer.Option(help="JSON file for all results; a plot is written next to it.")] = None,
) -> None:
    """Compare scheduling policies in simulation, print tables, and write JSON and a plot."""
    options = Options(seeds, programs, slots, load)
    console = Console(width=160)
    with Progress(console=Console(stderr=True)) as progress:
        loads, found = compare(options, progress)
        show_policies(loads, found, console)
        show_ratios("ATLAS ÷ each", compared_with_atlas(found), console)
        by_machine = compare_machines(options, progress)
        show_ratios("other machines: ÷ FCFS", compared_on_machines(by_machine), console)
        by_variant = vary(loads, options, progress)
        variants = ((w, name, row[w], found[w]["fcfs"]) for w in AUTELLIX for name, row in by_variant.items())
        show_ratios("ATLAS with other parameters ÷ FCFS", variants, console)
        curve = sweep(loads, options, progress)
    if out is not None:
        rates = {workload: [load.rate for load in each] for workload, each in loads.items()}
        parts = {"policies": found, "machines": by_machine, "parameters": by_variant, "curve": curve}
        out.write_text(json.dumps({"options": asdict(options), "rates": rates, **parts}, indent=1))
        plot(curve, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
