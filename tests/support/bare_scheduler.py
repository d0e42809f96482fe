"""vLLM's scheduler and KV cache manager without a model, for tests and benchmarks of schedulers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.engine.vllm_compat.logs import host_logging
from weft.engine.vllm_compat.names import (
    AsyncScheduler,
    EngineArgs,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    StructuredOutputManager,
)

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def make_scheduler(
    kind: type[AsyncScheduler],
    folder: Path,
    *,
    blocks: int,
    block_tokens: int,
    overlapping: bool,
    head_size: int = 1,
    **engine_args: Any,
) -> AsyncScheduler:
    """Make a scheduler as vLLM's engine core does.

    Args:
        kind: the scheduler's class.
        folder: an empty folder, in which the model's config.json is written. Several schedulers may share it.
        blocks: the number of KV blocks. vLLM keeps one of them for itself.
        block_tokens: the number of tokens in a block.
        overlapping: whether a step may be scheduled before the outputs of the step before it are known (asynchronous
            scheduling).
        head_size: the numbers in a token's key, and in its value.
        **engine_args: further arguments for vLLM's `EngineArgs`.
    """
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, logging_config=host_logging(), **engine_args
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.block_size = block_tokens
    config.scheduler_config.async_scheduling = overlapping
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=head_size, dtype=config.model_config.dtype
    )
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_tokens,
        hash_block_size=block_tokens,
        log_stats=False,
    )
