"""A real vLLM engine in this process, which is run one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench.baselines import HOST_GIB, Baseline
from weft.bench.clock import Clock, engine_timer
from weft.bench.meter import Meter, metered, timed
from weft.bench.replay import EngineCall
from weft.bench.settings import BLOCK_TOKENS
from weft.core.ids import ProgramId
from weft.core.kv_cache.config import SwapConfig
from weft.engine.wire.control import ProgramsEnded, encode_control


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The capacity of each baseline's engine.

    Args:
        batch_size: the number of calls that run at once.
        kv_blocks: the number of KV blocks, of `BLOCK_TOKENS` tokens each. By default vLLM sizes the KV cache itself.
        chunk_tokens: the most tokens that a step computes. By default it is vLLM's.
        engines: the number of engines that share the machine's memory.
        host_gib: host memory of an engine that swaps, by default what the tiny model never fills.
        more: other arguments of vLLM's.
    """

    batch_size: int
    kv_blocks: int | None
    chunk_tokens: int | None
    engines: int
    host_gib: float = HOST_GIB
    more: Mapping[str, Any] = field(default_factory=dict)

    def engine_args(self, model: Path, max_model_len: int | None) -> dict[str, Any]:
        """vLLM's arguments. `max_model_len` is the most tokens of a call; with None the model's own."""
        from weft.engine.vllm_compat.names import current_platform

        on_cpu = current_platform.is_cpu()
        # vLLM accepts this share of the memory. `num_gpu_blocks_override` sets the size of the KV cache.
        on_gpu = {"gpu_memory_utilization": 0.9 / self.engines}
        memory: dict[str, Any] = {"kv_cache_memory_bytes": 1 << (28 if self.kv_blocks else 30)} if on_cpu else on_gpu
        if self.kv_blocks is not None:
            memory |= {"num_gpu_blocks_override": self.kv_blocks + 1}  # vLLM keeps one block for itself
        return {
            "model": str(model),
            "dtype": "float32" if on_cpu else "auto",  # CPUs without AMX emulate bfloat16
            "max_model_len": max_model_len,
            "max_num_seqs": self.batch_size,
            "max_num_batched_tokens": self.chunk_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "enforce_eager": on_cpu,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **memory,
            **self.more,
        }


class EngineLimits(NamedTuple):
    """The sizes of an engine that runs."""

    kv_tokens: int  # that its KV cache holds
    kv_token_bytes: int  # the KV of one token
    chunk_tokens: int  # the most tokens that a step computes


def model_limits(model: Path, capacity: EngineCapacity) -> tuple[int, int]:
    """The most tokens that a call of this model may have in an engine of this capacity, and the size of the vocabulary.

    Raises:
        ModelNotFoundError, EngineStartError: vLLM refuses the model.
    """
    from weft.engine.vllm.start import start_error
    from weft.engine.vllm_compat.names import EngineArgs

    try:
        config = EngineArgs(**capacity.engine_args(model, None)).create_engine_config().model_config
    except Exception as error:
        raise start_error(str(model), error) from error
    most = config.max_model_len if capacity.kv_blocks is None else capacity.kv_blocks * BLOCK_TOKENS
    return min(config.max_model_len, most), config.get_vocab_size()


