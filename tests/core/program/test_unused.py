"""The warning about programs that end without a call."""

from __future__ import annotations

import asyncio
import logging

import pytest

import weft
from weft.core.program import handle


@pytest.fixture(autouse=True)
def _first_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_warned", set())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_program_without_a_call_warns_once_for_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """The user has probably forgotten `config=`, so the warning says how to pass a program on."""

    @weft.program
    def answer(question: str, program: weft.Program) -> str:
        return question

    @weft.program
    async def plan(program: weft.Program) -> None:
        del program

    for _ in range(3):
        answer("why?")
        asyncio.run(plan())
    first, second = warnings(caplog)
    assert "config=program.config()" in first
    assert "program=answer" in first
    assert "program=plan" in second


def test_a_program_with_a_call_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """The call may be that of a branch, and it may have been refused."""
    with weft.Program("one") as program:
        program.reports.start_call("call")
    with weft.Program("two") as program, program.branch() as branch:
        branch.reports.start_call("call")
    assert warnings(caplog) == []


def test_a_program_that_fails_before_its_first_call_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """Its exception says what is wrong. A branch without a call is nothing to warn of either."""
    with pytest.raises(KeyError), weft.Program("failing"):
        raise KeyError
    with weft.Program("outer") as program:
        program.reports.start_call("call")
        with program.branch():
            pass
    assert warnings(caplog) == []


def test_the_names_that_are_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A service may make up a name for each program. It must neither fill the memory nor the log."""
    for number in range(handle._MOST_NAMES + 10):
        with weft.Program(f"program {number}"):
            pass
    assert len(handle._warned) == len(warnings(caplog)) == handle._MOST_NAMES


def test_a_program_whose_calls_are_all_made_by_an_inner_program_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    """It was passed on: the inner program names it as its parent."""
    with weft.Program("outer") as outer:
        outer.reports.note_inner()
    assert warnings(caplog) == []
