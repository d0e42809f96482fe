"""The replay of `weft bench` on vLLM's scheduler with Weft's plugin and without a model, and the same in the simulator.

A replay takes seconds, and the steps are those of `weft bench --clock steps`: without a model only the tokens differ.
Copies to host memory and back are done at once, or take time beside the steps.
"""

from __future__ import annotations

import statistics
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bare_scheduler import make_scheduler
from scheduler_harness import swapping

from weft.bench.baselines import Baseline, baseline_of
from weft.bench.clock import STEP_S, Clock
from weft.bench.load import Prompts, Scaling, scale_programs
from weft.bench.meter import Meter, metered
from weft.bench.replay import EngineCall, Replay
from weft.bench.results.sim_comparison import simulated_engine
from weft.bench.rounds import EQUAL_STEPS, unloaded_steps
from weft.bench.settings import BLOCK_TOKENS, BenchSettings
from weft.core.ids import ProgramId
from weft.core.kv_cache.config import CopySpeed
from weft.core.kv_cache.stats import KvCounts
from weft.core.sim import StepTime, TraceProgram, simulate
from weft.engine.kv_cache.connector import WorkerReport
from weft.engine.kv_cache.slot_plans import Executed, SwapPlan
from weft.engine.scheduler import WeftScheduler
from weft.engine.vllm_compat.names import (
    KVConnectorOutput,
    ModelRunnerOutput,
    Request,
    SamplingParams,
    SchedulerOutput,
    get_request_block_hasher,
    init_none_hash,
    sha256,
)
from weft.engine.wire.control import ProgramsEnded, encode_control

MOST_CALL_TOKENS = 4096  # the bare scheduler's model has no longer contexts


class Played(NamedTuple):
    """What an engine or the simulator made of a trace."""

    steps: dict[str, int]  # by program: from its arrival to its end
    recomputed_tokens: int
    preemptions: int
    copied_out: int  # tokens, to host memory
    copied_back: int

    @property
    def mean_steps(self) -> float:
        return statistics.fmean(self.steps.values())


