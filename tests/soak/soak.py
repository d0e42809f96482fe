"""Hours of clients of every kind on one engine, whose memory must stay flat and whose tables must be empty at the end.

    make soak HOURS=4 SEED=0

The folder gets `samples.jsonl` (a line every few seconds), `report.json`, `rss.svg` and `trace.jsonl`, the recording.
The exit code is 0 if all figures are flat, all tables are empty, and every call ended with a result or a typed error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from soak_judge import WARM_UP

if TYPE_CHECKING:  # the engine's processes import this file again, and need none of it
    from rich.console import Console
    from soak_samples import Meter
    from soak_tally import Tally

    import weft

IDLE_TIMEOUT_S = 20.0
GRACE_S = 180.0  # for the calls under way and for programs whose client has left, when the clients stop


def main(
    hours: Annotated[float, typer.Option(min=0.02, help="How long the clients run.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of what the clients do.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="How many clients run at once.")] = 8,
    every_s: Annotated[float, typer.Option(min=0.5, help="Seconds between two samples.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Folder of the results; samples of an earlier soak are replaced.")] = Path(
        "build/soak"
    ),
) -> None:
    """Run the clients, sample, judge, report."""
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "PYTHONWARNINGS": "ignore"}
    import psutil
    from rich.console import Console
    from soak_samples import Meter, table_sizes
    from threads import one_thread
    from tiny_engine import ENGINE_ARGS, make_tiny_llama

    import weft

    logging.getLogger("weft").setLevel(logging.ERROR)  # hostile ids cause warnings
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("samples.jsonl", "trace.jsonl"):
        (out / name).unlink(missing_ok=True)
    # Small caches, which are full before the warm-up ends; four slots, so that calls wait and are preempted.
    arguments: dict[str, Any] = {**ENGINE_ARGS, "max_model_len": 2048, "kv_cache_memory_bytes": 32 << 20}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        with console.status("starting an engine"), one_thread():
            engine = weft.Engine(model, swap=weft.SwapConfig(space_gib=1 / 32), record=out / "trace.jsonl", **arguments)
        with engine:
            meter = Meter(psutil.Process(), lambda: table_sizes(engine))
            soak = Soak(engine, meter, out / "samples.jsonl", every_s)
            problems = asyncio.run(soak.run(hours, seed, clients, console))
    sys.exit(report(out, soak.tally, problems, {"hours": hours, "seed": seed, "clients": clients}, console))


class Soak:
    """The clients of one engine, and the samples that are taken meanwhile.

    Args:
        engine: The engine.
        meter: Reads the engine's processes.
        samples: The file that gets a line for each sample.
        every_s: Seconds between two samples.
    """

    def __init__(self, engine: weft.Engine, meter: Meter, samples: Path, every_s: float) -> None:
        from soak_tally import Tally

        self.tally = Tally()
        self._engine = engine
        self._meter = meter
        self._samples = samples
        self._every_s = every_s

    async def run(self, hours: float, seed: int, clients: int, console: Console) -> list[str]:
        """Run the clients, then wait until all they left behind is gone.

        Returns:
            What is not as it should be at the end.
        """
        from soak_clients import Client

        stop = asyncio.Event()
        makers = [
            Client(self._engine, random.Random(f"{seed}/{number}"), self.tally, IDLE_TIMEOUT_S)
            for number in range(clients)
        ]
        tasks = {asyncio.create_task(client.run(stop)): client for client in makers}
        await self._sample_for(hours * 3600, console)
        stop.set()
        with console.status("waiting for the calls under way, and for programs whose client has left"):
            _, late = await asyncio.wait(tasks, timeout=GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)
            left = await self._wait_until_empty()
        problems = [f"a client did not stop within {GRACE_S:.0f} s: {tasks[task].doing}" for task in late]
        problems += [f"{count} {what} are left" for what, count in left.items() if count]
        if self.tally.open_calls:
            problems.append(f"{self.tally.open_calls} calls never ended")
        if self.tally.failed:
            problems.append(f"{self.tally.failed} calls or programs failed with an error that is not Weft's")
        return problems

    async def _sample_for(self, duration_s: float, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        start_s = time.monotonic()
        with Progress(*columns, console=console) as progress, self._samples.open("w") as file:
            bar = progress.add_task("", total=duration_s)
            while (now_s := time.monotonic() - start_s) < duration_s:
                sample = self._meter.sample(self.tally.ended.total())
                file.write(json.dumps(sample) + "\n")
                file.flush()
                memory = " ".join(f"{name} {mb:.0f}" for name, mb in sample["rss_mb"].items())
                rows = sample["tables"]["rows"]
                text = f"{sample['calls']} calls, {rows} rows, MB: {memory}, {self.tally.failed} failed"
                progress.update(bar, completed=now_s, description=text)
                await asyncio.sleep(self._every_s)
            progress.update(bar, completed=duration_s)

    async def _wait_until_empty(self) -> dict[str, int]:
        """Wait until all tables are empty, or the grace is over. Returns their sizes."""
        import gc

        from soak_samples import table_sizes

        deadline_s = time.monotonic() + GRACE_S
        while any((sizes := table_sizes(self._engine)).values()) and time.monotonic() < deadline_s:
            gc.collect()
            await asyncio.sleep(1)
        sizes["programs in the scheduler"] = await self._remembered_programs()
        return sizes

    async def _remembered_programs(self) -> int:
        """How many of the programs that ended last the scheduler still knows: it is told of every end."""
        from weft.engine.vllm_compat.control import send_to_scheduler
        from weft.engine.wire.control import ProgramsEnded, encode_control

        ended = tuple(row.info.program_id for row in self._engine.table.ended())
        message = encode_control(ProgramsEnded(ended))
        answer = self._engine._loop.submit(send_to_scheduler(self._engine._llm, message))
        return int((await asyncio.wrap_future(answer))["ended"])


def report(
    out: Path,
    tally: Tally,
    problems: list[str],
    settings: dict[str, Any],
    console: Console,
    *,
    warm_up: float = WARM_UP,
) -> int:
    """Judge the samples after the warm-up, print and write the report, draw the plot. Returns the exit code."""
    from rich.table import Table
    from soak_samples import judge_samples, plot, read_samples

    samples = read_samples(out / "samples.jsonl")
    verdicts = judge_samples(samples, warm_up)
    problems = [*problems, *(f"{name} is not flat" for name, verdict in verdicts.items() if not verdict.is_flat)]
    table = Table(title=f"{samples[-1]['calls']} calls in {samples[-1]['at_s'] / 3600:.2f} hours")
    for heading in ("", "start", "end", "an hour", "growth", "allowed"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, verdict in verdicts.items():
        table.add_row(name, *(f"{figure:.1f}" for figure in verdict), style=None if verdict.is_flat else "red")
    console.print(table)
    console.print(", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common()))
    for failure in tally.failures:
        console.print(failure, markup=False)
    plot(samples, out / "rss.svg")
    found = {
        **settings,
        "calls": dict(tally.ended),
        "outcomes": dict(tally.outcomes),
        "failures": tally.failures,
        "problems": problems,
        "figures": {name: {**verdict._asdict(), "flat": verdict.is_flat} for name, verdict in verdicts.items()},
    }
    (out / "report.json").write_text(json.dumps(found, indent=1))
    for problem in problems:
        console.print(f"[red]{problem}")
    console.print(f"{'failed' if problems else 'passed'}: {out}/report.json, {out}/rss.svg")
    return 1 if problems else 0


if __name__ == "__main__":
    typer.run(main)
