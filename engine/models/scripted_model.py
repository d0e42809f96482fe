"""The folder of a model without weights, whose prompts are the requests themselves: for `weft serve --scripted`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weft.engine.models.tiny import make_tokenizer

THINK, THOUGHT = "<think>", "</think>"  # around reasoning, as vLLM's parser "deepseek_r1" reads it
_MAX_MODEL_LEN: Final = 1 << 20  # no client of today fills it
_BEGIN: Final = "<|request|>"  # a prompt without it was rendered from no chat
# Whatever API a request came by, vLLM hands the template its messages and tools in OpenAI's chat format.
_CHAT_TEMPLATE: Final = _BEGIN + '{{ {"messages": messages, "tools": tools or []} | tojson }}'


def make_scripted_model(folder: Path) -> Path:
    """Write a configuration and a tokenizer to `folder`, and return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(_CHAT_TEMPLATE, [THINK, THOUGHT]).save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _MAX_MODEL_LEN,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def request_of(prompt: str) -> Mapping[str, Any]:
    """The request that the template has rendered; a plain completion's as one message of the user."""
    if prompt.startswith(_BEGIN):
        found: Mapping[str, Any] = json.loads(prompt.removeprefix(_BEGIN))
        return found
    return {"messages": [{"role": "user", "content": prompt}], "tools": []}
