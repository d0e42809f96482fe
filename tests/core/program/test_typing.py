"""Type checkers know the parameters and results of decorated functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
