"""Every policy on the same programs in 62 settings, compared with the best of five baselines in each.

    python benchmarks/bench_policy_grid.py --seeds 0,1,2,3,4 --jobs 2 --out policy_grid.jsonl
    python benchmarks/bench_policy_grid.py --policies learned+gate --names shuffled,unique,drifting,removed \\
        --only mixed --out policy_grid.jsonl                            # names that say nothing, or the wrong thing
    python benchmarks/bench_policy_grid.py --programs 20 --seeds 0 --only "KV 65,536, load 3"     # a look, seconds

A cell is one of six metrics in one setting (`policy_grid.py` lists both). For each cell the figure of a policy is the
geometric mean over seeds, and its ratio is to the baseline whose figure is the least there: FCFS, priority, MLFQ, PLAS
or ATLAS. Arrivals, and so loads, are those at which FCFS reaches the setting's latency on the same engine.

Each result is a line of the `--out` file as soon as it is known. A run that finds its lines there does not repeat them,
so it can be stopped and continued, and a policy can be added later. Delete the file after a change of a policy.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from common import pyplot
from policy_grid import GRID, METRICS, NAMES, Setting, play, policy_of, rate_of
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.core.policies import SIMULATED_POLICIES

BASELINES: Final = ("fcfs", "priority", "mlfq", "plas", "atlas")
POLICIES: Final = (*BASELINES, "atlas_by_program", "atlas+gate", "learned+gate", "auto", "srpt", "srpt+gate")
COMPLETION_MEAN: Final = METRICS.index("completion mean")


class Key(NamedTuple):
    """What a line of the file is about."""

    setting: str
    programs: int
    seed: int
    policy: str  # "rate": the arrival rate, in programs per second
    names: str = "true"


Figures = dict[Key, list[float]]


class Job(NamedTuple):
    """What one process does at a time: policies on the same programs and arrivals."""

    setting: Setting
    programs: int
    seed: int
    rate: float | None  # None: not known yet
    wanted: tuple[tuple[str, str], ...]  # policies, each with the names that it sees

    def run(self) -> Figures:
        rate = rate_of(self.setting, self.seed, self.programs) if self.rate is None else self.rate
        found = {self.key("rate"): [rate]}
        for policy, names in self.wanted:
            found[self.key(policy, names)] = play(
                self.setting, self.seed, self.programs, rate, policy_of(policy), names
            )
        return found

    def key(self, policy: str, names: str = "true") -> Key:
        return Key(str(self.setting), self.programs, self.seed, policy, names)


def jobs_of(
    settings: Iterable[Setting], programs: int, seeds: Sequence[int], wanted: Sequence[tuple[str, str]], known: Figures
) -> Iterator[Job]:
    """The jobs whose results are not known."""
    for setting in settings:
        for seed in seeds:
            job = Job(setting, programs, seed, None, ())
            missing = tuple(each for each in wanted if job.key(*each) not in known)
            if missing:
                rate = known.get(job.key("rate"))
                yield job._replace(rate=rate[0] if rate else None, wanted=missing)


def read(path: Path) -> Figures:
    """The results of an earlier run. A last line that was cut off is ignored."""
    found: Figures = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[Key(*row["key"])] = row["figures"]
    return found


def run(jobs: Sequence[Job], processes: int, out: Path | None, known: Figures, progress: Progress) -> None:
    """Run jobs, and add their results to the file and to `known`."""
    task = progress.add_task("simulations", total=sum(len(job.wanted) for job in jobs))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(job.run): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            found = future.result()
            progress.update(task, advance=len(job.wanted), description=str(job.setting))
            known |= found
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps({"key": key, "figures": each}) + "\n" for key, each in found.items())


# -- what comes out


class Cells:
    """The figures of policies in each cell: geometric means over seeds."""

    def __init__(self, figures: Figures, settings: Sequence[Setting], programs: int, seeds: Sequence[int]) -> None:
        self._figures, self._settings, self._programs, self._seeds = figures, settings, programs, seeds

    def of(self, policy: str, names: str = "true") -> dict[tuple[str, str], float]:
        """The figure in each cell, by setting and metric."""
        found = {}
        for setting in map(str, self._settings):
            rows = [self._figures[Key(setting, self._programs, seed, policy, names)] for seed in self._seeds]
            for number, metric in enumerate(METRICS):
                found[setting, metric] = statistics.geometric_mean([row[number] for row in rows])
        return found

    def to_best(self, policy: str, names: str = "true") -> dict[tuple[str, str], float]:
        """The ratio to the best baseline in each cell."""
        baselines = [self.of(name) for name in BASELINES]
        return {cell: value / min(each[cell] for each in baselines) for cell, value in self.of(policy, names).items()}

    def to_fcfs(self, policy: str, names: str = "true") -> dict[tuple[str, str], float]:
        """The ratio to FCFS in each cell."""
        fcfs = self.of("fcfs")
        return {cell: value / fcfs[cell] for cell, value in self.of(policy, names).items()}


def summarised(cells: Cells, wanted: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """For each policy: the geometric mean to the best baseline, the worst cell, and the worst mean completion time."""
    rows = []
    for policy, names in wanted:
        ratios, fcfs = cells.to_best(policy, names), cells.to_fcfs(policy, names)
        means = {setting: ratio for (setting, metric), ratio in fcfs.items() if metric == METRICS[COMPLETION_MEAN]}
        worst, slowest = max(ratios, key=ratios.__getitem__), max(means, key=means.__getitem__)
        rows.append(
            {
                "policy": policy,
                "names": names,
                "to_best": statistics.geometric_mean(ratios.values()),
                "within_5_percent": statistics.fmean(ratio <= 1.05 for ratio in ratios.values()),
                "worst": ratios[worst],
                "worst_cell": ", ".join(worst),
                "completion_to_fcfs": statistics.geometric_mean(means.values()),
                "worst_completion_to_fcfs": means[slowest],
                "worst_completion_setting": slowest,
            }
        )
    return rows


def show(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """Print the summary."""
    table = Table(title="ratios to the best baseline in each cell, and of mean completion time to FCFS")
    for heading in ("policy", "names", "÷ best", "≤ 1.05", "worst", "in", "completion ÷ FCFS", "worst", "in"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            *(row["policy"], row["names"], f"{row['to_best']:.3f}", f"{row['within_5_percent']:.0%}"),
            *(f"{row['worst']:.2f}", row["worst_cell"], f"{row['completion_to_fcfs']:.2f}"),
            *(f"{row['worst_completion_to_fcfs']:.2f}", row["worst_completion_setting"]),
        )
    console.print(table)


def show_cells(cells: Cells, settings: Sequence[Setting], wanted: Sequence[tuple[str, str]], console: Console) -> None:
    """Print each setting: ratios to FCFS, and the best baseline's."""
    table = Table(title="÷ FCFS: per token mean p95 p99; completion mean p95 p99")
    for heading in ("setting", "policy", *METRICS):
        table.add_column(heading)
    baselines = [cells.to_fcfs(name) for name in BASELINES]
    best = {cell: min(each[cell] for each in baselines) for cell in baselines[0]}
    columns = {"best baseline": best, **{" ".join(each).removesuffix(" true"): cells.to_fcfs(*each) for each in wanted}}
    for setting in map(str, settings):
        for name, found in columns.items():
            table.add_row(setting, name, *(f"{found[setting, metric]:.2f}" for metric in METRICS))
        table.add_section()
    console.print(table)


