"""The tiny random Llama, and the arguments that all test engines share."""

from __future__ import annotations

import json
from typing import Any, Final

from weft.engine.models.tiny import make_tiny_llama

__all__ = ["ENDLESS_TOKENS", "ENGINE_ARGS", "LONG_CONTEXT_OPTIONS", "MAX_MODEL_LEN", "make_tiny_llama"]

MAX_MODEL_LEN: Final = 65_536
# Output tokens of a call that a test aborts. They take an idle engine a minute, and a busy one longer. The longest call
# that the KV cache of the test engines can hold is only twice as long.
ENDLESS_TOKENS: Final = 60_000
_POSITIONS: Final = {"max_position_embeddings": MAX_MODEL_LEN}  # the model was never trained, so any length is as good

# The engine starts quickly, and its slots are few, so that a few calls fill it.
ENGINE_ARGS: Final[dict[str, Any]] = {
    "max_num_seqs": 4,
    "max_model_len": MAX_MODEL_LEN,
    "hf_overrides": _POSITIONS,
    "enforce_eager": True,
    "use_tqdm_on_load": False,
    "kv_cache_memory_bytes": 256 << 20,
}
# The same context for a server.
LONG_CONTEXT_OPTIONS: Final = ("--max-model-len", str(MAX_MODEL_LEN), "--hf-overrides", json.dumps(_POSITIONS))
