"""What a KV policy and host memory cost where the KV cache holds everything, on real engines.

    python benchmarks/bench_kv_plenty.py --out bench_kv_plenty.json              # the tiny model
    python benchmarks/bench_kv_plenty.py --model embedded --programs 12 --rate 0.3   # SmolLM2-135M, ten minutes

The engines of all baselines serve the same programs in this process, one step of each in turn, as in `weft bench`. Here
a step's parts are timed as well. Nothing has to be saved, so all that a baseline takes more than stock is its cost.
*CPU* is the time of the thread that steps the engines and runs the model, which other processes disturb less.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.bench.engines import BaselineEngines
from weft.bench.load import rate_name
from weft.bench.settings import BenchSettings
from weft.bench.stepper import Stepper

BASE: Final = "stock-fcfs"
BASELINES: Final = (BASE, "stock-again", "fcfs", "fcfs+next-use", "fcfs-swap", "fcfs-swap+next-use")
PARTS: Final = ("schedule", "prepare", "model", "update", "step")


class Timer:
    """CPU and elapsed seconds of the parts of one engine's steps."""

    def __init__(self, engine: Stepper) -> None:
        self.cpu_s = dict.fromkeys(PARTS, 0.0)
        self.step_cpu_s: list[float] = []
        self.step_s: list[float] = []
        core = engine._engine.engine_core.engine_core  # noqa: SLF001
        scheduler = core.scheduler
        scheduler.schedule = self._timed("schedule", scheduler.schedule)
        scheduler.get_grammar_bitmask = self._timed("prepare", scheduler.get_grammar_bitmask)
        scheduler.update_from_output = self._timed("update", scheduler.update_from_output)
        for name in ("execute_model", "sample_tokens"):
            setattr(core.model_executor, name, self._timed("model", getattr(core.model_executor, name)))
        self._step = engine._engine.step  # noqa: SLF001
        engine._engine.step = self._timed_step  # noqa: SLF001

    def reset(self) -> None:
        """Forget what was measured."""
        self.cpu_s.update(dict.fromkeys(PARTS, 0.0))
        self.step_cpu_s.clear()
        self.step_s.clear()

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            result = method(*args, **kwargs)
            self.cpu_s[part] += time.thread_time() - began_s
            return result

        return timed

    def _timed_step(self) -> Any:
        began_cpu_s, began_s = time.thread_time(), time.perf_counter()
        result = self._step()
        self.step_s.append(time.perf_counter() - began_s)
        self.step_cpu_s.append(time.thread_time() - began_cpu_s)
        self.cpu_s["step"] += self.step_cpu_s[-1]
        return result


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with other programs.")] = 3,
    programs: Annotated[int, typer.Option(min=1, help="Programs in a round.")] = 60,
    rate: Annotated[float, typer.Option(help="Programs a second.")] = 0.7,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV cache holds.")] = 26_112,
    source: Annotated[str, typer.Option(help="Workload or trace.")] = "tools",
    model: Annotated[str, typer.Option(help="tiny, embedded, or a folder in Hugging Face format.")] = "tiny",
    only: Annotated[str, typer.Option(help="Baselines to measure next to stock, with commas.")] = ",".join(BASELINES),
) -> None:
    """Measure, print a table, and write JSON."""
    names = tuple(dict.fromkeys([BASE, *only.split(",")]))
    settings = BenchSettings(source, programs=programs, baselines=names, kv_tokens=kv_tokens, model=model)
    console = Console(width=120)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        with console.status("starting engines"):
            engines = BaselineEngines(settings, Path(folder), lambda: None)
        timers = {name: Timer(engine) for name, engine in engines._engines.items()}  # noqa: SLF001
        for number in track(range(rounds), "measuring", console=console, transient=True):
            for timer in timers.values():
                timer.reset()
            round_ = engines.replay(rate_name(rate), number, lambda: None)
            for name, timer in timers.items():
                steps = len(timer.step_s)
                results[name].append(
                    {f"{part}_us": 1e6 * timer.cpu_s[part] / steps for part in PARTS}
                    | {
                        "steps": steps,
                        "median_cpu_us": 1e6 * statistics.median(timer.step_cpu_s),
                        "median_us": 1e6 * statistics.median(timer.step_s),
                        "mean_us": 1e6 * statistics.fmean(timer.step_s),
                        "recomputed_tokens": round_.measurements[name].counts.recomputed_tokens,
                    }
                )
    table = Table(title="microseconds of a step, medians over rounds; in brackets the ratio to stock, round by round")
    headings = (*(f"{part}_us" for part in PARTS), "median_cpu_us", "mean_us", "median_us")
    for heading in ("baseline", "steps", *headings):
        table.add_column(heading.removesuffix("_us").replace("_", " "), justify="right")
    for name, rows in results.items():
        cells = [str(int(rows[0]["steps"]))]
        for key in headings:
            text = f"{statistics.median(row[key] for row in rows):.0f}"
            if key in ("step_us", "median_cpu_us", "mean_us", "median_us"):
                ratios = [row[key] / base[key] for row, base in zip(rows, results[BASE], strict=True)]
                text += f" ({statistics.median(ratios):.2f}: {min(ratios):.2f}-{max(ratios):.2f})"
            cells.append(text)
        table.add_row(name, *cells)
    console.print(table)
    if out is not None:
        sizes = {
            "rounds": rounds,
            "programs": programs,
            "rate": rate,
            "kv_tokens": kv_tokens,
            "source": source,
            "model": model,
        }
        out.write_text(json.dumps({"machine": machine(), "settings": sizes, "results": results}, indent=1))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        typer.run(main)
