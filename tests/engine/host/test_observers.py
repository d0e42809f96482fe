"""Observers of an engine's programs."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from weft.core.errors import EngineClosedError
from weft.core.program import Program
from weft.core.program.observer import ProgramObserver
from weft.testing import ScriptedEngine


class Noted(ProgramObserver):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def program_started(self, info: Any, now_s: float) -> None:
        self.events.append(("program started", info.name, now_s))

    def call_arrived(self, identity: Any, graph: Any, now_s: float) -> None:
        self.events.append(("call arrived", graph[identity.call_id].label, now_s))

    def call_refused(self, identity: Any, error: BaseException, now_s: float) -> None:
        self.events.append(("call refused", type(error), now_s))

    def call_left(self, row: Any, outcome: Any, now_s: float) -> None:
        self.events.append(("call left", str(outcome), row.account.service_s, now_s))

    def tool_started(self, program_id: Any, tool: Any) -> None:
        self.events.append(("tool started", tool.name, tool.start_s))

    def tool_ended(self, program_id: Any, tool: Any, now_s: float) -> None:
        self.events.append(("tool ended", tool.name, now_s))

    def program_ended(self, row: Any, state: Any, now_s: float) -> None:
        self.events.append(("program ended", row.calls, str(state), now_s))


class Failing(ProgramObserver):
    """Cannot do what it is told."""

    def call_arrived(self, identity: Any, graph: Any, now_s: float) -> None:
        raise RuntimeError("this observer is broken")


def run(engine: ScriptedEngine, program: Program) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    engine.chat_sync(body, program, program.reports.start_call(object()))


def test_an_observer_hears_of_programs_calls_and_tools_in_their_order() -> None:
    """A monitor needs the times of each, by the engine's clock."""
    engine = ScriptedEngine(["one", "two"], latency_s=2.0)
    noted = Noted()
    engine.observe(noted)
    program = weft.Program("agent")
    run(engine, program)
    engine.programs.tool_started(program.program_id, "run", "search")
    engine.clock.advance(3.0)
    engine.programs.tools_ended(program.program_id, ["run"])
    run(engine, program)
    program.end()
    engine.shutdown()
    assert noted.events == [
        ("program started", "agent", 0.0),
        ("call arrived", "", 0.0),
        ("call left", "finished", 2.0, 2.0),
        ("tool started", "search", 2.0),
        ("tool ended", "search", 5.0),
        ("call arrived", "", 5.0),
        ("call left", "finished", 2.0, 7.0),
        ("program ended", 2, "finished", 7.0),
    ]


def test_an_observer_hears_of_a_refused_call() -> None:
    """A call that was not admitted never arrives, so nothing else tells of it."""
    engine = ScriptedEngine([])
    noted = Noted()
    engine.observe(noted)
    program = weft.Program("agent")
    engine.shutdown()
    with pytest.raises(EngineClosedError):
        run(engine, program)
    assert noted.events == [("call refused", EngineClosedError, 0.0)]


def test_an_observer_that_fails_is_warned_of_once_and_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Monitoring must not cost a call."""
    engine = ScriptedEngine(["one", "two"])
    noted = Noted()
    engine.observe(Failing())
    engine.observe(noted)
    program = weft.Program("agent")
    run(engine, program)
    run(engine, program)
    engine.shutdown()
    assert [each[0] for each in noted.events].count("call left") == 2
    assert [record.getMessage() for record in caplog.records] == ["an observer of programs failed observer=Failing"]
