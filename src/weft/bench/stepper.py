"""A real vLLM engine in this process, stepped by hand."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.bench.baselines import Baseline
from weft.bench.clock import Clock
from weft.bench.meter import Meter, metered
from weft.bench.replay import SentCall
from weft.bench.settings import BLOCK_TOKENS
from weft.core.kv_cache.swap import SwapConfig


@dataclass(frozen=True, slots=True)
class Room:
    """What every baseline's engine has.

    Args:
        batch_size: calls that run at once.
        blocks: of `BLOCK_TOKENS`, in the KV cache.
        chunk_tokens: the most that a step computes.
        engines: that share the machine's memory.
    """

    batch_size: int
    blocks: int
    chunk_tokens: int
    engines: int

    def engine_args(self, model: Path, max_model_len: int | None) -> dict[str, Any]:
        """vLLM's arguments.

        Args:
            max_model_len: None: as much as the model's configuration says.
        """
        from weft.engine.vllm_compat.names import current_platform

        on_cpu = current_platform.is_cpu()
        # How much is decided by the number of blocks. These two have each engine content with its part of the memory.
        memory = {"kv_cache_memory_bytes": 1 << 28} if on_cpu else {"gpu_memory_utilization": 0.9 / self.engines}
        return {
            "model": str(model),
            "dtype": "float32" if on_cpu else "auto",  # bfloat16 is emulated on CPUs without AMX
            "max_model_len": max_model_len,
            "max_num_seqs": self.batch_size,
            "max_num_batched_tokens": self.chunk_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": self.blocks + 1,  # vLLM keeps one for itself
            "enforce_eager": on_cpu,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **memory,
        }


def longest_call(model: Path, room: Room) -> tuple[int, int]:
    """Most tokens that a call of this model may have in an engine of that size, and the model's vocabulary.

    Raises:
        ModelNotFoundError, EngineStartError: vLLM does not take the model.
    """
    from weft.engine.frontend.start import start_error
    from weft.engine.vllm_compat.names import EngineArgs

    try:
        config = EngineArgs(**room.engine_args(model, None)).create_engine_config().model_config
    except Exception as error:
        raise start_error(str(model), error) from error
    return min(config.max_model_len, room.blocks * BLOCK_TOKENS), config.get_vocab_size()


class Stepper:
    """A baseline's engine. Several live in one process and have turns: between `take_turn` and the next one's.

    Args:
        max_model_len: most tokens of a call.
        counts_steps: arrivals go by engine steps, else by seconds at work.

    Raises:
        EngineStartError: vLLM does not start.
    """

    def __init__(self, model: Path, baseline: Baseline, room: Room, max_model_len: int, *, counts_steps: bool) -> None:
        from weft.engine.frontend.start import start_error
        from weft.engine.vllm_compat.names import EngineArgs, LLMEngine, kv_transfer_state

        self.tells_programs = baseline.policy is not None
        self.gives_priority = baseline.stock == "priority"
        self.clock = Clock(counts_steps=counts_steps, timer=time.perf_counter)
        self.meter = Meter()
        self._rival = baseline
        arguments = room.engine_args(model, max_model_len) | self._scheduling()
        # vLLM keeps one connector a process, in a global: each engine has its own back while it has its turn.
        self._transfer: Any = kv_transfer_state
        self._transfer._KV_CONNECTOR_AGENT = None  # noqa: SLF001
        try:
            config = EngineArgs(**arguments).create_engine_config()
            base = config.scheduler_config.get_scheduler_cls()
            arguments["scheduler_cls"] = metered(base, self.meter, self.clock, is_weft=self.tells_programs)
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise start_error(str(model), error) from error
        self._connector = self._transfer._KV_CONNECTOR_AGENT  # noqa: SLF001

    def _scheduling(self) -> dict[str, Any]:
        if self._rival.policy is None:
            return {"scheduling_policy": self._rival.stock}
        from weft.engine.scheduler import WeftScheduler

        arguments = {"scheduler_cls": WeftScheduler, "additional_config": {"weft": asdict(self._rival.policy)}}
        if self._rival.swaps:
            from weft.engine.kv_cache.connector import transfer_config

            # Without "auto", which goes by measured seconds, the clock of steps gives the same every time.
            arguments["kv_transfer_config"] = transfer_config(SwapConfig(space_gib=1.0, min_tokens=0))
        return arguments

    def renew(self) -> None:
        """As it was when it started: clock at 0, nothing counted, nothing cached, nothing learned."""
        self.clock.reset()
        self.meter.reset()
        self.take_turn()
        self._engine.reset_prefix_cache()
        if self._rival.policy is not None:
            self._engine.engine_core.engine_core.scheduler.renew(self._rival.policy.make())

    def take_turn(self) -> None:
        """Go on after another engine's turn."""
        self._transfer._KV_CONNECTOR_AGENT = self._connector  # noqa: SLF001

    def send(self, call: SentCall, extra: dict[str, Any] | None) -> None:
        """Send a call.

        Args:
            extra: what Weft's scheduler is told.
        """
        from weft.engine.vllm_compat.names import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=call.output_tokens,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=extra,
        )
        (rendered,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": call.prompt}])
        priority = call.place if self.gives_priority else 0
        self._engine.add_request(call.request_id, rendered, params, arrival_time=float(call.number), priority=priority)

    def step(self) -> list[Any]:
        """One engine step; returns the calls that ended in it, as vLLM's `RequestOutput`."""
        self.clock.begin_step()
        outputs = self._engine.step()
        self.meter.end_step(self.clock.end_step())
        return [output for output in outputs if output.finished]
