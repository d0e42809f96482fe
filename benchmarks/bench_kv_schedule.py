"""Time of one `schedule()` with a KV policy, compared with stock vLLM, while the KV cache is full. No model is needed.

    python benchmarks/bench_kv_schedule.py --out bench_kv_schedule.json

Open programs have left contexts in all free blocks, so every block that a step takes is evicted. In *decode* steps each
running request gets one token, and nothing begins or ends. In *churn* one call arrives in each step, and on average one
ends, which leaves a context, and one begins. The baselines step in turns, 20 ms apart by the scheduler's clock, so
one step in 50 has an epoch. With *+host*, host memory of four times the KV cache keeps what is evicted; its workers
copy in no time. *stock+host* is vLLM's own way to have it, `kv_offloading_size`.

Where a scheduler lies in memory is worth several per cent. So each round makes all schedulers again, in an order of its
own. The figure of a round is the ratio to stock of the medians of its steps, or of their means, in which the epochs
count. The median of the rounds is reported, with the lowest and the highest.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.core.kv_cache.choice import CopySpeed
from weft.core.kv_cache.config import SwapConfig
from weft.engine.kv_cache.connector import StepPlan, WorkerReport, transfer_config
from weft.engine.kv_cache.plan import Executed
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm_compat.bare_scheduler import make_scheduler
from weft.engine.vllm_compat.names import (
    AsyncScheduler,
    KVConnectorOutput,
    ModelRunnerOutput,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    Request,
    SamplingParams,
    get_request_block_hasher,
    init_none_hash,
    sha256,
)

BLOCK_TOKENS: Final = 16
HEAD_SIZE: Final = 32 * 8 * 128  # 128 KiB of KV a token, as a Llama of 8 billion weights has
BLOCK_BYTES: Final = 2 * BLOCK_TOKENS * HEAD_SIZE * 2
CONTEXT_BLOCKS: Final = 50  # of a program that waits for a tool
STEP_S: Final = 0.02
SETTLING_STEPS: Final = 100
HOST_MEMORY: Final = 4  # of the KV cache's size
BASE: Final = "stock"
BASELINES: Final[dict[str, str | None]] = {
    BASE: None,
    "stock-again": None,  # tells what the measurement itself is good for
    "stock+host": None,
    "fcfs+lru": "lru",
    "fcfs+ended-first": "ended-first",
    "fcfs+ttl": "ttl",
    "fcfs+least-waste": "least-waste",
    "fcfs+next-use": "next-use",
    "fcfs+next-use+host": "next-use",
}


class Bench:
    """One baseline's scheduler with a full KV cache."""

    def __init__(
        self, baseline: str, folder: Path, running: int, waiting: int, held_blocks: int, *, churns: bool
    ) -> None:
        kv_policy = BASELINES[baseline]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._rng = random.Random(0)
        self._running, self._churns = running, churns
        self._added = self._step = 0
        blocks = held_blocks + 4 * running
        weft: dict[str, Any] = {"additional_config": {"weft": {"name": "fcfs", "kv_policy": kv_policy}}}
        has_host = baseline.endswith("+host")
        gib = HOST_MEMORY * blocks * BLOCK_BYTES / 2**30
        if has_host:
            weft["kv_transfer_config"] = transfer_config(SwapConfig(gib, min_tokens=0))
        stock = {"kv_offloading_size": gib} if has_host else {}
        self.scheduler = make_scheduler(
            AsyncScheduler if kv_policy is None else WeftScheduler,
            folder,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            overlapping=True,
            head_size=HEAD_SIZE,
            max_model_len=4096,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            **(stock if kv_policy is None else weft),
        )
        if kv_policy is not None:
            self.scheduler.set_clock(lambda: self._step * STEP_S)
        if has_host and kv_policy is not None:
            speed = WorkerReport(CopySpeed(1e-5, 2e10, 2e10))
            self.scheduler.connector.update_connector_output(_reported(speed))
        for number in range(held_blocks // CONTEXT_BLOCKS):
            self._add(f"open {number}", CONTEXT_BLOCKS * BLOCK_TOKENS, 1)
            self.step()
        while self.scheduler.has_requests():  # until all is in host memory as well
            self.step()
        for number in range(running + waiting):
            self._add_call(number)
        while len(self.scheduler.running) < running:
            self.step()

    def _add_call(self, number: int) -> None:
        """Calls of open programs, with prompts of their own."""
        tokens = self._rng.randrange(1, 2 * self._running) if self._churns else 4000
        self._add(f"p{number % 1000}", BLOCK_TOKENS, tokens)

    def _add(self, program: str, prompt_tokens: int, max_tokens: int) -> None:
        header = {"program_id": program, "program_name": "agent", "call_id": f"c{self._added}"}
        request = Request(
            f"r{self._added}",
            [self._rng.randrange(900) for _ in range(prompt_tokens)],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=header),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._added += 1
        self.scheduler.add_request(request)

    def step(self, *, arrives: bool = False) -> tuple[float, float]:
        """One engine step. Returns the seconds of `schedule()`, and of all that the scheduler did for it."""
        self._step += 1
        began_s = time.thread_time()
        if arrives:
            self._add_call(self._added)
        before_s = time.thread_time()
        output = self.scheduler.schedule()
        schedule_s = time.thread_time() - before_s
        self.scheduler.get_grammar_bitmask(output)  # as vLLM's engine does once the workers have the step
        taken_s = time.thread_time() - began_s
        copies = output.kv_connector_metadata
        if isinstance(copies, StepPlan):
            copies.plan.check_integrity()  # the workers would refuse the plan, which takes none of the scheduler's time
        began_s = time.thread_time()
        ids = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [[5]] * len(ids))
        if isinstance(copies, StepPlan) and copies.plan.number:
            ran.kv_connector_output = _reported(WorkerReport(executed=Executed(copies.plan.number)))
        elif isinstance(copies, OffloadingConnectorMetadata):
            done = dict.fromkeys((*copies.load_jobs, *copies.store_jobs), 1)
            ran.kv_connector_output = KVConnectorOutput(
                finished_recving={job.req_id for job in copies.load_jobs.values()},
                kv_connector_worker_meta=OffloadingWorkerMetadata(done),
            )
        self.scheduler.update_from_output(output, ran)
        return schedule_s, taken_s + time.thread_time() - began_s


