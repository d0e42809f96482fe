"""SAGA as a whole in simulation, and its ablations: each mechanism off in turn, and each alone (SAGA, Tables 3 and 4).

    python benchmarks/bench_saga_sim.py --out saga.json

Several simulated replicas serve SAGA's workloads (§9.1) at a part of their measured capacity. `saga` is WA-LRU, the
time to live under pressure, host memory and fetches ahead from it, affinity, stealing and Agent Fair Share with
deadlines at 1.5 times the time alone. Each mechanism that is off is replaced by what vLLM has: LRU, nothing held, no
host memory, the least used replica, no stealing, FCFS. Without fetches ahead, a call that runs loads its context from
host memory itself. Without host memory there is nothing to fetch ahead, so that row turns off both. All figures are
ratios to vLLM with prefix cache (FCFS, LRU) behind a balancer that takes the least used replica, with the same programs
and arrivals. Policies learn in the run what they predict. Only `saga (oracle)` knows the times of tools, and which
contexts are continued.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import typer
from arrival_rates import ALONE_PER_S, arriving
from bounded_workloads import bounded
from common import machine, spread
from rich.console import Console
from rich.table import Table
from seeds import measured, ratio_panels, write
from sim_measures import attainment

from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.routing import BalancerConfig, StealingConfig
from weft.core.sim import SimResult, SimSettings, TraceProgram, capacity, simulate
from weft.core.trace.workloads import generate, poisson

SLO: Final = 1.5
MECHANISMS: Final = ("WA-LRU", "TTL", "host memory", "fetch ahead", "affinity", "stealing", "fair shares")
NEEDS: Final = {"fetch ahead": "host memory"}  # a mechanism, and the one without which it is not there
ALL: Final = frozenset(MECHANISMS)
STOCK: Final = "least used"
VARIANTS: Final[dict[str, frozenset[str]]] = {
    "saga": ALL,
    "saga (oracle)": ALL,
    **{f"without {each}": ALL - {each} - {need for need, of in NEEDS.items() if of == each} for each in MECHANISMS},
    **{f"only {each}": frozenset({each}) for each in MECHANISMS if each not in NEEDS},
    **{f"only {of} and {each}": frozenset({of, each}) for each, of in NEEDS.items()},
}
KEYS: Final = ("mean", "p95", "makespan", "in_time", "again", "moved", "least_busy", "most_busy", "memory")
BASELINES: Final = {  # FCFS and LRU behind other balancers
    "round robin": "round_robin",
    "Weft's default balancer": "adaptive_locality",
}


def cluster(on: frozenset[str], base: SimSettings) -> SimSettings:
    """The replicas with these mechanisms."""
    kv = {
        frozenset({"WA-LRU", "TTL"}): "saga",
        frozenset({"WA-LRU"}): "wa-lru",
        frozenset({"TTL"}): "ttl",
        frozenset[str](): "lru",
    }[on & {"WA-LRU", "TTL"}]
    if "host memory" in on and kv == "lru":
        kv = "saga"  # nothing else spills as SAGA would
        parameters = {"most_s": 0.0, "recency": 1.0, "reuse": 0.0, "size": 0.0}  # nothing is held, and LRU
    elif "host memory" in on and kv == "ttl":
        kv, parameters = "saga", {"recency": 1.0, "reuse": 0.0, "size": 0.0}
    elif "host memory" in on and kv == "wa-lru":
        kv, parameters = "saga", {"most_s": 0.0}
    else:
        parameters = {}
    return replace(
        base,
        policy=PolicyConfig("fair", inner="fcfs", slo=SLO) if "fair shares" in on else PolicyConfig("fcfs"),
        kv_policy=KvPolicyConfig(kv, **parameters),
        host_kv_tokens=8 * base.kv_tokens if "host memory" in on else 0,
        fetches_ahead="fetch ahead" in on,
        balancer=BalancerConfig("affinity" if "affinity" in on else "least_used"),
        stealing=StealingConfig() if "stealing" in on else None,
    )


def with_deadlines(programs: Sequence[TraceProgram], alone: Mapping[str, float]) -> list[TraceProgram]:
    """The programs, each with its deadline."""
    return [replace(each, deadline_s=SLO * alone[each.program]) for each in programs]


def arrivals(
    workload: str, seed: int, count: int, load: float, base: SimSettings
) -> tuple[list[TraceProgram], dict[str, float]]:
    """Programs with deadlines that arrive at a part of the measured capacity.

    Returns:
        The programs, and the seconds that each takes alone.
    """
    one = replace(base, replicas=1, policy=PolicyConfig("fcfs"))
    made = [bounded(each) for each in generate(workload, count, poisson(Random(0), 1.0), Random(f"{workload} {seed}"))]
    alone = {name: row.latency for name, row in simulate(arriving(made, ALONE_PER_S, seed), one).programs.items()}
    most = base.replicas * capacity(made, one, tools=False)
    return with_deadlines(arriving(made, load * most, seed), alone), alone


def use(result: SimResult, settings: SimSettings) -> dict[str, float]:
    """The parts of the makespan in which the least and the most busy replica work, and the mean part of the KV caches
    that running calls have. What they share counts for each of them, and what is kept between calls does not count."""
    busy_s, context_token_s = [0.0] * settings.replicas, 0.0
    for batch in result.batches:
        took_s = batch.took_s(settings.timing)
        busy_s[batch.replica] += took_s
        context_token_s += took_s * (batch.context_tokens + batch.decode_tokens * (batch.steps - 1) / 2)
    parts = [each / result.makespan for each in busy_s]
    memory = context_token_s / (settings.replicas * settings.kv_tokens * result.makespan)
    return {"least_busy": min(parts), "most_busy": max(parts), "memory": memory}


def measure(
    workload: str, seed: int, count: int, load: float, base: SimSettings, variants: Collection[str] = ()
) -> dict[str, dict[str, float]]:
    """By variant: mean and p95 of the completion time, programs in time, tokens computed again, calls that moved, and
    how busy replicas are.

    The completion times and the makespan are ratios to `STOCK`. Without names of variants, all of them are measured.
    """
    programs, alone = arrivals(workload, seed, count, load, base)
    settings = {STOCK: cluster(frozenset(), base)}
    settings |= {
        name: replace(settings[STOCK], balancer=BalancerConfig(balancer)) for name, balancer in BASELINES.items()
    }
    settings |= {name: cluster(on, base) for name, on in VARIANTS.items()}
    settings["saga (oracle)"] = replace(settings["saga (oracle)"], knows_pauses=True)
    found: dict[str, dict[str, float]] = {}
    for name, each in settings.items():
        if variants and name not in {STOCK, *variants}:
            continue
        result = simulate(programs, each, batches=True)
        found[name] = {
            "mean": result.mean_latency,
            "p95": result.latency(95),
            "makespan": result.makespan,
            "in_time": attainment(result, alone, SLO),
            "again": result.counts.again / max(1, result.counts.prompt),
            "moved": result.counts.moved / sum(len(program.calls) for program in programs),
            **use(result, each),
        }
    stock = dict(found[STOCK])
    for each_found in found.values():
        for key in ("mean", "p95", "makespan"):
            each_found[key] /= stock[key]
    found[STOCK]["alone"] = statistics.fmean(alone.values()) / stock["mean"]
    return found


def show(data: Mapping[str, Any], console: Console) -> None:
    """A table for each workload: median (lowest, highest) of the seeds."""
    for workload, seeds in data["found"].items():
        table = Table(title=f"{workload}: ÷ vLLM with prefix cache, {data['load']:g} of the capacity")
        table.add_column("variant")
        for key in KEYS:
            table.add_column(key.replace("_", " "))
        for name in seeds[0]:
            cells = [spread([seed[name][key] for seed in seeds]) for key in KEYS]
            table.add_row(name, *cells)
        console.print(table)


def plot(data: Mapping[str, Any], path: Path) -> None:
    """A panel for each workload: the median completion time of each variant ÷ that of vLLM, and its range."""
    panels = {
        workload: {name: [seed[name]["mean"] for seed in seeds] for name in seeds[0] if name != STOCK}
        for workload, seeds in data["found"].items()
    }
    ratio_panels(panels, path, "completion time ÷ vLLM", (3.2, 4.4))


def main(
    programs: Annotated[int, typer.Option(help="Programs in a run.")] = 120,
    seeds: Annotated[int, typer.Option(help="Runs with other programs.")] = 3,
    load: Annotated[float, typer.Option(help="Part of the measured capacity.")] = 0.8,
    workloads: Annotated[str, typer.Option(help="Workloads, with commas.")] = "swe,web,tenants",
    replicas: Annotated[int, typer.Option(help="Engines.")] = 4,
    slots: Annotated[int, typer.Option(help="Calls that an engine runs at once.")] = 16,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache of an engine holds.")] = 65_536,
    variants: Annotated[str, typer.Option(help="Only these besides the least used replica, with commas.")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results, with a picture next to it.")] = None,
) -> None:
    """Simulate, print tables and write JSON and a picture."""
    base = SimSettings(batch_size=slots, kv_tokens=kv_tokens, replicas=replicas)
    console = Console(width=220)
    only = variants.split(",") if variants else ()
    found = measured(
        workloads.split(","), seeds, lambda workload, seed: measure(workload, seed, programs, load, base, only)
    )
    data: dict[str, Any] = {"machine": machine(), "programs": programs, "seeds": seeds, "load": load}
    data |= {"replicas": replicas, "slots": slots, "kv_tokens": kv_tokens, "found": found}
    show(data, console)
    write(data, out, plot)


if __name__ == "__main__":
    typer.run(main)
