"""Type checkers know the parameters and results of decorated functions, and the arguments of engines."""

from __future__ import annotations

import inspect

import pytest
from background import CommandResult
from type_checks import CASES, by_both_checkers, errors, refused

import weft


@by_both_checkers
def test_a_type_checker_refuses_exactly_the_wrong_calls(command_result: CommandResult) -> None:
    """A wrong call of a decorated function is an error before it runs, and a right one is none."""
    found = {line for name, line in errors(command_result) if name == CASES.stem}
    assert found == refused(CASES.read_text()), command_result


@pytest.mark.parametrize("kind", [weft.Engine, weft.AsyncMultiLLMEngine])
def test_create_has_the_parameters_of_the_engine(kind: type) -> None:
    """Editors and notebooks show the arguments of `create`, which are those of the class."""
    assert inspect.signature(kind.create) == inspect.signature(kind)
    assert "max_calls" in inspect.signature(kind.create).parameters