def _reported(report: WorkerReport) -> KVConnectorOutput:
    """What the workers would say."""
    return KVConnectorOutput(kv_connector_worker_meta=report)


def measure(
    baselines: list[str], seed: int, running: int, waiting: int, held_blocks: int, steps: int, *, churns: bool
) -> dict[str, dict[str, float]]:
    """One round: microseconds of one `schedule()` and of a step's whole scheduling, for each baseline."""
    with tempfile.TemporaryDirectory() as folder:
        order = random.Random(seed).sample(baselines, len(baselines))
        benches = {name: Bench(name, Path(folder), running, waiting, held_blocks, churns=churns) for name in order}
        for bench in benches.values():
            for _ in range(SETTLING_STEPS):
                bench.step(arrives=churns)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in baselines}
        gc.collect()
        gc.disable()
        for number in range(steps):  # in another order each time: a bench finds the caches as the one before left them
            order = random.Random(number).sample(list(benches), len(benches))
            for name in order:
                taken[name].append(benches[name].step(arrives=churns))
        gc.enable()
    return {
        name: {
            "schedule_median_us": statistics.median(schedule_s for schedule_s, _ in rows) * 1e6,
            "schedule_mean_us": statistics.fmean(schedule_s for schedule_s, _ in rows) * 1e6,
            "schedule_most_us": max(schedule_s for schedule_s, _ in rows) * 1e6,
            "all_median_us": statistics.median(all_s for _, all_s in rows) * 1e6,
            "all_mean_us": statistics.fmean(all_s for _, all_s in rows) * 1e6,
        }
        for name, rows in taken.items()
    }


def cell(rounds: list[dict[str, dict[str, float]]], name: str, key: str) -> str:
    """A figure of a baseline over the rounds, and its ratio to stock in the same round."""
    text = f"{statistics.median(found[name][key] for found in rounds):.0f}"
    if key == "schedule_most_us":
        return text
    ratios = [found[name][key] / found[BASE][key] for found in rounds]
    return f"{text} {statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with schedulers of its own.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure for each baseline in a round.")] = 200,
    running: Annotated[int, typer.Option(help="Requests that run.")] = 256,
    waiting: Annotated[int, typer.Option(help="Requests that wait.")] = 10_000,
    held_blocks: Annotated[int, typer.Option(help="Blocks of contexts that programs have left.")] = 10_000,
    only: Annotated[str, typer.Option(help="Baselines to measure next to stock, with commas.")] = ",".join(BASELINES),
) -> None:
    """Measure, print a table, and write JSON."""
    results = {}
    baselines = list(dict.fromkeys([BASE, *only.split(",")]))
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(BASELINES)}.", param_hint="--only")
    table = Table(
        title=f"{running} running, {waiting} waiting, {held_blocks} held blocks; microseconds, and the ratio to stock: "
        f"median of {rounds} rounds (lowest, highest)"
    )
    for heading in ("steps", "baseline", "schedule()", "mean", "most", "with arrivals and outputs", "mean"):
        table.add_column(heading, justify="right")
    console = Console(width=160)
    for churns in (False, True):
        kind = "churn" if churns else "decode"
        found = results[kind] = [
            measure(baselines, seed, running, waiting, held_blocks, steps, churns=churns)
            for seed in track(range(rounds), f"measuring {kind}", console=console, transient=True)
        ]
        for name in baselines:
            table.add_row(kind, name, *(cell(found, name, key) for key in found[0][name]))
    console.print(table)
    if out is not None:
        sizes = {"running": running, "waiting": waiting, "held_blocks": held_blocks, "rounds": rounds, "steps": steps}
        out.write_text(json.dumps({"machine": machine(), **sizes, "results": results}, indent=1))


if __name__ == "__main__":
    typer.run(main)
