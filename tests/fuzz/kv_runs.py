"""Random programs on the scheduler with host memory (`tests/support/kv_fuzz.py`), one run for each seed.

PYTHONPATH=tests/support python tests/fuzz/kv_runs.py --runs 10000
PYTHONPATH=tests/support python tests/fuzz/kv_runs.py --first 77 --runs 1   # one of them again
"""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def main(
    runs: Annotated[int, typer.Option(min=1, help="How many runs, each with a seed of its own.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Print the counts after so many runs.")] = 100,
) -> None:
    """Play runs, print what they did, and fail if any found an error."""
    from kv_fuzz import Run

    logging.disable(logging.CRITICAL)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    done: Counter[str] = Counter()
    findings: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + runs):
            run = Run(Path(folder), seed)
            try:
                run.play()
            except Exception:
                findings.append(seed)
                console.print(f"seed {seed}: {run.config}\n{traceback.format_exc(limit=-4)}")
            done.update(run.done, runs=1)
            if done["runs"] % every == 0 or done["runs"] == runs:
                console.print(f"{dict(done)}; findings: {findings}")
    sys.exit(bool(findings))


if __name__ == "__main__":
    typer.run(main)
