"""An environment into which the wheel is installed, for the tests of the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    """The end of a command."""

    code: int
    printed: str
    errors: str

    @property
    def output(self) -> str:
        return self.printed + self.errors


class Environment:
    """A virtual environment with the wheel. Its commands run in a folder of their own, so none finds the checkout."""

    def __init__(self, venv: Path, folder: Path, **variables: str) -> None:
        self.venv = venv
        self.folder = folder
        self._variables = variables

    def run(self, command: str, *arguments: str | Path, timeout_s: float = 120) -> Done:
        """Run a command of the environment, without a variable that leads Python elsewhere."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [self.venv / "bin" / command, *arguments],
            cwd=self.folder,
            env=environment | self._variables | {"COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)
