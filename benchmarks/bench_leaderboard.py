"""The default beside every rival in 64 settings, in simulation. `make results` writes its page so.

    python benchmarks/bench_leaderboard.py --data TRACES                       # hours
    python benchmarks/bench_leaderboard.py --data TRACES --programs 24 --few --only "KV 500,000"   # minutes

TRACES has what was downloaded: `weka` (sessions of kv-cache-tester, a file each), `tau-bench`, `bfcl` and `mooncake`.
What is not there is left out. A cell is one rival in one setting with one seed. It is a line of a file for the commit
of the measured code as soon as it is known, and is not computed again at this commit. So a run can be stopped and
continued. Cells of code with changes that are not committed are forgotten at the next start.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from leaderboard_page import PAGE, Cells, write_page
from leaderboard_settings import SETTINGS, Data, Part, Setting, arrived
from result_ages import ROOT, SIMULATED, git
from rich.console import Console
from rich.progress import Progress

from weft.core.sim import simulate
from weft.core.sim.study.leaderboard import DEFAULT, Rival, rivals, score

MEASURED: Final = (*SIMULATED, "core/prediction", "benchmarks/leaderboard_settings.py")
_ALL: Final = rivals(host=True)
# In this order: those that say most, then the other policies, and last those that know the future, which take longest.
FEW: Final = tuple(each for each in _ALL if each.is_plain or each in {DEFAULT, DEFAULT.without_host()})
ORACLES: Final = tuple(each for each in _ALL if each.is_oracle)
WAVES: Final = (FEW, tuple(each for each in _ALL if each not in FEW + ORACLES), ORACLES)


class Cell(NamedTuple):
    """One simulation."""

    setting: Setting
    rival: Rival
    programs: int  # of the mixed workload
    seed: int
    data: Data

    @property
    def key(self) -> str:
        """What a line of the file is about."""
        return f"{self.setting}, {self.programs} programs, {self.data.part} {self.seed}: {self.rival.name}"

    def run(self) -> dict[str, float]:
        """The figures by name."""
        programs, alone_s = arrived(self.setting, self.data, self.programs, self.seed)
        result = simulate(programs, self.rival.settings(self.setting.engine))
        return score(self.rival, result, programs, alone_s).measures


def measured_commit() -> str:
    """The last commit that changed the measured code; with a + if it has changes that are not committed."""
    commit = git(ROOT, "log", "-1", "--format=%h", "--abbrev=7", "--", *MEASURED)
    return f"{commit}{'+' if git(ROOT, 'status', '--porcelain', '--', *MEASURED) else ''}"


def read_cells(path: Path) -> dict[str, dict[str, float]]:
    """The figures of earlier runs, by key. A last line that was cut off is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["key"]] = row["figures"]
    return found


def run(cells: Sequence[Cell], jobs: int, path: Path, console: Console) -> None:
    """Simulate cells, and add each to the file as soon as it is known."""
    with Progress(console=console) as progress, path.open("a", encoding="utf-8") as file:
        task = progress.add_task("simulations", total=len(cells))
        for cell, figures in zip(cells, _figures(cells, jobs), strict=True):
            file.write(f"\n{json.dumps({'key': cell.key, 'figures': figures})}")
            file.flush()
            progress.update(task, advance=1, description=str(cell.setting))


def _figures(cells: Sequence[Cell], jobs: int) -> Iterator[dict[str, float]]:
    if jobs == 1:
        yield from map(Cell.run, cells)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(Cell.run, cells)


def main(
    data: Annotated[Path, typer.Option(help="The folder with recorded programs.")] = Path("build/traces"),
    out: Annotated[Path, typer.Option(help="The folder for cells and imported traces.")] = Path("build/results"),
    page: Annotated[Path, typer.Option(help="The page whose tables are written, and its picture.")] = PAGE,
    programs: Annotated[int, typer.Option(min=4, help="Programs of mixed; the others have multiples of it.")] = 40,
    seeds: Annotated[int, typer.Option(min=1, help="How many samples of programs.")] = 1,
    few: Annotated[bool, typer.Option("--few", help="Only the plain rivals and the default, which is quick.")] = False,
    only: Annotated[str, typer.Option(help="Only settings whose name contains this.")] = "",
    part: Annotated[Part, typer.Option(help="Which half of the recorded programs, and which seeds.")] = "reporting",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
) -> None:
    """Simulate what is not known yet, and write the page."""
    console = Console(stderr=True)
    commit = measured_commit()
    folder = out / commit
    folder.mkdir(parents=True, exist_ok=True)
    source = Data(data, folder / "traces", part)
    settings = [each for each in SETTINGS if only in str(each) and source.has(each.source)]
    if not settings:
        raise typer.BadParameter(f"no setting's name contains {only!r}, or {data} has no programs for those that do.")
    wanted = [
        Cell(setting, rival, programs, seed, source)
        for wave in (WAVES[:1] if few else WAVES)
        for setting in settings
        for seed in range(seeds)
        for rival in wave
    ]
    path = folder / "cells.jsonl"
    if commit.endswith("+"):
        path.unlink(missing_ok=True)
    known = read_cells(path)
    missing = [cell for cell in wanted if cell.key not in known]
    console.print(f"{commit}: {len(wanted)} cells, of which {len(missing)} are not known yet")
    try:
        run(missing, jobs, path, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
    known = read_cells(path)
    found: Cells = {}
    for cell in wanted:
        if cell.key in known:
            found.setdefault((cell.setting, cell.seed), {})[cell.rival] = known[cell.key]
    write_page(page, found, commit.removesuffix("+"), len(wanted))
    console.print(f"{page}: {sum(map(len, found.values()))} cells of {len(wanted)}")


if __name__ == "__main__":
    typer.run(main)
