"""Type checkers know the parameters and results of decorated functions, and the arguments of engines."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft

CASES = Path(__file__).with_name("typing_cases.py")
ROOT = CASES.parents[3]
CHECKERS = {
    "mypy": ["mypy", "--no-error-summary", "--config-file", str(ROOT / "pyproject.toml")],
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_refuses_exactly_the_wrong_calls(checker: str) -> None:
    """A wrong call of a decorated function is an error before it runs, and a right one is none."""
    command = [sys.executable, "-m", *CHECKERS[checker], str(CASES)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found = {int(line) for line in re.findall(rf"{CASES.name}:(\d+):.* error\b", run.stdout)}
    expected = {number for number, line in enumerate(CASES.read_text().splitlines(), 1) if line.endswith("# refused")}
    assert found == expected, run.stdout + run.stderr


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
def test_create_has_the_parameters_of_the_engine(kind: type) -> None:
    """Editors and notebooks show the arguments of `create`, which are those of the class."""
    assert inspect.signature(kind.create) == inspect.signature(kind)
    assert "max_calls" in inspect.signature(kind.create).parameters
