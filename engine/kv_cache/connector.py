"""The KV connector that keeps KV in host memory: a plugin for stock vLLM.

`weft.Engine` sets it up. Without `weft.Engine`, together with `weft.engine.scheduler.WeftScheduler`::

    vllm serve MODEL --scheduler-cls weft.engine.scheduler.WeftScheduler --kv-transfer-config '{
        "kv_connector": "SwapConnector", "kv_connector_module_path": "weft.engine.kv_cache.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"space_gib": 4, "min_tokens": "auto"}}'

vLLM makes one connector in the scheduler's process and one in each worker. The scheduler hands preempted calls, and
with a KV policy the contexts of programs, to `SwapConnector.store`. The plan of a step travels to the workers with the
step. The workers copy out before the step writes anything, and copy in before the model runs (Autellix §4.2.2, §5).
What they could not copy travels back with the step's output.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from weft.core.errors import SwapArgumentError, SwapError
from weft.core.kv_cache.config import CopySpeed, SwapChoice, SwapConfig, space_bytes
from weft.core.log import get_logger
from weft.engine.kv_cache.pool import stride_of
from weft.engine.kv_cache.shared import VARIABLE, Shape, SharedIndex, SharedPools
from weft.engine.kv_cache.slot_plans import Executed, SwapPlan
from weft.engine.kv_cache.store import HostStore
from weft.engine.kv_cache.worker import SwapWorker
from weft.engine.vllm_compat.names import (
    FullAttentionSpec,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    KVTransferConfig,
    Request,
    SupportsHMA,
    VllmConfig,
)

Shared = TypeVar("Shared", SharedIndex, SharedPools)


@dataclass
class StepPlan(KVConnectorMetadata):
    """The plan of a step, as it travels to the workers."""

    plan: SwapPlan = field(default_factory=SwapPlan)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "_EMPTY_PLAN" if self is _EMPTY_PLAN else (StepPlan, (self.plan,))


_EMPTY_PLAN: Final = StepPlan()  # shared by the many steps without a swap; between processes its name travels


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler: how fast it copies, and how plans went."""

    speed: CopySpeed | None = None
    copies_beside: bool = False  # with `speed`: whether its copies can run beside steps
    shares: bool = False  # with `speed`: whether its host memory is in the shared part
    executed: Executed | None = None
    beside: tuple[Executed, ...] = ()  # the plans of which a worker has ended the copies beside steps
    has_memory: bool = True

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, WorkerReport):
            return self
        speeds = [each.speed for each in (self, other) if each.speed is not None]
        plans = [each.executed for each in (self, other) if each.executed is not None]
        return WorkerReport(
            speeds[0].slowest(speeds[-1]) if speeds else None,
            self.copies_beside and other.copies_beside,
            self.shares and other.shares,
            plans[0].together(plans[-1]) if plans else None,
            self.beside + other.beside,
            self.has_memory and other.has_memory,
        )


_MOST_POLLS: Final = 1000
_WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_SPACE_GIB: Final = 4.0  # where vLLM's own server names none
_MOST_GIB: Final = "most_gib"  # what `weft.Engine` adds to the options


