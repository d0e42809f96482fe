"""Which results are older than the code that they measure.

    make result-ages
    python benchmarks/result_ages.py --all  # those with no change since as well

Each section of a page in docs/results that has measured figures says "Made at 1a2b3c4.": the commit at which they were
measured, or for figures from before 25 November 2026 the commit that brought them to the page. `MEASURES` has the code
that they depend on. A change of that code need not change the figures; it means that nobody has looked since.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = Path("docs/results")
SIMULATED: Final = ("core/sim", "core/policies", "core/kv_cache", "core/trace/workloads.py")
LIVE: Final = ("engine/scheduler", "engine/kv_cache", "core/policies", "core/kv_cache", "src/weft/bench")
# By page: what its figures depend on, under "", and what those of single sections do.
MEASURES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "advice.md": {"": (*LIVE, "core/sim")},
    "balancers.md": {
        "": (*SIMULATED, "core/routing"),
        "On real engines": ("core/routing", "engine/replicas", "benchmarks/bench_balancer.py"),
        "What a move costs": ("engine/replicas", "engine/kv_cache"),
        "Programs that move under load": ("engine/replicas", "engine/kv_cache", "core/routing"),
    },
    "clients.md": {"": ("core/identity", "engine/serve", "tests/clients")},
    "coding-sessions.md": {"": SIMULATED, "On a real engine": LIVE},
    "fair-share.md": {"": SIMULATED, "Cost": ("engine/scheduler", "core/policies"), "On a real engine": LIVE},
    "forecast.md": {
        "": ("core/prediction", "core/trace"),
        "Would `fair` gain from it?": SIMULATED,
        "Would a KV cache gain from it?": (*SIMULATED, "core/prediction"),
    },
    "kv-policies.md": {
        "": SIMULATED,
        "On real engines": LIVE,
        "One schedule()": ("engine/scheduler", "engine/kv_cache", "core/kv_cache"),
        "How well the times of tools are covered": ("core/prediction",),
        "Host memory on a real engine": ("engine/scheduler", "engine/kv_cache", "core/kv_cache"),
    },
    "leaderboard.md": {"": (*SIMULATED, "core/prediction")},
    "learned.md": {"": SIMULATED},
    "lineage.md": {"": ("core/identity",)},
    "real-engine.md": {"": LIVE, "Over HTTP": ("engine/serve", "engine/scheduler", "benchmarks/bench_http.py")},
    "reproduction.md": {"": SIMULATED, "Where the time of a call goes": LIVE},
    "scale.md": {"": ("core/process_table.py", "core/routing", "core/identity", "core/policies/fair_shares")},
    "serve-overhead.md": {"": ("engine/serve", "engine/scheduler", "engine/watch")},
    "simulation.md": {"": SIMULATED},
    "swap-kernel.md": {"": ("csrc", "engine/kv_cache/kernel.py"), "On a GPU": ("csrc/swap_cuda.cu", "csrc/swap_way.h")},
    "where-atlas-loses.md": {"": SIMULATED},
    "wide-programs.md": {"": ("core/program", "core/policies", "core/prediction", "engine/host")},
}
# Sections of reproduction.md whose tables put the figures of other sections next to the papers' claims.
SUMMARIES: Final = ("The papers' tables and figures", "Autellix", "Astraea", "SAGA")

_MADE: Final = re.compile(r"[Mm]ade at ((?:[0-9a-f]{7}(?:, | and )?)+)")
_FENCED: Final = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
_MOST_DIGITS_OF_WORDS: Final = 5  # a row of a table with more digits is a row of figures


class Section(NamedTuple):
    """A section of a page of results."""

    page: str
    heading: str
    commits: tuple[str, ...]  # at which its figures were made
    has_figures: bool

    @property
    def paths(self) -> tuple[str, ...]:
        """The code that its figures depend on."""
        by_heading = MEASURES[self.page]
        return by_heading.get(self.heading, by_heading[""])


def sections(results: Path) -> Iterator[Section]:
    """The sections of all pages of results, in the order of the pages' names."""
    for page in sorted(results.glob("*.md")):
        parts = re.split(r"^#+ (.+)\n", _FENCED.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
        for heading, text in zip(parts[1::2], parts[2::2], strict=True):
            commits = [commit for found in _MADE.findall(text) for commit in re.findall(r"[0-9a-f]{7}", found)]
            rows = (line.split("|", 2)[-1] for line in text.splitlines() if line.startswith("|"))
            has_figures = any(sum(map(str.isdigit, row)) > _MOST_DIGITS_OF_WORDS for row in rows)
            yield Section(page.name, heading, tuple(dict.fromkeys(commits)), has_figures)


def git(root: Path, *arguments: str) -> str | None:
    """What a command of git prints, or None if it fails."""
    command = ["git", *arguments]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)  # noqa: S603  fixed commands
    return None if found.returncode else found.stdout.strip()


def changes(commit: str, paths: Sequence[str], root: Path) -> dict[str, int] | None:
    """For each path that has changed since a commit, how many commits have changed it; None in a clone without it."""
    if git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    counts = {path: int(git(root, "rev-list", "--count", f"{commit}..HEAD", "--", path) or 0) for path in paths}
    return {path: count for path, count in counts.items() if count}


def listing(root: Path = ROOT, *, everything: bool = False) -> list[tuple[str, str, str, str]]:
    """Page, section, commit, and what has changed since, for each result that is older than its code.

    Args:
        root: A clone of the repository.
        everything: Also list the results whose code has not changed since.
    """
    rows = []
    for section in sections(root / RESULTS):
        for commit in section.commits:
            found = changes(commit, section.paths, root)
            if found is None:
                since = "unknown: this clone lacks the commit"
            elif found:
                since = ", ".join(f"{path} {count}" for path, count in found.items())
            elif everything:
                since = "nothing"
            else:
                continue
            rows.append((section.page, section.heading, commit, since))
    return rows


def main(
    *, everything: Annotated[bool, typer.Option("--all", help="Also list results whose code has not changed.")] = False
) -> None:
    """List the results that are older than the code that they measure."""
    table = Table(title="results that are older than the code that they measure", box=None)
    for heading in ("page", "section", "made at", "commits since then, by folder"):
        table.add_column(heading)
    for row in listing(everything=everything):
        table.add_row(*row)
    Console(width=160, soft_wrap=True).print(table)


if __name__ == "__main__":
    typer.run(main)