def plot(cells: Cells, wanted: Sequence[tuple[str, str]], path: Path) -> None:
    """For each policy, the share of cells in which it is within a factor of the best baseline."""
    plt = pyplot()
    plt.rcParams["svg.fonttype"] = "none"  # text that is not drawn as curves makes a smaller file
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for policy, names in wanted:
        ratios = sorted(cells.to_best(policy, names).values())
        shares = [100 * (number + 1) / len(ratios) for number in range(len(ratios))]
        label = policy if names == "true" else f"{policy}, names {names}"
        axis.step(ratios, shares, where="post", label=label, linewidth=2.2 if policy.startswith("learned") else 1.2)
    ticks = [0.25, 0.5, 1, 2, 4, 8, 16]
    axis.set(xscale="log", xlim=(0.25, 16), ylim=(0, 100))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set(xlabel="ratio to the best baseline of the cell", ylabel="cells at or below it, %")
    axis.legend()
    figure.savefig(path)


def _list(value: str, what: str, choices: Sequence[str]) -> list[str]:
    items = [item for item in value.split(",") if item]
    unknown = [item for item in items if item not in choices]
    if unknown or not items:
        raise typer.BadParameter(f"{what} {unknown} are none of {', '.join(choices)}.")
    return items


def main(
    policies: Annotated[str, typer.Option(help="Policies, with commas; +gate puts one behind the gate.")] = ",".join(
        POLICIES
    ),
    names: Annotated[str, typer.Option(help=f"Names that the policies see, with commas: {', '.join(NAMES)}.")] = "true",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0,1,2",
    programs: Annotated[int, typer.Option(min=10, help="Programs of mixed; the others have multiples of it.")] = 200,
    only: Annotated[str, typer.Option(help="Only settings whose name contains this.")] = "",
    cells: Annotated[bool, typer.Option("--cells", help="Print every cell.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Results, a line each (.jsonl); summary and plot are written next to it.")
    ] = None,
) -> None:
    """Compare policies over the grid, and print how far each is from the best baseline."""
    settings = [setting for setting in GRID if only in str(setting)]
    if not settings:
        raise typer.BadParameter(f"no setting's name contains {only!r}.")
    known_policies = [name + gate for name in SIMULATED_POLICIES for gate in ("", "+gate")]
    chosen = _list(policies, "policies", known_policies)
    shown = [(policy, each) for policy in chosen for each in _list(names, "names", NAMES)]
    numbers = [int(seed) for seed in seeds.split(",")]
    wanted = list(dict.fromkeys([*((name, "true") for name in BASELINES), *shown]))
    figures = read(out) if out is not None else {}
    console = Console(width=180)
    with Progress(console=Console(stderr=True)) as progress:
        run(list(jobs_of(settings, programs, numbers, wanted, figures)), jobs, out, figures, progress)
    found = Cells(figures, settings, programs, numbers)
    rows = summarised(found, shown)
    if cells:
        show_cells(found, settings, shown, console)
    show(rows, console)
    if out is not None:
        options = {"seeds": numbers, "programs": programs, "settings": len(settings), "metrics": METRICS}
        out.with_suffix(".json").write_text(json.dumps({"options": options, "summary": rows}, indent=1))
        plot(found, shown, out.with_suffix(".svg"))


if __name__ == "__main__":
    typer.run(main)