class ReplayedScheduler:
    """A `SteppedEngine` of `weft.bench.replay` without a model.

    Args:
        folder: An existing folder, to which the model's configuration is written.
        settings: The sizes of the engine.
        baseline: One of Weft's policies.
        copy_token_s: How long a copy beside the steps takes; None: copies are done at once.
    """

    is_program_aware = True

    def __init__(
        self, folder: Path, settings: BenchSettings, baseline: Baseline, copy_token_s: float | None = None
    ) -> None:
        assert baseline.policy is not None
        init_none_hash(sha256)
        self.clock = Clock(counts_steps=True, timer=lambda: self.clock.steps * STEP_S)
        self.meter = Meter()
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._scheduler: Any = make_scheduler(
            metered(WeftScheduler, self.meter, self.clock, is_weft=True),
            folder,
            blocks=settings.kv_capacity_tokens // BLOCK_TOKENS + 1,  # vLLM keeps one block for itself
            block_tokens=BLOCK_TOKENS,
            overlapping=False,
            max_model_len=min(MOST_CALL_TOKENS, settings.kv_capacity_tokens),
            max_num_seqs=settings.batch_size,
            max_num_batched_tokens=settings.chunk_tokens,
            enable_prefix_caching=True,
            additional_config=baseline.config(),
            **swapping((1 << 26) * baseline.swaps, 0),
        )
        self._swaps = baseline.swaps
        if baseline.swaps:  # as a worker has measured at the start; a token takes as long as in the simulator
            choice = self._scheduler.connector.store.choice
            bytes_per_s = choice.token_bytes / (copy_token_s or StepTime().copy_token_s)
            choice.observe_copy(CopySpeed(0.0, bytes_per_s, bytes_per_s))
            self._scheduler.connector.store.copies_beside = copy_token_s is not None
        self._copy_token_s = copy_token_s or 0.0
        self._until_s = 0.0  # when the last copy beside the steps is done
        self._beside: deque[tuple[int, float]] = deque()  # by plan: when its copies beside the steps are done
        self._requests: dict[str, Request] = {}

    @property
    def copied(self) -> KvCounts:
        """The tokens copied to host memory and back."""
        return self._scheduler.connector.store.counts if self._swaps else KvCounts()

    def activate(self) -> None:
        """There is only this engine."""

    def send(self, call: EngineCall, extra_args: dict[str, Any] | None) -> None:
        params = SamplingParams(max_tokens=call.output_tokens, ignore_eos=True, extra_args=extra_args)
        self._requests[call.request_id] = request = Request(
            call.request_id,
            call.prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(call.number),
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)

    def end_program(self, program_id: ProgramId) -> None:
        self._scheduler(encode_control(ProgramsEnded((program_id,))))

    def step(self) -> list[Any]:
        """Run one step. Returns the calls that ended with it."""
        self.clock.begin_step()
        output = self._scheduler.schedule()
        executed = self._execute(output)
        ended = []
        if output.total_num_scheduled_tokens or executed.kv_connector_output is not None:
            self._scheduler.get_grammar_bitmask(output)
            for client in self._scheduler.update_from_output(output, executed).values():
                for each in client.outputs:
                    if each.finish_reason is not None:
                        tokens = list(self._requests.pop(each.request_id).output_token_ids)
                        ended.append(
                            SimpleNamespace(
                                request_id=each.request_id,
                                outputs=[SimpleNamespace(token_ids=tokens)],
                                kv_transfer_params=each.kv_transfer_params,
                            )
                        )
        self.meter.end_step(self.clock.end_step())
        return ended

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for key, count in output.num_scheduled_tokens.items():
            length = self._requests[key].num_tokens
            is_chunk = computed[key] + count < length
            sampled.append([] if is_chunk else [zlib.crc32(f"{key} {length}".encode()) % 900 + 50])
        keys = list(output.num_scheduled_tokens)
        executed = ModelRunnerOutput(keys, {key: index for index, key in enumerate(keys)}, sampled)
        if self._swaps and (report := self._copy(output.kv_connector_metadata.plan)) is not None:
            executed.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=report)
        return executed

    def _copy(self, plan: SwapPlan) -> WorkerReport | None:
        """What the worker reports with the step."""
        now_s = self.clock.steps * STEP_S
        if blocks := len(plan.spill.slots) + len(plan.fetch.slots):
            self._until_s = max(self._until_s, now_s) + blocks * BLOCK_TOKENS * self._copy_token_s
            self._beside.append((plan.number, self._until_s))
        done = []
        while self._beside and (self._beside[0][1] <= now_s + STEP_S or self._beside[0][0] <= plan.waits_for):
            done.append(Executed(self._beside.popleft()[0]))
        if not (plan.number or done):
            return None
        return WorkerReport(executed=Executed(plan.number) if plan.number else None, beside=tuple(done))


def scaled(programs: Sequence[TraceProgram], settings: BenchSettings) -> list[TraceProgram]:
    """The programs as `weft bench` makes them small enough for an engine."""
    most = min(MOST_CALL_TOKENS, settings.kv_capacity_tokens)
    return scale_programs(programs, Scaling(settings.scale, most, whole_steps=True)).programs


def replayed(
    programs: Sequence[TraceProgram],
    settings: BenchSettings,
    name: str,
    folder: Path,
    copy_token_s: float | None = None,
) -> Played:
    """Play programs on the scheduler under a baseline of `weft bench`."""
    engine = ReplayedScheduler(folder, settings, baseline_of(name), copy_token_s)
    replay = Replay(engine, programs, unloaded_steps(settings, programs), Prompts("0 0", range(10, 990)))
    for _ in replay.steps():
        pass
    counts, copied = engine.meter.counts, engine.copied
    return Played(
        {each.program: each.steps for each in replay.outcomes},
        counts.recomputed_tokens,
        counts.preemptions,
        copied.spilled_tokens,
        copied.loaded_tokens + copied.fetched_tokens,
    )


def simulated(
    programs: Sequence[TraceProgram],
    settings: BenchSettings,
    name: str,
    copy_token_s: float = 0.0,
    *,
    copies_beside: bool = False,
) -> Played:
    """Play the same in the simulator."""
    step_time = replace(EQUAL_STEPS, copy_token_s=copy_token_s)
    engine = simulated_engine(settings, baseline_of(name), step_time, MOST_CALL_TOKENS)
    result = simulate(programs, replace(engine, copies_beside=copies_beside))
    steps = {name: round(row.latency / STEP_S) for name, row in result.programs.items()}
    counts = result.counts
    return Played(
        steps, counts.again + counts.recomputed, counts.preemptions, counts.spilled + counts.swapped, counts.fetched
    )