class Stepper:
    """A baseline's engine. Several engines may live in one process; call `activate` before using another one.

    Args:
        max_model_len: the most tokens of a call.
        counts_steps: True: calls arrive by engine steps. False: calls arrive by seconds in which the engine worked.

    Raises:
        EngineStartError: vLLM does not start.
    """

    def __init__(
        self, model: Path, baseline: Baseline, capacity: EngineCapacity, max_model_len: int, *, counts_steps: bool
    ) -> None:
        from weft.engine.vllm.start import start_error
        from weft.engine.vllm_compat.names import EngineArgs, LLMEngine, current_platform, kv_transfer_state

        self.is_program_aware = baseline.policy is not None
        self.clock = Clock(counts_steps=counts_steps, timer=engine_timer(on_cpu=current_platform.is_cpu()))
        self.meter = Meter()
        self._baseline = baseline
        arguments = capacity.engine_args(model, max_model_len) | self._scheduling_args(capacity, max_model_len)
        # vLLM keeps one KV connector per process, in a global variable. `activate` sets it to this engine's connector.
        self._transfer: Any = kv_transfer_state
        self._transfer._KV_CONNECTOR_AGENT = None  # noqa: SLF001
        try:
            config = EngineArgs(**arguments).create_engine_config()
            base = config.scheduler_config.get_scheduler_cls()
            arguments["scheduler_cls"] = metered(base, self.meter, self.clock, is_weft=self.is_program_aware)
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise start_error(str(model), error) from error
        self._connector = self._transfer._KV_CONNECTOR_AGENT  # noqa: SLF001
        if self._connector is not None:
            for name in ("handle_preemptions", "start_load_kv"):
                setattr(self._connector, name, timed(getattr(self._connector, name), self.meter, self.clock))
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler

    def _scheduling_args(self, capacity: EngineCapacity, max_model_len: int) -> dict[str, Any]:
        if self._baseline.plain:
            # Without chunks, vLLM requires that a step can compute the longest call.
            return {
                "scheduling_policy": self._baseline.stock,
                "enable_prefix_caching": False,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(capacity.chunk_tokens or 0, max_model_len),
            }
        if self._baseline.policy is None:
            host_gib = capacity.host_gib if self._baseline.offloads else None
            return {"scheduling_policy": self._baseline.stock, "kv_offloading_size": host_gib}
        from weft.engine.scheduler import WeftScheduler

        arguments: dict[str, Any] = {"scheduler_cls": WeftScheduler, "additional_config": self._baseline.config()}
        if self._baseline.swaps:
            from weft.engine.kv_cache.connector import transfer_config

            # min_tokens="auto" depends on measured seconds, so the clock of steps would not repeat exactly.
            arguments["kv_transfer_config"] = transfer_config(SwapConfig(space_gib=capacity.host_gib, min_tokens=0))
        return arguments

    @property
    def limits(self) -> EngineLimits:
        """The sizes of the running engine."""
        config, kv = self._scheduler.scheduler_config, self._scheduler.kv_cache_config
        token_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
            for group in kv.kv_cache_groups
        )
        return EngineLimits(kv.num_blocks * BLOCK_TOKENS, token_bytes, config.max_num_batched_tokens)

    def reset(self) -> None:
        """Return the idle engine to its first state: clock and counts at 0, prefix cache and policy empty."""
        self.clock.reset()
        self.meter.reset()
        self.activate()
        self._engine.reset_prefix_cache(reset_connector=self._baseline.offloads)
        if self._baseline.policy is not None:
            self._scheduler.reset_weft(self._baseline.policy.make())

    def activate(self) -> None:
        """Make this engine the one that runs next in this process."""
        self._transfer._KV_CONNECTOR_AGENT = self._connector  # noqa: SLF001

    def send(self, call: EngineCall, extra_args: dict[str, Any] | None) -> None:
        """Send a call. `extra_args` are the call's identity and attained service, for Weft's scheduler."""
        from weft.engine.vllm_compat.names import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=call.output_tokens,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args,
        )
        (rendered,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": call.prompt}])
        priority = call.arrival_rank if self._baseline.stock == "priority" else 0
        self._engine.add_request(call.request_id, rendered, params, arrival_time=float(call.number), priority=priority)

    def end_program(self, program_id: ProgramId) -> None:
        """Report to Weft's scheduler that a program has ended."""
        from weft.engine.vllm_compat.control import send_to_scheduler_sync

        send_to_scheduler_sync(self._engine, encode_control(ProgramsEnded((program_id,))))

    def step(self) -> list[Any]:
        """Run one engine step; returns vLLM's `RequestOutput` of each call that ended in the step."""
        self.clock.begin_step()
        outputs = self._engine.step()
        self.meter.end_step(self.clock.end_step())
        return [output for output in outputs if output.finished]
