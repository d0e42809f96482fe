"""The tiny random Llama, and the arguments that all test engines share."""

from __future__ import annotations

from weft.engine.models.tiny import make_tiny_llama

__all__ = ["ENGINE_ARGS", "make_tiny_llama"]

# The engine starts quickly, and its slots are few, so that a few calls fill it.
ENGINE_ARGS = {
    "max_num_seqs": 4,
    "max_model_len": 2048,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 256 << 20,
}
