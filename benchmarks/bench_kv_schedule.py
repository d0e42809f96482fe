"""Time that a scheduler takes for a step, compared with stock vLLM, while the KV cache is full. No model is needed.

    python benchmarks/bench_kv_schedule.py --out bench_kv_schedule.json
    python benchmarks/bench_kv_schedule.py --running 16

The whole of a step is `add_request()` of a call that arrives, `schedule()`, what is done while the workers compute, and
`update_from_output()`. The time is that of the thread's CPU.

Open programs have left contexts in all free blocks, so every block that a step takes is evicted. In *decode* steps each
running request gets one token, and nothing begins or ends. In *churn* one call arrives in each step, and on average one
ends, which leaves a context, and one begins. The call that arrives continues the context of the one that has ended.
The baselines step in turns, 20 ms apart by the scheduler's clock, so one step in 50 has an epoch. With *+host*, host
memory of four times the KV cache keeps what is evicted; its workers copy in no time. *stock+host* is vLLM's own way to
have it, `kv_offloading_size`. Calls have the header that `weft.Engine` sends.

Where a scheduler lies in memory is worth several per cent. So each round makes all schedulers again, in an order of its
own. The figure of a round is the ratio to stock of the medians of its steps, or of their means, in which the epochs
count. The median of the rounds is reported, with the lowest and the highest.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from common import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.core.ids import CallId, ProgramId, ThreadId
from weft.core.kv_cache.config import CopySpeed, SwapConfig
from weft.core.process_rows import CallIdentity
from weft.engine.kv_cache.connector import StepPlan, WorkerReport, transfer_config
from weft.engine.kv_cache.slot_plans import Executed
from weft.engine.scheduler import WeftScheduler
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
from weft.engine.wire.call_header import CallHeader, encode_call

BLOCK_TOKENS: Final = 16
HEAD_SIZE: Final = 32 * 8 * 128  # 128 KiB of KV a token, as a Llama of 8 billion weights has
BLOCK_BYTES: Final = 2 * BLOCK_TOKENS * HEAD_SIZE * 2
CONTEXT_BLOCKS: Final = 50  # of a program that waits for a tool
STEP_S: Final = 0.02
SETTLING_STEPS: Final = 500  # until the policy has ranked the calls that all came at once
HOST_MEMORY: Final = 4  # of the KV cache's size
BASE: Final = "stock"
PROGRAMS: Final = 1000  # open ones, whose calls wait and run
ENDED: Final = 200  # programs that have ended before, from which policies learn
BASELINES: Final[dict[str, dict[str, Any] | None]] = {  # by name, the scheduler's settings
    BASE: None,
    "stock-again": None,  # tells what the measurement itself is good for
    "stock+host": None,
    "fcfs+lru": {"policy": "fcfs", "kv_policy": "lru"},
    "fcfs+ended-first": {"policy": "fcfs", "kv_policy": "ended-first"},
    "fcfs+ttl": {"policy": "fcfs", "kv_policy": "ttl"},
    "fcfs+least-waste": {"policy": "fcfs", "kv_policy": "least-waste"},
    "fcfs+next-use": {"policy": "fcfs", "kv_policy": "next-use"},
    "fcfs+next-use+host": {"policy": "fcfs", "kv_policy": "next-use"},
    "auto": {"policy": "auto"},
    "auto+no-gate": {"policy": {"name": "auto", "gate": False}},
    "auto+next-use": {"policy": "auto", "kv_policy": "next-use"},
    "auto+next-use+host": {"policy": "auto", "kv_policy": "next-use"},
}


@dataclass
class _Program:
    key: str
    context: list[int] = field(default_factory=list)  # the tokens of the call that ended last


class Bench:
    """One baseline's scheduler with a full KV cache."""

    def __init__(
        self, baseline: str, folder: Path, running: int, waiting: int, held_blocks: int, *, churns: bool
    ) -> None:
        settings = BASELINES[baseline]
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._rng = random.Random(0)
        self._running, self._churns = running, churns
        self._added = self._step = 0
        self._program_of: dict[str, _Program] = {}  # by request
        self._next = deque(_Program(f"p{number}") for number in range(PROGRAMS))  # who makes the next call
        blocks = held_blocks + 4 * running
        weft: dict[str, Any] = {"additional_config": {"weft": {**(settings or {}), "one_client": True}}}
        has_host = baseline.endswith("+host")
        gib = HOST_MEMORY * blocks * BLOCK_BYTES / 2**30
        if has_host:
            weft["kv_transfer_config"] = transfer_config(SwapConfig(gib, min_tokens=0))
        stock = {"kv_offloading_size": gib} if has_host else {}
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
        from bare_scheduler import make_scheduler

        self.scheduler = make_scheduler(
            AsyncScheduler if settings is None else WeftScheduler,
            folder,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            overlapping=True,
            head_size=HEAD_SIZE,
            max_model_len=4096,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            **(stock if settings is None else weft),
        )
        if settings is not None:
            self.scheduler.set_clock(lambda: self._step * STEP_S)
        if has_host and settings is not None:
            speed = WorkerReport(CopySpeed(1e-5, 2e10, 2e10))
            self.scheduler.connector.update_connector_output(_reported(speed))
        for number in range(ENDED):
            tokens = self._rng.randrange(1, 100)
            self.scheduler.add_request(self._make(_Program(f"over {number}"), BLOCK_TOKENS, tokens, is_last=True))
        while self.scheduler.has_requests():
            self.step()
        for number in range(held_blocks // CONTEXT_BLOCKS):
            self.scheduler.add_request(self._make(_Program(f"open {number}"), CONTEXT_BLOCKS * BLOCK_TOKENS, 1))
            self.step()
        while self.scheduler.has_requests():  # until all is in host memory as well
            self.step()
        self._step += 10_000  # the gate has shut the programs that wait for tools
        for _ in range(running + waiting):
            self.scheduler.add_request(self._next_call())
        while len(self.scheduler.running) < running:
            self.step()

    def _next_call(self) -> Request:
        """A call of the program whose call ended first, or of the one that has made none for longest."""
        program = self._next.popleft()
        self._next.append(program)
        tokens = self._rng.randrange(1, 2 * self._running) if self._churns else 4000
        request = self._make(program, BLOCK_TOKENS, tokens)
        self._program_of[request.request_id] = program
        return request

    def _make(self, program: _Program, new_tokens: int, max_tokens: int, *, is_last: bool = False) -> Request:
        identity = CallIdentity(ProgramId(program.key), ThreadId(program.key), CallId(f"c{self._added}"))
        header = CallHeader(identity, program_name=f"agent {program.key[-1]}", program_calls=1, ends_program=is_last)
        self._added += 1
        return Request(
            f"r{self._added}",
            [*program.context, *(self._rng.randrange(900) for _ in range(new_tokens))],
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=encode_call(header)),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def step(self, *, arrives: bool = False) -> tuple[float, float]:
        """One engine step. Returns the seconds of `schedule()`, and of all that the scheduler did for it."""
        self._step += 1
        call = self._next_call() if arrives else None
        began_s = time.thread_time()
        if call is not None:
            self.scheduler.add_request(call)
        before_s = time.thread_time()
        output = self.scheduler.schedule()
        schedule_s = time.thread_time() - before_s
        self.scheduler.get_grammar_bitmask(output)  # as vLLM's engine does once the workers have the step
        taken_s = time.thread_time() - began_s
        copies = output.kv_connector_metadata
        if isinstance(copies, StepPlan):
            copies.plan.check_integrity()  # the workers would refuse the plan, which takes none of the scheduler's time
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
        running = list(self.scheduler.running)
        began_s = time.thread_time()
        self.scheduler.update_from_output(output, ran)
        taken_s += time.thread_time() - began_s
        for request in running:
            if request.is_finished() and (program := self._program_of.pop(request.request_id, None)) is not None:
                program.context = list(request.all_token_ids)
                self._next.remove(program)
                self._next.appendleft(program)
        return schedule_s, taken_s


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
