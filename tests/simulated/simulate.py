"""Lives of an engine in simulation, one for each seed; or, as in the second line, one again with a timeline.

PYTHONPATH=tests/support:tests/simulated:tests/fuzz python tests/simulated/simulate.py --seeds 1000
PYTHONPATH=tests/support:tests/simulated:tests/fuzz python tests/simulated/simulate.py --seed 8412 --trace
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from simulated_life import Fault, Life

from weft.core.show.perfetto import perfetto
from weft.core.show.program_timeline import timeline

FOLDER = Path("build/simulated")


def main(
    seed: Annotated[int, typer.Option(min=0, help="The seed of the life, or of the first one.")] = 0,
    seeds: Annotated[int, typer.Option(min=0, help="How many lives; 0: the seed's, with all that is known of it.")] = 0,
    trace: Annotated[bool, typer.Option(help="Write the life's events and its timeline.")] = False,
) -> None:
    """Live, print a line for each life that went wrong, and fail if any did."""
    quiet()
    console = Console(soft_wrap=True, markup=False, highlight=False)
    sys.exit(bool(many(seed, seeds, console) if seeds else again(seed, console, trace=trace)))


def quiet() -> None:
    """Log no deaths of replicas, and collect garbage only at the end of a life."""
    logging.disable(logging.WARNING)  # replicas die all the time
    logging.getLogger("vllm").disabled = True
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("vllm"):
            logging.getLogger(name).disabled = True
    gc.collect()
    gc.freeze()  # what has been imported stays
    gc.disable()  # each life collects at its end, so that nothing depends on when


def many(first: int, count: int, console: Console) -> list[int]:
    """Live many lives. Returns the seeds of those that went wrong."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    done: Counter[str] = Counter()
    wrong: list[int] = []
    begin_s = time.monotonic()
    for number, seed in enumerate(range(first, first + count), 1):
        life = Life(seed)
        if life.run():
            wrong.append(seed)
            console.print(f"seed {seed} at commit {commit.stdout.strip()}: {life.problems[0]}")
        done.update(life.faults.happened)
        if number % 100 == 0 or number == count:
            an_hour = number / (time.monotonic() - begin_s) * 3600
            console.print(f"{number} of {count} lives, {an_hour:,.0f} an hour; {len(wrong)} went wrong; {dict(done)}")
    return wrong


def again(seed: int, console: Console, *, trace: bool) -> list[str]:
    """Live one life, say what it was, and if it goes wrong, which faults it needs for that. Returns its problems."""
    events: list[str] = []
    life = Life(seed, trace=events.append)
    problems = life.run()
    console.print(f"seed {seed}: {life.world.turns} events in {life.world.now_s:.1f} s, digest {life.world.digest}")
    for fault in life.planned:
        console.print(f"  before event {fault.turn}: {fault.kind}")
    for problem in problems:
        console.print(problem)
    if problems and life.planned:
        needed = shrunk(seed, life.planned)
        console.print(
            f"it needs {', '.join(f'{fault.kind} before event {fault.turn}' for fault in needed) or 'no fault'}"
        )
    if trace:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{seed}.txt").write_text("\n".join(events))
        (FOLDER / f"{seed}.json").write_text(json.dumps(_timeline(life, events)))
        console.print(f"{FOLDER}/{seed}.txt has its events, and {FOLDER}/{seed}.json opens in https://ui.perfetto.dev")
    return problems


def shrunk(seed: int, faults: Sequence[Fault]) -> list[Fault]:
    """As few of the faults as the life needs to go wrong. One after the other is left out."""
    needed = list(faults)
    for fault in faults:
        fewer = [each for each in needed if each is not fault]
        if Life(seed, fewer).run():
            needed = fewer
    return needed


def _timeline(life: Life, events: Sequence[str]) -> dict[str, Any]:
    """The programs, and what happened to replicas, as Perfetto reads it."""
    graphs = list(life.witness.graphs.values())
    shown = perfetto((timeline(graph, start_s=0.0), 0.0) for graph in graphs)
    shown["traceEvents"] += _marks(events, pid=len(graphs) + 1)
    return shown


def _marks(events: Sequence[str], pid: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "faults, replicas, clients"}}
    for line in events:
        _, at_s, text = line.split(" ", 2)
        if not text.startswith(("outside:", "engine:", "users:")):
            tid = 1 if text.startswith("fault") else 2
            yield {
                "ph": "i",
                "s": "t",
                "name": text,
                "pid": pid,
                "tid": tid,
                "ts": round(float(at_s) * 1e6),
                "cat": "event",
            }


if __name__ == "__main__":
    typer.run(main)
