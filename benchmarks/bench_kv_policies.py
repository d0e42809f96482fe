"""KV policies under three scheduling policies: completion times, and prompt tokens that are computed again.

    python benchmarks/bench_kv_policies.py --seeds 1,2,3 --out kv_policies.json
    python benchmarks/bench_kv_policies.py --programs 20 --seeds 0 --only tools       # a look
    python benchmarks/bench_kv_policies.py --kv stock,ended-first,next-use,next-use+host
    python benchmarks/bench_kv_policies.py --policies fcfs,astraea --kv stock,least-waste+host --only "30 s gaps"

Programs, arrivals and engines are those of `policy_grid.py`: they arrive as often as gives FCFS on the stock engine
the setting's multiple of the latency that programs have alone. The JSON file is `--out`; a plot is written next to it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from common import machine, pyplot, spread
from policy_grid import LONG_GAPS, Setting, arrived_programs, rate_of
from rich.console import Console
from rich.table import Table

from weft.core.errors import SimulationError
from weft.core.kv_cache.policies import KvPolicyConfig
from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate

POLICIES: Final = ("fcfs", "atlas", "auto")
STOCK: Final = ("fcfs", "stock")
# "stock" is lru, and under auto the order that auto chooses. "+host" has host memory of eight times the KV cache,
# "+late" copies nothing back before the call starts that needs it, and "+oracle" knows how long tools take and what is
# continued.
KV: Final = ("stock", "ended-first", "least-waste", "least-waste+host", "ttl", "wa-lru", "next-use", "next-use+host")
LEFT_OUT: Final = ("least-waste", "ttl", "wa-lru", "saga")  # of the plot
HOST_TIMES: Final = 8
SETTINGS: Final = tuple(
    Setting(workload, kv_tokens, load, gaps=gaps)
    for workload, load, gaps in (
        ("tools", 3.0, 1.0),
        ("tools", 5.0, 1.0),
        ("tools", 3.0, LONG_GAPS),
        ("chat", 3.0, 1.0),
        ("mixed", 3.0, 1.0),
        ("search", 3.0, 1.0),
    )
    for kv_tokens in (65_536, 131_072, 262_144)
) + tuple(Setting("tools", kv_tokens, 3.0, arrivals_of_kv=262_144) for kv_tokens in range(163_840, 262_144, 32_768))


class Row(NamedTuple):
    """A figure for each seed; each is compared with stock FCFS on the same programs."""

    setting: str
    policy: str
    kv_policy: str
    completion: list[float]  # mean completion time, as a ratio
    again_percent: list[float]  # of the prompt tokens that were computed again
    fetched_percent: list[float]  # of the prompt tokens that were copied from host memory
    tool_share: list[float]  # the tools' times ÷ the completion times; calls side by side count twice


def engine(setting: Setting, policy: str, kv_policy: str) -> SimSettings:
    """The engine of a setting with a scheduling policy and a KV policy."""
    stock = setting.engine(PolicyConfig(policy))
    if kv_policy == "stock":
        return stock
    name, *also = kv_policy.split("+")
    return replace(
        stock,
        kv_policy=KvPolicyConfig(name),
        host_kv_tokens=HOST_TIMES * setting.kv_tokens if "host" in also else 0,
        fetches_ahead="late" not in also,
        knows_pauses="oracle" in also,
    )


def rows_of(
    setting: Setting, seeds: Sequence[int], programs: int, policies: Sequence[str], kv_policies: Sequence[str]
) -> list[Row]:
    """Simulate a setting with every combination, stock FCFS first."""
    combinations = dict.fromkeys([STOCK, *itertools.product(policies, kv_policies)])
    rows = {each: Row(str(setting), *each, [], [], [], []) for each in combinations}
    for seed in seeds:
        made = arrived_programs(setting, seed, programs, rate_of(setting, seed, programs))
        tools_s = statistics.fmean(sum(call.gap_s for call in program.calls) for program in made)
        stock_s = 0.0
        for (policy, kv_policy), row in rows.items():
            result = simulate(made, engine(setting, policy, kv_policy))
            counts = result.counts
            stock_s = stock_s or result.mean_latency
            row.completion.append(result.mean_latency / stock_s)
            row.again_percent.append(100 * (counts.again + counts.recomputed) / counts.prompt)
            row.fetched_percent.append(100 * counts.fetched / counts.prompt)
            row.tool_share.append(tools_s / result.mean_latency)
    return list(rows.values())


def show(rows: Sequence[Row], console: Console) -> None:
    """Print completion times ÷ stock FCFS, with the percentage of prompt tokens that were computed again, and those of
    each policy ÷ FCFS with the same KV policy."""
    by_cell = {(row.setting, row.policy, row.kv_policy): row for row in rows}
    kv_policies = list(dict.fromkeys(row.kv_policy for row in rows))
    table = Table(title="completion ÷ stock FCFS, ÷ FCFS with the same KV policy (% of prompt tokens computed again)")
    for heading in ("setting", "policy", *kv_policies):
        table.add_column(heading)
    for setting, policy in dict.fromkeys((row.setting, row.policy) for row in rows):
        cells = []
        for kv_policy in kv_policies:
            row, fcfs = by_cell.get((setting, policy, kv_policy)), by_cell.get((setting, "fcfs", kv_policy))
            if row is None:
                cells.append("")
                continue
            same = [mine / other for mine, other in zip(row.completion, fcfs.completion, strict=True)] if fcfs else []
            ratios = [spread(each) for each in (row.completion, same) if each]
            cells.append(", ".join([*ratios, f"{spread(row.again_percent, 1)} %"]))
        table.add_row(setting, policy, *cells)
    console.print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Completion times ÷ stock FCFS in each setting, by KV policy, for each scheduling policy."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"
    settings = list(dict.fromkeys(row.setting for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    kv_policies = [each for each in dict.fromkeys(row.kv_policy for row in rows) if each not in LEFT_OUT]
    medians = [statistics.median(row.completion) for row in rows if row.kv_policy in kv_policies]
    size = (2 + 3 * len(policies), 1.6 + 0.3 * len(settings))
    figure, axes = plt.subplots(1, len(policies), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for axis, policy in zip(axes[0], policies, strict=True):
        for number, kv_policy in enumerate(kv_policies):
            cells = {
                row.setting: statistics.median(row.completion)
                for row in rows
                if (row.policy, row.kv_policy) == (policy, kv_policy)
            }
            shift = 0.6 * (number / max(1, len(kv_policies) - 1) - 0.5)  # so that equal ones are seen
            heights = [height + shift for height, setting in enumerate(settings) if setting in cells]
            axis.plot(list(cells.values()), heights, "o", markersize=4, label=kv_policy)
        axis.set(title=policy, xscale="log", xlabel="completion ÷ stock FCFS", yticks=range(len(settings)))
        axis.set_yticks(range(len(settings)), settings)
        low, high = 0.9 * min(medians), 1.1 * max(medians)
        ticks = [tick for tick in (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 4, 8) if low < tick < high]
        axis.set_xlim(low, high)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.grid(axis="y", linewidth=0.3)
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.savefig(path)


def main(
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "1,2,3",
    programs: Annotated[int, typer.Option(min=10, help="Programs of mixed; the others have twice as many.")] = 100,
    only: Annotated[str, typer.Option(help="Only settings whose name contains this.")] = "",
    policies: Annotated[str, typer.Option(help="Scheduling policies, with commas.")] = ",".join(POLICIES),
    kv: Annotated[str, typer.Option(help="KV policies, with commas.")] = ",".join(KV),
    out: Annotated[Path | None, typer.Option(help="Results (.json); the plot is written next to it.")] = None,
) -> None:
    """Compare KV policies, with and without host memory."""
    settings = [setting for setting in SETTINGS if only in str(setting)]
    if not settings:
        raise typer.BadParameter(f"no setting's name contains {only!r}.")
    numbers, rows = [int(seed) for seed in seeds.split(",")], list[Row]()
    for setting in settings:
        try:
            rows += rows_of(setting, numbers, programs, policies.split(","), kv.split(","))
        except SimulationError as error:  # too few programs for the load
            typer.echo(f"{setting} is left out: {error}", err=True)
            continue
        typer.echo(setting, err=True)
        if out is not None:
            options = {"seeds": numbers, "programs": programs, "host_times": HOST_TIMES}
            results = {"options": options, "machine": machine(), "rows": [row._asdict() for row in rows]}
            out.write_text(json.dumps(results, indent=1), encoding="utf-8")
            plot(rows, out.with_suffix(".svg"))
    show(rows, Console(width=250))


if __name__ == "__main__":
    typer.run(main)
