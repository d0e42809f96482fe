"""The process table and its rows as terminals and notebooks show them."""

from __future__ import annotations

import io
import math
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from weft.core.accounts import Account
from weft.core.class_rows import Branch, ClassRow, together
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.prediction import ForecastRow, Tier
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program.graph import CallNode, ProgramGraph
from weft.core.program.graph.flowchart import calls

HOSTILE = "</td><script>alert(1)</script>[red]\x1b[31m\n[/oops]&"


def shown(thing: object) -> str:
    """What rich prints of an object in a terminal of 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def opened(table: ProcessTable, name: str, at_s: float = 0.0) -> ProgramId:
    program_id = ProgramId(f"prog-{at_s}")
    table.open(ProgramInfo(program_id, SessionId("session"), name, tenant="acme"), at_s)
    return program_id


def ended(table: ProcessTable, name: str, at_s: float = 0.0, state: ProgramState = ProgramState.FINISHED) -> ProgramRow:
    """Run a program of one call, which takes 12 s."""
    program_id = opened(table, name, at_s)
    call = CallIdentity(program_id, ThreadId("t"), f"call-{at_s}")  # type: ignore[arg-type]
    row, _ = table.arrive(call, EngineId("engine-0"), at_s)
    row.account = Account(service_s=1.25, wait_s=0.5, prompt_tokens=1234, output_tokens=56)
    table.leave(row, at_s + 12.0)
    closed = table.close(program_id, state, at_s + 12.0)
    assert closed is not None
    return closed


@pytest.mark.parametrize("state", [state for state in ProgramState if state not in ("idle", "active")])
def test_an_ended_program_is_shown_with_its_state(state: ProgramState) -> None:
    """Its row stays among the ended ones, and the table fits a terminal of 80 columns."""
    table = ProcessTable()
    ended(table, "a long name of an agent", state=state)
    text = shown(table)
    assert f" {state}" in text
    assert "12.0" in text
    assert "…" not in text.replace("a long name …", "")


def test_print_shows_the_process_table() -> None:
    """`print(engine.table)` has a line for each program, those that run and those that have ended."""
    table = ProcessTable()
    ended(table, "first")
    opened(table, "second", 20.0)
    lines = str(table).splitlines()
    assert lines[0] == "process table"
    assert [line.split()[0] for line in lines[-2:]] == ["first", "second"]
    assert lines[-2].split()[1:] == ["1", "1", "1234/56", "1.25", "0.50", "0.00", "0", "12.0", "finished"]
    assert "1 programs, 1 have ended" in repr(table)


def test_a_row_is_printed_as_facts() -> None:
    """A row names what its numbers mean."""
    text = str(ended(ProcessTable(), "answer"))
    assert "answer (prog-0.0)" in text
    assert "1.25 s along the longest chain of calls" in text
    assert "1234 in, 56 out" in text
    assert "ProgramRow(" not in text


def test_the_table_shows_where_kv_was_found_if_any_was_lost() -> None:
    """Found on the device, fetched from host memory, computed again: a table of its own, as soon as there is loss."""
    table = ProcessTable()
    row = ended(table, "first")
    assert "again" not in str(table)
    row.account = Account(prompt_tokens=900, cached_tokens=500, fetched_tokens=150, recomputed_tokens=70)
    assert str(table).splitlines()[-1].split() == ["first", "900", "350", "150", "70"]
    assert "again" in shown(table)
    assert "…" not in shown(table)
    assert "again" in table._repr_html_()
    assert "350 tokens found on the device, 150 fetched from host memory, 70 computed again" in str(row)


def test_tenants_and_deadlines_are_shown_if_there_are_some() -> None:
    """A column of one tenant says nothing. A program is due when its deadline or its time-out comes first."""
    table = ProcessTable()
    ended(table, "first")
    assert "tenant" not in str(table)
    assert "due" not in str(table)
    info = ProgramInfo(ProgramId("p"), SessionId("s"), "second", tenant="other", timeout_s=60.0, deadline_s=30.0)
    table.open(info, 20.0)
    row = table.get(info.program_id)
    assert row is not None
    assert row.due_s == 50.0
    assert str(table).splitlines()[-1].split()[-2:] == ["other", "30.0"]
    assert "30.0 s after its first call" in str(row)


def test_of_many_programs_those_that_run_are_shown() -> None:
    """A table of thousands of programs stays readable: 50 lines, and a title that says how many are left out."""
    table = ProcessTable()
    runs = opened(table, "runs")
    for number in range(1, 100):
        ended(table, f"ended {number}", float(number))
    lines = str(table).splitlines()
    assert lines[0] == "process table: 50 of 100 programs"
    assert len(lines) == 54
    assert table.get(runs) is not None
    assert "runs" in lines[-50]
    assert "ended 51" in lines[-49]
    assert table._repr_html_().count("<tr>") == 51


@pytest.mark.parametrize("show", [str, shown, lambda thing: thing._repr_html_()], ids=["print", "rich", "html"])
@pytest.mark.parametrize("what", ["table", "row"])
def test_a_name_is_shown_as_it_is(show: object, what: str) -> None:
    """Names come from clients: they are no markup of rich, no HTML and no sequences for the terminal."""
    table = ProcessTable()
    row = ended(table, HOSTILE)
    text = show(table if what == "table" else row)  # type: ignore[operator]
    assert "\x1b" not in text
    assert "<script" not in text or "<table" not in text
    assert "script" in text


def test_the_html_of_a_table_is_well_formed() -> None:
    """A hostile name does not end its cell."""
    table = ProcessTable()
    ended(table, HOSTILE)
    cells = [cell.text for cell in ET.fromstring(table._repr_html_()).iter("td")]  # noqa: S314  our own
    assert cells[0] == HOSTILE.replace("\x1b", " ").replace("\n", " ")
    assert len(cells) == 10


def test_a_program_inside_another_is_shown_with_it() -> None:
    """The last column names the program around it; without such programs there is no column."""
    table = ProcessTable()
    outer = opened(table, "chief")
    assert str(table).splitlines()[-1].split()[-1] != "chief"
    table.open(ProgramInfo(ProgramId("q"), SessionId("s"), "helper", parent_program_id=outer), 2.0)
    (line,) = (line for line in str(table).splitlines() if "helper" in line)
    assert line.split()[-1] == "chief"
    row = table.get(ProgramId("q"))
    assert f"inside {outer}" in " ".join(str(row).split())


def test_the_classes_are_shown_below_the_programs() -> None:
    """What the scheduler knows of a class fits 80 columns, in a terminal and in a notebook."""
    table = ProcessTable()
    ended(table, "chat")
    table.classes = (ClassRow(None, "chat", 1, 0, math.nan, math.nan, Branch.QUEUES),)
    assert "classes" not in str(table), "it is treated as if nothing was known of it"
    table.classes = (
        ClassRow("acme", "chat", 12, 3, 1234.4, 23_456.0, Branch.INDEX, held=2),
        ClassRow(None, "", 1, 0, math.nan, math.nan, Branch.QUEUES),
    )
    text = str(table)
    assert text.splitlines()[-1].split() == ["(no", "name)", "1", "0", "0", "atlas"]
    assert text.splitlines()[-2].split() == ["chat", "12", "3", "2", "1234", "23456", "gittins", "acme"]
    assert max(map(len, text.splitlines())) <= 80
    assert shown(table).split() == text.split()
    root = ET.fromstring(f"<div>{table._repr_html_()}</div>")  # noqa: S314  our own text
    assert [caption.text for caption in root.iter("caption")] == ["process table", "classes"]


def test_forecasts_are_shown_from_the_first_one_on() -> None:
    """While each name is cold, a table would say of each that there is no forecast."""
    table = ProcessTable()
    ended(table, "chat")
    cold, inferred = ForecastRow("chat", Tier.COLD, 3, 2, 1.0), ForecastRow("plan", Tier.INFERRED, 30, 2, 3.0)
    table.forecasts = lambda: [cold]
    assert "forecasts" not in str(table)
    table.forecasts = lambda: [cold, inferred]
    assert [line.split() for line in str(table).splitlines()[-2:]] == [
        ["chat", "cold", "3", "1.0", "2"],
        ["plan", "inferred", "30", "3.0", "2"],
    ]


def test_no_heading_breaks_inside_a_word() -> None:
    """The tables of programs and of calls have whole words as headings, and fit a terminal of 80 columns."""
    table = ProcessTable()
    ended(table, "a long name of an agent", state=ProgramState.ABANDONED)
    graph = ProgramGraph(ProgramId("p"), SessionId("s"), "answer")
    graph.open(CallNode(CallId("c"), ThreadId("t"), (), "a long name of an agent", ("a long name of a tool",)))
    for shown_table in (table.to_table(), calls(graph)):
        assert not [heading for heading in shown_table.headings if "-\n" in heading]
        assert max(map(len, str(shown_table).splitlines())) <= 80


def test_the_classes_of_several_schedulers_are_added_up() -> None:
    """Programs, live and held ones are sums; the distribution is that of the scheduler that has seen most."""
    few = ClassRow(None, "a", 1, 2, math.nan, math.nan, Branch.ALL, held=1)
    many = ClassRow(None, "a", 9, 0, 100.0, 200.0, Branch.ALIKE)
    other = ClassRow("acme", "a", 1, 0, 5.0, 6.0, Branch.INDEX)
    assert together([few, other, many]) == [ClassRow(None, "a", 10, 2, 100.0, 200.0, Branch.ALIKE, held=1), other]
