"""The picture of the process table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from weft.core.ids import ProgramId, SessionId
from weft.core.process_table import ProcessTable, ProgramInfo, ProgramState
from weft.views.process_table import process_table


@pytest.mark.parametrize("state", [state for state in ProgramState if state not in ("idle", "active")])
def test_an_ended_program_is_shown_with_its_state(state: ProgramState) -> None:
    """Its row stays among the ended ones, and the table fits a terminal of 80 columns."""
    table = ProcessTable()
    table.open(ProgramInfo(ProgramId("p"), SessionId("s"), "a long name of an agent"), 0.0)
    table.close(ProgramId("p"), state, 12.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(process_table(table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f" {state}" in text
    assert "12.0" in text
