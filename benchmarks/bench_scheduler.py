"""Time of one `schedule()`: Weft compared with stock vLLM, first come first served and priority. No model is needed.

    python benchmarks/bench_scheduler.py --out bench_scheduler.json

The baselines step alternately (A B C A B C ...), so that other load on the machine affects all of them alike. The
result is the ratio of medians. Every step decodes one token for each running request, and no request ends. For Weft's
scheduler, steps are 20 ms apart, whatever this machine takes for them. The requests belong to 1,000 programs of 1,000
names, and under fair to 32 tenants. Learned policies know from a history what programs of each name need.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from common import machine, pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.core.policies.history import ModelHistory, ProgramEnd
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm_compat.names import (
    AsyncScheduler,
    ModelRunnerOutput,
    Request,
    SamplingParams,
    get_request_block_hasher,
    init_none_hash,
    sha256,
)

BASELINES: dict[str, tuple[type[AsyncScheduler], dict[str, Any]]] = {
    "stock fcfs": (AsyncScheduler, {}),
    "stock priority": (AsyncScheduler, {"scheduling_policy": "priority"}),
    "weft fcfs": (WeftScheduler, {"additional_config": {"weft": {"policy": "fcfs"}}}),
    "weft atlas": (WeftScheduler, {"additional_config": {"weft": {"policy": "atlas"}}}),
    "weft learned": (WeftScheduler, {"additional_config": {"weft": {"policy": "learned"}}}),
    "weft auto": (WeftScheduler, {"additional_config": {"weft": {"policy": "auto"}}}),
    "weft astraea": (WeftScheduler, {"additional_config": {"weft": {"policy": "astraea"}}}),
    "weft fair": (WeftScheduler, {"additional_config": {"weft": {"policy": "fair"}}}),
}
BLOCK_TOKENS = 16
SETTLING_STEPS = 400  # after them all that has arrived is ranked
NAMES = 1000
TENANTS = 32
ENDED = 20  # programs of each name in the history
MEDIAN_TOKENS = 1_000_000.0  # of the work of waiting programs, over all names
STEP_S = 0.02  # between the steps, by the scheduler's clock
SPREAD = 0.5  # standard deviation of the logarithm, over names and over the programs of each


class Bench:
    """One baseline's scheduler, with a full batch and some waiting requests."""

    def __init__(self, baseline: str, folder: Path, running: int, waiting: int, seed: int) -> None:
        kind, arguments = BASELINES[baseline]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._added = 0
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
        from bare_scheduler import make_scheduler

        self.scheduler = make_scheduler(
            kind,
            folder,
            blocks=running * 300,
            block_tokens=BLOCK_TOKENS,
            overlapping=True,
            max_model_len=4096,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            **arguments,
        )
        rng = random.Random(seed)
        self._now_s = 0.0
        if kind is WeftScheduler:
            self.scheduler.set_clock(lambda: self._now_s)
            self._learn(rng, running)
        for n in range(running + waiting):
            # The running requests' programs have no service yet and need a hundredth of others, so they are not
            # preempted: preemption is not measured here.
            program = n if n < running else rng.randrange(running, NAMES)
            header = {
                "program_id": f"p{program}",
                "program_name": f"name-{program}",
                "call_id": f"c{n}",
                "service_s": 0.0 if n < running else rng.uniform(1, 100),
            }
            if "fair" in baseline:
                header["tenant"] = f"tenant-{program % TENANTS}"
            self._add(f"r{n}", header, 4000, priority=n if "priority" in baseline else 0)
            if n < running and n % 256 == 255:
                self.step()

    def _add(self, request_id: str, header: dict[str, Any], max_tokens: int, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=header)
        self._added += 1
        request = Request(
            request_id,
            [self._added % 997] * BLOCK_TOKENS,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def _learn(self, rng: random.Random, running: int) -> None:
        past = ModelHistory()
        for n in range(NAMES):
            mean = rng.gauss(math.log(MEDIAN_TOKENS * (0.01 if n < running else 1)), SPREAD)
            for _ in range(ENDED):
                past.add(ProgramEnd(None, f"name-{n}", round(rng.lognormvariate(mean, SPREAD)), is_known=True))
        self.scheduler.weft_policy.on_event(past)

    def step(self) -> float:
        """Run one engine step; returns the seconds that `schedule()` took."""
        self._now_s += STEP_S
        start = time.perf_counter()
        output = self.scheduler.schedule()
        schedule_s = time.perf_counter() - start
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [[5]] * len(ids))
        )
        return schedule_s


def measure(running: int, waiting: int, steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Statistics of the microseconds of one `schedule()`, for each baseline."""
    with tempfile.TemporaryDirectory() as folder:
        benches = {baseline: Bench(baseline, Path(folder), running, waiting, seed) for baseline in BASELINES}
        times: dict[str, list[float]] = {baseline: [] for baseline in BASELINES}
        for bench in benches.values():
            for _ in range(SETTLING_STEPS):
                bench.step()
        gc.collect()
        gc.disable()
        for _ in range(steps):
            for baseline, bench in benches.items():
                times[baseline].append(bench.step() * 1e6)
        gc.enable()
    result = {}
    for baseline, taken in times.items():
        quantiles = statistics.quantiles(taken, n=100)
        result[baseline] = {
            "median_us": statistics.median(taken),
            "mean_us": statistics.fmean(taken),
            "iqr_us": quantiles[74] - quantiles[24],
            "p95_us": quantiles[94],
            "p99_us": quantiles[98],
        }
    return result


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure for each baseline and size.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the requests' programs and services.")] = 0,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console()
    sizes = [(running, waiting) for running in (16, 256) for waiting in (0, 1_000, 10_000)]
    results = []
    for running, waiting in track(sizes, "measuring", console=console, transient=True):
        results.append({"running": running, "waiting": waiting, "baselines": measure(running, waiting, steps, seed)})
    table = Table(
        title=f"one schedule(), microseconds: median (p95, p99), {steps} steps; ratio of medians to stock fcfs"
    )
    for heading in ("running", "waiting", *BASELINES):
        table.add_column(heading, justify="right")
    for result in results:
        baselines: dict[str, dict[str, float]] = result["baselines"]  # type: ignore[assignment]
        base = baselines["stock fcfs"]["median_us"]
        table.add_row(
            str(result["running"]),
            str(result["waiting"]),
            *(
                f"{r['median_us']:.0f} ({r['p95_us']:.0f}, {r['p99_us']:.0f}) {r['median_us'] / base:.2f}"
                for r in baselines.values()
            ),
        )
    console.print(table)
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), "steps": steps, "seed": seed, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of the medians, with the 95th percentile as a whisker."""
    figure, axes = pyplot().subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(BASELINES)
    for offset, baseline in enumerate(BASELINES):
        rows = [result["baselines"][baseline] for result in results]
        medians = [row["median_us"] for row in rows]
        tails = [max(0.0, row["p95_us"] - row["median_us"]) for row in rows]
        positions = [group + offset * width for group in range(len(results))]
        axes.bar(positions, medians, width, yerr=[[0.0] * len(rows), tails], label=baseline, capsize=2)
    labels = [f"{result['running']} running\n{result['waiting']} waiting" for result in results]
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(results))], labels)
    axes.set_ylabel("one schedule(), microseconds (median, p95)")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
