"""Real clients from PyPI and npm, pinned, each in a folder of its own outside the repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import platformdirs
import pytest
from filelock import FileLock

VARIABLE = "WEFT_TEST_CLIENTS"  # the folder that keeps them; a run installs what is missing
NEWEST = "WEFT_NEWEST_CLIENTS"  # any value: the newest ones instead of the pinned ones, for `make newest-…`
_INSTALL_S = 900


@dataclass(frozen=True)
class Package:
    """A client.

    Attributes:
        name: Of its folder.
        version: As the table of clients shows it.
        kind: Where it comes from.
        requirements: What is installed.
        command: Its program in npm's folder.
        is_small: It is installed, and its cases run, in half a minute, so CI does that, too.
    """

    name: str
    version: str
    kind: Literal["pypi", "npm"]
    requirements: tuple[str, ...]
    command: str = ""
    is_small: bool = False

    @property
    def folder(self) -> Path:
        root = os.environ.get(VARIABLE)
        digest = hashlib.sha256(" ".join(self.requirements).encode()).hexdigest()[:8]
        return (Path(root) if root else platformdirs.user_cache_path("weft-test-clients")) / f"{self.name}-{digest}"

    @property
    def program(self) -> str:
        """The Python of its environment, or its command."""
        return str(self.folder / ("bin/python" if self.kind == "pypi" else f"node_modules/.bin/{self.command}"))


def installed(package: Package) -> Package:
    """Install a package unless it is there. Skips the test, with the reason, where that cannot be done."""
    if os.environ.get(NEWEST):
        free = tuple(requirement.partition("==")[0] for requirement in package.requirements)
        package = replace(package, requirements=free)
    folder = package.folder
    if package.kind == "npm" and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = folder.with_suffix(".new")
            shutil.rmtree(made, ignore_errors=True)
            for command in _commands(package, made):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
                if done.returncode:
                    said = (done.stderr or done.stdout).strip().splitlines()
                    pytest.skip(f"{package.name} cannot be installed: {said[-1] if said else done.returncode}")
            made.rename(folder)  # the scripts of an environment name its former folder; its Python does not
    return package


def _commands(package: Package, folder: Path) -> list[list[str]]:
    if package.kind == "npm":
        folder.mkdir()
        quiet = ["--no-audit", "--no-fund", "--silent"]
        return [["npm", "install", "--prefix", str(folder), *quiet, *package.requirements]]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-compile"]
    return [
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*pip, "--disable-pip-version-check", *package.requirements],
    ]
