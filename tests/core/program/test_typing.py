"""Type checkers know the parameters and results of decorated functions, and the arguments of engines."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from background import CommandResult

import weft

CASES = Path(__file__).with_name("typing_cases.py")
ROOT = CASES.parents[3]
CHECKERS = {
    "mypy": ["mypy", "--no-error-summary"],
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


def in_background(checker: str) -> ParameterSet:
    """A type checker that reads the repository's settings, which it finds in its working directory."""
    command = [*CHECKERS[checker], str(CASES)]
    run = f"sys.argv = {command}; runpy.run_module({checker!r}, run_name='__main__')"
    source = f"import os, runpy, sys; os.chdir({str(ROOT)!r}); {run}"
    return pytest.param(marks=pytest.mark.background("-c", source), id=checker)


@pytest.mark.parametrize((), [in_background(checker) for checker in CHECKERS])
def test_a_type_checker_refuses_exactly_the_wrong_calls(command_result: CommandResult) -> None:
    """A wrong call of a decorated function is an error before it runs, and a right one is none."""
    found = {int(line) for line in re.findall(rf"{CASES.name}:(\d+):.* error\b", command_result.stdout)}
    expected = {number for number, line in enumerate(CASES.read_text().splitlines(), 1) if "  # refused" in line}
    assert found == expected, command_result.stdout + command_result.stderr


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
def test_create_has_the_parameters_of_the_engine(kind: type) -> None:
    """Editors and notebooks show the arguments of `create`, which are those of the class."""
    assert inspect.signature(kind.create) == inspect.signature(kind)
    assert "max_calls" in inspect.signature(kind.create).parameters
