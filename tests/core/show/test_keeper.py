"""The timelines of an engine's programs: of those that are open, and of the newest that have ended."""

from __future__ import annotations

import pytest
from timeline_parts import run

from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallIdentity, ProgramInfo, ProgramState, RunningTool
from weft.core.process_table import ProcessTable
from weft.core.program.graph import CallNode, ProgramGraph
from weft.core.show import TimelineTool, keeper
from weft.core.show.keeper import Timelines
from weft.core.testing import FakeClock


class Watched:
    """A table with an observer, as an engine has them."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.table = ProcessTable()
        self.timelines = Timelines(self.table.get, self.clock)

    def begin(self, name: str) -> ProgramGraph:
        """A program of one call starts; its graph."""
        info = ProgramInfo(ProgramId(name), SessionId("s"), name)
        self.table.open(info, self.clock())
        self.timelines.program_started(info, self.clock())
        graph = ProgramGraph(info.program_id, info.session_id, name)
        run(graph, f"{name}-1", (self.clock(), self.clock() + 1))
        self.timelines.call_arrived(identity(name, f"{name}-1"), graph, self.clock())
        return graph

    def end(self, name: str, state: ProgramState = ProgramState.FINISHED) -> None:
        row = self.table.close(ProgramId(name), state, self.clock())
        assert row is not None
        self.timelines.program_ended(row, state, self.clock())


def identity(program: str, call: str) -> CallIdentity:
    return CallIdentity(ProgramId(program), ThreadId("t"), CallId(call))


def test_an_open_program_has_a_timeline_with_its_calls_in_flight() -> None:
    """Their accounts are in the process table, not in the graph."""
    watched = Watched()
    graph = watched.begin("A")
    call, _ = watched.table.arrive(identity("A", "A-2"), None, 2.0)
    graph.open(CallNode(CallId("A-2"), ThreadId("t")))
    graph.arrive(CallId("A-2"), 2.0)
    call.account = Account(0.5, output_tokens=4)
    watched.clock.advance(3.0)
    made = watched.timelines.timeline(ProgramId("A"))
    assert made is not None
    assert (made.state, made.is_open, made.length_s) == ("active", True, 3.0)
    assert [call.output_tokens for call in made.calls] == [3, 4]


def test_an_ended_program_keeps_its_timeline() -> None:
    """With the state in which it ended. Its tools end with it."""
    watched = Watched()
    watched.begin("A")
    watched.timelines.tool_started(ProgramId("A"), RunningTool("web", 1.0, 7))
    watched.timelines.tool_ended(ProgramId("A"), RunningTool("web", 1.0, 7), 2.0)
    watched.timelines.tool_started(ProgramId("A"), RunningTool("sql", 2.0, 8))
    watched.clock.advance(5.0)
    watched.end("A", ProgramState.CANCELLED)
    watched.clock.advance(5.0)
    made = watched.timelines.timeline(ProgramId("A"))
    assert made is not None
    assert (made.state, made.is_open, made.length_s) == ("cancelled", False, 5.0)
    assert made.tools == (TimelineTool("web", 0, 1.0, 2.0), TimelineTool("sql", 0, 2.0, 5.0))


def test_a_program_without_a_call_has_none() -> None:
    """There is nothing to show, and nothing is kept when it ends."""
    watched = Watched()
    info = ProgramInfo(ProgramId("A"), SessionId("s"), "A")
    watched.table.open(info, 0.0)
    watched.timelines.program_started(info, 0.0)
    assert watched.timelines.timeline(ProgramId("A")) is None
    watched.end("A")
    assert list(watched.timelines.ended()) == []


@pytest.mark.parametrize("limit", ["MOST_ENDED", "MOST_ENDED_BYTES"])
def test_the_oldest_ended_programs_are_forgotten(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both their number and their bytes are bounded."""
    monkeypatch.setattr(keeper, limit, 2 if limit == "MOST_ENDED" else 13_000)
    watched = Watched()
    for name in "ABC":
        watched.begin(name)
        watched.end(name)
    assert list(watched.timelines.ended()) == ["C", "B"]
    assert watched.timelines.timeline(ProgramId("A")) is None


def test_an_id_that_is_used_again_names_the_newer_program() -> None:
    """Clients over HTTP choose ids. The earlier program is forgotten when the later one ends."""
    watched = Watched()
    watched.begin("A")
    watched.end("A")
    watched.clock.advance(9.0)
    watched.begin("A")
    made = watched.timelines.timeline(ProgramId("A"))
    assert made is not None
    assert made.is_open
    watched.end("A")
    assert list(watched.timelines.ended()) == ["A"]


def test_runs_of_tools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are forgotten and counted."""
    monkeypatch.setattr(keeper, "MOST_TOOLS", 2)
    watched = Watched()
    watched.begin("A")
    for number in range(5):
        watched.timelines.tool_started(ProgramId("A"), RunningTool("web", float(number), number))
    made = watched.timelines.timeline(ProgramId("A"))
    assert made is not None
    assert (len(made.tools), made.tools_left_out) == (2, 3)
