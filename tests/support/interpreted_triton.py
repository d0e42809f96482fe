"""Importing this before vLLM makes vLLM take its second model runner, the default on GPUs, on a CPU: in a script with
the option `--second-runner`, and only there.

vLLM takes that runner if Triton has a backend named "cpu", which Triton's wheels on PyPI lack. This one interprets the
kernels. `make test-slow` puts Triton into build/triton, where the other tests do not see it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

SECOND_RUNNER = "--second-runner" in sys.argv
FOLDER = Path(__file__).resolve().parents[2] / "build" / "triton"


def install() -> None:
    """Put Triton on the path, and the backend into Triton."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    sys.path.insert(0, str(FOLDER))
    import torch
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Compiler(BaseBackend):  # type: ignore[misc]  # Triton has no types here
        """Compiles nothing."""

        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return bool(target.backend == "cpu")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a kernel is compiled instead of interpreted: {name}")

    class Driver(DriverBase):  # type: ignore[misc]
        """A device that has no properties."""

        def __init__(self) -> None:
            self.get_current_device = lambda: 0

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    Compiler.__abstractmethods__ = Driver.__abstractmethods__ = frozenset()
    backends["cpu"] = Backend(Compiler, Driver)


if SECOND_RUNNER:
    install()
