"""What clients say of their programs between two calls, without a model."""

from __future__ import annotations

from typing import Any, cast

import pytest

from weft.core.identity import Identity, Source
from weft.core.ids import ProgramId
from weft.core.process_rows import ProgramState
from weft.core.program import Program
from weft.engine.serve.programs import OpenPrograms, note_events
from weft.engine.wire.control import EventKind, ProgramEvent, ProgramEvents, ProgramsEnded, encode_control
from weft.testing import FakeClock, ScriptedEngine

pytest_plugins = ["weft.testing.fixtures"]
pytestmark = pytest.mark.anyio


class Clients:
    """Two keys' programs of one id, each with a call on a scripted engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.opened = OpenPrograms(FakeClock())

    async def open(self, scope: str) -> Program:
        program = self.opened.enter(Identity(Source.WEFT, ProgramId(f"{scope}/p")))
        messages = [{"role": "user", "content": "Hello"}]
        await self.engine.chat({"messages": messages}, program, program.reports.start_call(object()))
        self.opened.leave(program)
        return program

    def say(self, scope: str, message: dict[str, Any]) -> None:
        note_events(cast("Any", self.engine), self.opened, scope, message)


@pytest.fixture
def clients(scripted_engine: Any) -> Clients:
    return Clients(scripted_engine(lambda _body: "yes"))


def tools(program: Program) -> list[str]:
    assert program.row is not None
    return [tool.name for tool in program.row.tools_running]


async def test_a_tool_runs_in_the_program_of_its_key(clients: Clients) -> None:
    """Another key's program of the same id hears nothing; the tool ends by its number."""
    mine, others = await clients.open("me"), await clients.open("you")
    for kind, shown in ((EventKind.TOOL_STARTED, ["search"]), (EventKind.TOOL_ENDED, [])):
        clients.say("me", encode_control(ProgramEvents((ProgramEvent(kind, ProgramId("p"), "search", 7),))))
        assert (tools(mine), tools(others)) == (shown, [])
    mine.end()
    others.end()


async def test_an_end_is_that_of_the_key(clients: Clients) -> None:
    """Finished or abandoned, as the client says."""
    mine, others = await clients.open("me"), await clients.open("you")
    clients.say("me", encode_control(ProgramsEnded((ProgramId("p"), ProgramId("unknown")))))
    clients.say("you", encode_control(ProgramsEnded((), (ProgramId("p"),))))
    assert (mine.state, others.state) == (ProgramState.FINISHED, ProgramState.ABANDONED)
    assert len(clients.opened) == 0


@pytest.mark.parametrize("state", [ProgramState.FAILED, ProgramState.CANCELLED])
async def test_a_program_ends_in_the_state_that_the_client_names(clients: Clients, state: ProgramState) -> None:
    """It is among all that have ended as well."""
    mine = await clients.open("me")
    ended = ProgramsEnded((ProgramId("p"),))._replace(**{state.value: (ProgramId("p"),)})
    clients.say("me", encode_control(ended))
    assert mine.state is state


async def test_a_sign_of_life_counts(clients: Clients) -> None:
    """A program that goes on is not taken for abandoned."""
    program = await clients.open("me")
    before = program.reports
    clients.say("me", {"type": "programs_open", "program_ids": ["p", "unknown"]})
    assert not program.reports.abandon(before)
    program.end()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "program_events"},
        {"type": "program_events", "events": [["tool_started"], 7, ["prefetch", "q", "", 0, 0.0]]},
        {"type": "programs_ended", "program_ids": {"p": 1}},
        {"type": "programs_open", "program_ids": "p"},
        {"type": "aborted_calls", "call_ids": ["p"]},
        {"type": "use_history", "history": "{}"},
    ],
)
async def test_what_makes_no_sense_changes_nothing(clients: Clients, message: dict[str, Any]) -> None:
    """Nor does a message that only the front end may send."""
    program = await clients.open("me")
    clients.say("me", message)
    assert (program.state, tools(program)) == (ProgramState.IDLE, [])
    program.end()
