"""`make gpu-check-wheels`: the packages that `gpu_check.py` needs, for a machine without a network.

They are wheels in the versions and with the checksums of requirements/, for x86-64 Linux. They lie in build/gpu-wheels.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from gpu_machine import ROOT, WHEELS

NAMES: Final = (
    "cmake", "hypothesis", "iniconfig", "nanobind", "ninja", "numpy", "packaging", "pluggy", "psutil", "pygments",
    "pytest", "pytest-asyncio", "pytest-timeout", "sortedcontainers", "structlog", "typing-extensions",
)  # fmt: skip
LOCKS: Final = ("cpu.txt", "gpu-check.txt")
MOST_BYTES: Final = 56 << 20  # of the 64 MiB that may be brought along; the sources have 4
PLATFORMS: Final = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
    "manylinux_2_12_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64",
)  # fmt: skip


def pinned(names: Sequence[str]) -> str:
    """The entries of requirements/ for some packages, with their checksums and without conditions."""
    entries = {}
    for lock in LOCKS:
        text = (ROOT / "requirements" / lock).read_text().replace("\\\n", "")
        for name, version, rest in re.findall(r"^([\w.-]+)==([^\s;]+)(.*)$", text, flags=re.MULTILINE):
            entries[name] = " ".join([f"{name}=={version}", *re.findall(r"--hash=\S+", rest)])
    return "\n".join(entries[name] for name in names) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch the wheels for gpu_check.py into build/gpu-wheels.")
    parser.add_argument("--python", default="3.12", help="Python's version on the machine with the GPU")
    options = parser.parse_args(arguments)
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    requirements = WHEELS / "requirements.txt"
    requirements.write_text(pinned(NAMES))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={options.python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    if code := subprocess.run([*command, "-d", str(WHEELS), "-r", str(requirements)], check=False).returncode:
        print("pip could not fetch the wheels, see above.", file=sys.stderr)
        return code
    folder = WHEELS.relative_to(ROOT)
    size = sum(file.stat().st_size for file in WHEELS.iterdir())
    print(f"{len(list(WHEELS.glob('*.whl')))} wheels for Python {options.python}, {size / 2**20:.1f} MiB, in {folder}")
    if size > MOST_BYTES:
        print(f"That is more than {MOST_BYTES >> 20} MiB, which is what can be brought along.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
