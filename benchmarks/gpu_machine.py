"""What a machine has of what `gpu_check.py` needs: torch, a GPU, nvcc, and the wheels that were brought along."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "build/gpu-check"
WHEELS: Final = ROOT / "build/gpu-wheels"
PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
SITE: Final = WORK / f"site-{PYTHON}"  # where the wheels are installed
PACKAGES: Final = (
    "hypothesis",
    "nanobind",
    "numpy",
    "psutil",
    "pytest",
    "pytest_asyncio",
    "pytest_timeout",
    "structlog",
)
PROGRAMS: Final = ("cmake", "ninja")

# Prints what a Python has: torch's build for CUDA, its GPU, and the packages that it lacks.
PROBE: Final = """
import importlib.util, json, sys
found = {"missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]}
try:
    import torch
except ModuleNotFoundError:
    pass
except Exception as error:
    found["broken"] = str(error).strip().splitlines()[0]
else:
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpu"], found["capability"] = torch.cuda.get_device_name(), "%d%d" % torch.cuda.get_device_capability()
print(json.dumps(found))
"""


class MissingError(Exception):
    """This machine lacks something; the message says what, and what to do."""


@dataclass
class Machine:
    """What `PROBE` found, and the programs on this machine.

    Attributes:
        missing: packages that Python lacks, and programs that are brought as packages.
        torch: torch's version, if there is one.
        broken: why torch cannot be imported.
        cuda: the version of CUDA that torch was built for.
        gpu: the GPU's name.
        capability: of the GPU, such as "90".
        headers: Python's own are there, which the compiled part includes.
        nvcc: path of the compiler.
        sanitizer: path of compute-sanitizer.
    """

    missing: list[str] = field(default_factory=list)
    torch: str | None = None
    broken: str | None = None
    cuda: str | None = None
    gpu: str | None = None
    capability: str | None = None
    headers: bool = True
    nvcc: str | None = None
    sanitizer: str | None = None

    def require(self, steps: Sequence[str]) -> None:
        """Raise MissingError if one of the steps cannot run here."""
        if set(steps) != {"build"}:
            self.require_gpu()
        if "build" in steps and self.nvcc is None:
            raise MissingError(
                "There is no nvcc: install the CUDA toolkit, or set CUDA_HOME to the folder that holds bin/nvcc."
            )
        if self.missing:
            raise MissingError(
                f"{sys.executable} lacks {', '.join(self.missing)}: run `make gpu-check-wheels GPU_PYTHON={PYTHON}` "
                "where there is a network, and bring build/gpu-wheels along."
            )
        if "build" in steps and not self.headers:
            raise MissingError(
                f"{sys.executable} has no Python.h: install its headers, such as the package python{PYTHON}-dev."
            )

    def require_gpu(self) -> None:
        """Raise MissingError unless torch sees a GPU."""
        if self.broken is not None:
            raise MissingError(f"{sys.executable} cannot import its torch ({self.broken}): name another Python.")
        if self.torch is None:
            raise MissingError(f"{sys.executable} has no torch: name a Python that has one, with make PYTHON=….")
        if self.cuda is None:
            raise MissingError(
                f"torch {self.torch} is built without CUDA: name a Python whose torch has CUDA, with make PYTHON=…."
            )
        if self.gpu is None:
            raise MissingError(
                f"torch {self.torch} sees no GPU: run this on a machine with an NVIDIA GPU and a driver for CUDA "
                f"{self.cuda}."
            )


def environment() -> dict[str, str]:
    """The variables that let a command find the wheels' packages, Weft's sources and the built extension."""
    paths = [SITE, ROOT / "src", ROOT / "tests/support", ROOT / "benchmarks"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": os.pathsep.join([str(SITE / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "WEFT_CSRC": str(WORK / "csrc"),
    }


def printed(command: list[str]) -> str:
    """What a command prints; empty if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def install_wheels() -> None:
    """Put the wheels that were brought along into a folder that only these checks use."""
    wheels = sorted(WHEELS.glob("*.whl"))
    listed = SITE / "wheels.txt"
    names = "\n".join(wheel.name for wheel in wheels)
    if not wheels or (listed.exists() and listed.read_text() == names):
        return
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    options = ["--no-deps", "--no-compile", "--target", SITE, *wheels]
    result = subprocess.run([*command, *map(str, options)], capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"The wheels in {WHEELS} are not used, because pip cannot install them: {last}", file=sys.stderr)
        return
    listed.write_text(names)


def look() -> Machine:
    """What this machine has."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    lines = printed([sys.executable, "-c", PROBE, *PACKAGES]).splitlines()
    found = json.loads(lines[-1]) if lines else {"missing": [], "broken": "Python ends when it imports torch"}
    found["missing"] += [name for name in PROGRAMS if shutil.which(name, path=environment()["PATH"]) is None]
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        found["headers"] = False
    return Machine(
        **found, nvcc=shutil.which("nvcc", path=path), sanitizer=shutil.which("compute-sanitizer", path=path)
    )