class SwapConnector(KVConnectorBase_V1, SupportsHMA):
    """Swaps KV blocks between the device and host memory, as this module's docstring describes.

    Attributes:
        store: plans the copies. None in a worker, and where this engine's KV cannot be swapped.
    """

    @classmethod
    def supports_sleep_mode(cls, _kv_transfer_config: KVTransferConfig) -> bool:
        """vLLM asks from 0.33 on. Sleep takes the memory away that is copied to, and nobody has tried that."""
        return False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = {"space_gib": _SPACE_GIB, **vllm_config.kv_transfer_config.kv_connector_extra_config}
        most_gib = options.pop(_MOST_GIB, None)
        try:
            config = SwapConfig(**options)
        except TypeError as error:
            raise SwapArgumentError(
                f"kv_connector_extra_config is not a weft.SwapConfig: {error}. Give space_gib and min_tokens only."
            ) from None
        if config.space_gib == "auto" and most_gib is None:  # processes that look for themselves would not agree
            raise SwapArgumentError(
                'space_gib is "auto", which only weft.Engine can measure. Give a number of GiB here.'
            )
        obstacle = _obstacle(vllm_config, kv_cache_config)
        block_bytes = 0 if obstacle else _block_bytes(kv_cache_config)
        space = space_bytes(config.space_gib, most_gib or 0.0, kv_cache_config.num_blocks * block_bytes)
        self._slots = max(1, space // block_bytes) if block_bytes else 0  # 0 if nothing is swapped
        self._num_blocks = kv_cache_config.num_blocks
        self._link = Path(os.environ[VARIABLE]) if VARIABLE in os.environ and self._slots else None
        self._shape = _shape(vllm_config, self._slots, block_bytes) if self._link is not None else None
        self._rank = vllm_config.parallel_config.rank
        self.store: HostStore | None = None
        self.wants_step: Callable[[], bool] = lambda: False  # whether a step would copy something
        # Whether a request that could start waits instead for its KV. vLLM has found so many of its tokens.
        self.loads_beside: Callable[[Request, int], bool] = lambda _request, _found_tokens: False
        self._idle_polls = 0
        self._worker: SwapWorker | None = None
        self._unsent: WorkerReport | None = None  # what the scheduler does not know yet
        self._failed: set[int] = set()
        self._local_tokens: dict[str, int] = {}  # by request that is being scheduled: tokens in vLLM's prefix cache
        if obstacle:
            get_logger().warning("preempted calls are computed again instead of swapped", reason=obstacle)
        elif role == KVConnectorRole.SCHEDULER:
            block_tokens = vllm_config.cache_config.block_size
            choice = SwapChoice(config.min_tokens, block_bytes / block_tokens)
            self.store = HostStore(self._slots, block_tokens, choice)
            self.store.workers = vllm_config.parallel_config.world_size
            self.store.shared = self._share(SharedIndex)

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because tokens whose KV is not delivered are computed again."""
        return False

    # -- called in the scheduler's process

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.store is None:
            return 0, False
        key = request.request_id
        tokens = self.store.match(key, request.block_hashes, num_computed_tokens, request.num_tokens)
        if tokens and self.loads_beside(request, num_computed_tokens):
            return None, False  # vLLM passes the request over, and asks again in the next step
        self._local_tokens[key] = num_computed_tokens
        return tokens, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        local = self._local_tokens.pop(request.request_id, 0)
        if self.store is not None:
            ids = blocks.get_block_ids()[0]
            self.store.resume(request.request_id, request.block_hashes, ids, local, local + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        self._local_tokens.clear()
        plan = self.store.take_plan() if self.store is not None else None
        if plan is not None:
            self._idle_polls = 0
        elif self.store is not None and self.store.under_way and not scheduler_output.total_num_scheduled_tokens:
            plan = SwapPlan(waits_for=self.store.under_way)  # there is nothing to do beside the copies
        return _EMPTY_PLAN if plan is None else StepPlan(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self.store is None or not isinstance(report, WorkerReport):
            return
        if not report.has_memory:
            self.store.memory_lost()
        if report.speed is not None:
            self.store.choice.observe_copy(report.speed)
            self.store.copies_beside = report.copies_beside
            if self.store.shared is not None and report.shares:
                self.store.shared.open()
        if report.executed is not None:
            self.store.executed(report.executed)
        for each in report.beside:
            self.store.copied_beside(each)

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests has to step: to copy, or to learn that a copy is done."""
        if self.store is None or not (self.store.awaits_report or self.wants_step()):
            self._idle_polls = 0
            return False
        self._idle_polls += 1
        return self._idle_polls < _MOST_POLLS  # a report that is lost keeps no engine awake

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        if self.store is not None:
            self.store.release(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Forget all copies in host memory. vLLM calls this when the weights have changed."""
        if self.store is not None:
            self.store.reset()
        return True

    # -- called in a worker

    def _share(self, kind: Callable[..., Shared], *others: Any) -> Shared | None:
        """What gives this process the memory that replicas share; None if each replica has its own memory."""
        if self._link is None:
            return None
        try:
            return kind(self._link, self._shape, *others)
        except (OSError, SwapError) as error:
            get_logger().warning("KV in host memory is not shared with other replicas", reason=str(error))
            return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if not self._slots:
            return
        try:
            shared = self._share(SharedPools, self._rank)
            self._worker = SwapWorker(kv_caches, self._num_blocks, self._slots, shared)
            self._unsent = WorkerReport(self._worker.measure(), self._worker.copies_beside, shared is not None)
        except SwapError as error:
            self._unsent = WorkerReport(has_memory=False)
            get_logger().warning(
                "there is no host memory for KV: what does not fit on the device is computed again", reason=str(error)
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(kv_connector_metadata, StepPlan):
            return
        plan, worker = kv_connector_metadata.plan, self._worker
        done = worker.take_done(wait=not plan.number) if worker is not None and plan.waits_for else ()
        if plan.number:
            lost = worker.swap_out(plan) if worker is not None else plan.out.slots
            self._unsent = self._unsent or WorkerReport()
            self._unsent.executed = Executed(plan.number, tuple(lost))
            if worker is None and (plan.spill.slots or plan.fetch.slots):
                done += (Executed(plan.number, tuple(plan.spill.slots), tuple(plan.fetch.slots)),)
        if done:
            self._unsent = self._unsent or WorkerReport()
            self._unsent.beside += done

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._unsent is None or not isinstance(metadata, StepPlan) or (executed := self._unsent.executed) is None:
            return
        plan = metadata.plan
        if self._worker is None:
            self._failed = {block for load in plan.loads for block in load.blocks}
            executed.unread = tuple({slot for load in plan.loads for slot in load.slots})
        elif plan.loads:
            self._failed, unread, refused = self._worker.swap_in(plan)
            executed.unread, executed.refused = tuple(unread), tuple(refused)

    def get_block_ids_with_load_errors(self) -> set[int]:
        if not self._failed:
            return set()
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is not None and (done := self._worker.take_done()):
            self._unsent = self._unsent or WorkerReport()
            self._unsent.beside += done
        unsent, self._unsent = self._unsent, None
        return unsent

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the copies come before the model on the same stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are copied whole, between steps."""

    def wait_for_save(self) -> None:
        """Do nothing: no layer is saved while the model runs."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def transfer_config(swap: SwapConfig, most_gib: float | None = None) -> KVTransferConfig:
    """The `kv_transfer_config` that makes vLLM use this connector.

    Args:
        most_gib: The most that a worker takes, in GiB, if `swap` says "auto".
    """
    return KVTransferConfig(
        kv_connector=SwapConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=asdict(swap) | ({} if most_gib is None else {_MOST_GIB: most_gib}),
    )


def _block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one KV block with all its layers on one worker."""
    (group,) = kv_cache_config.kv_cache_groups
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


def _shape(vllm_config: VllmConfig, slots: int, block_bytes: int) -> Shape:
    """What two engines must have in common to read each other's blocks."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    weights = []
    if Path(model.model).is_dir():  # another version may be there when a replica starts again
        files = [file for file in Path(model.model).iterdir() if file.suffix in _WEIGHTS]
        weights = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    said = (model.model, model.revision, str(model.dtype), model.quantization, cache.cache_dtype, cache.block_size)
    digest = hashlib.sha256(repr((said, block_bytes, weights)).encode()).digest()
    return Shape(slots, stride_of(block_bytes), vllm_config.parallel_config.world_size, digest)


def _obstacle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine's KV cannot be swapped, or None if it can.

    A swap copies whole KV blocks. A call can resume from them only if they hold all of its state.
    """
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if len(groups) != 1:
        return f"the model has {len(groups)} kinds of KV cache"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window is not None:
        return f"the model's KV cache is of kind {type(spec).__name__}, not full attention"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits each block over several workers"
    return None
