"""The programs that clients name, without an engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from weft.core.accounts import Account
from weft.core.errors import KeyLimitError
from weft.core.identity import Identity, Source
from weft.core.ids import ProgramId
from weft.core.prediction.times import LONGEST_S, SHORTEST_S
from weft.core.process_rows import ProgramRow, ProgramState
from weft.core.program.idle import IdlePrograms
from weft.core.testing import FakeClock, RecordingBackend
from weft.engine.serve import programs
from weft.engine.serve.programs import OpenPrograms


def identity(name: str = "p", scope: str = "-") -> Identity:
    return Identity(Source.WEFT, ProgramId(f"{scope}/{name}"), program_name="agent")


def test_calls_of_one_id_are_one_program() -> None:
    """It stays open between its calls."""
    opened = OpenPrograms(FakeClock())
    first = opened.enter(identity())
    opened.leave(first)
    assert opened.enter(identity()) is first


def test_a_program_knows_the_program_around_it() -> None:
    """The client has said so with the first call."""
    opened = OpenPrograms(FakeClock())
    program = opened.enter(replace(identity(), parent_program_id=ProgramId("-/outer")))
    assert program.parent_program_id == "-/outer"
    assert program.graph.parent_program_id == "-/outer"


def test_a_program_ends_after_its_calls() -> None:
    """The last call may leave before others do."""
    opened = OpenPrograms(FakeClock())
    program = opened.enter(identity())
    opened.enter(identity())
    opened.end_after_calls(program.program_id)
    opened.leave(program)
    assert program.program_id in opened
    opened.leave(program)
    assert program.program_id not in opened
    assert program.state is ProgramState.FINISHED


def test_a_call_of_an_ended_program_leaves_its_successor_alone() -> None:
    """An id that is used again after its program's end is a new program."""
    opened = OpenPrograms(FakeClock())
    first = opened.enter(identity())
    opened.end(first.program_id)
    second = opened.enter(identity())
    opened.leave(first)
    assert second is not first
    assert second.program_id in opened


def test_too_many_programs_end_the_longest_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with a call in flight is never ended."""
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    opened = OpenPrograms(FakeClock())
    busy = opened.enter(identity("busy"))
    for name in "abc":
        opened.leave(opened.enter(identity(name)))
    assert len(opened) == 2
    assert {busy.program_id, "-/c"} == {each for each in ("-/busy", "-/a", "-/b", "-/c") if ProgramId(each) in opened}


def test_a_key_with_many_programs_ends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other key's only program has been idle for longer, and stays open."""
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 3)
    opened = OpenPrograms(FakeClock())
    theirs = opened.enter(identity("theirs", "quiet"))
    opened.leave(theirs)
    for number in range(10):
        opened.leave(opened.enter(identity(str(number), "loud")))
    assert theirs.program_id in opened
    assert [program.program_id for program in opened.of("loud")] == ["loud/8", "loud/9"]


def test_a_key_at_its_limit_ends_its_longest_idle_program() -> None:
    """Most programs are never ended by their clients, so a refusal would last for minutes."""
    opened = OpenPrograms(FakeClock())
    busy = opened.enter(identity("busy"), 2)
    for name in "ab":
        opened.leave(opened.enter(identity(name), 2))
    assert [program.program_id for program in opened.of("-")] == [busy.program_id, "-/b"]


def test_a_key_whose_programs_are_all_busy_opens_no_other() -> None:
    """A further call of an open one is taken, and so is another key's program."""
    opened = OpenPrograms(FakeClock())
    opened.enter(identity("busy"), 1)
    with pytest.raises(KeyLimitError, match="1 programs with calls in flight"):
        opened.enter(identity("more"), 1)
    opened.enter(identity("busy"), 1)
    opened.enter(identity("busy", "other"), 1)
    assert len(opened) == 2


def test_the_idle_time_is_learned_from_gaps() -> None:
    """Programs of a name that always go on within a second end soon, those of another key do not."""
    clock = FakeClock()
    opened = OpenPrograms(clock)
    first = opened.enter(identity())
    assert first.reports.idle_timeout_s == LONGEST_S
    opened.leave(first)
    for _ in range(8):
        clock.advance(1.0)
        opened.leave(opened.enter(identity()))
    assert opened.enter(identity("q")).reports.idle_timeout_s == SHORTEST_S
    assert opened.enter(identity("q", "other-key")).reports.idle_timeout_s == LONGEST_S


def test_a_gap_that_was_too_long_is_learned() -> None:
    """A program that comes back after it was given up makes the time longer."""
    clock = FakeClock()
    opened = OpenPrograms(clock)
    opened.leave(opened.enter(identity()))
    for _ in range(8):
        clock.advance(1.0)
        opened.leave(opened.enter(identity()))
    program_id = identity("q").program_id
    opened.leave(opened.enter(identity("q")))
    opened.forget(program_id)
    clock.advance(100.0)
    opened.leave(opened.enter(identity("q")))
    assert opened.enter(identity("r")).reports.idle_timeout_s == 400.0


# -- programs whose client falls silent


def silent(answers: list[bool]) -> ProgramRow:
    """The last row of a program that makes a call a second, each answered finally or not, and then none for an hour."""
    clock = FakeClock()
    backend, opened, idle = RecordingBackend(clock), OpenPrograms(clock), IdlePrograms()
    for run, is_final in enumerate(answers):
        program = opened.enter(identity())
        call = backend.begin(program, run)
        opened.asked(call.identity)
        clock.advance(1)
        backend.finish(program, run, call, Account())
        opened.leave(program)
        if is_final:
            opened.answered(call.identity)
        idle.watch(program, clock())
    idle.check(clock(), lambda _program: False)
    clock.advance(3600)
    idle.check(clock(), lambda _program: False)
    (row,) = backend.table.ended()
    return row


def test_a_program_whose_client_falls_silent_after_its_last_answer_is_finished() -> None:
    """Clients over HTTP report no end. It ended with the answer, so the time after that is no tool's."""
    row = silent([False, True])
    assert (row.state, row.end_s) == ("finished", 2.0)


def test_a_program_whose_client_falls_silent_before_is_abandoned() -> None:
    """The model asked for a tool, and nobody sent its result: perhaps the tool ran until the client died."""
    row = silent([True, False])
    assert (row.state, row.end_s) == ("abandoned", 3602.0)


def test_a_program_that_a_client_ends_has_ended_then() -> None:
    """Whatever it did after its last answer is a part of it."""
    clock = FakeClock()
    backend, opened = RecordingBackend(clock), OpenPrograms(clock)
    program = opened.enter(identity())
    call = backend.begin(program, "run")
    opened.asked(call.identity)
    backend.finish(program, "run", call, Account())
    opened.leave(program)
    opened.answered(call.identity)
    clock.advance(5)
    opened.end(program.program_id)
    (row,) = backend.table.ended()
    assert (row.state, row.end_s) == ("finished", 5.0)


def test_one_thread_that_waits_keeps_its_program_unfinished() -> None:
    """A sub-agent's last answer is not that of the agent that has asked it."""
    clock = FakeClock()
    backend, opened = RecordingBackend(clock), OpenPrograms(clock)
    program = opened.enter(identity())
    chief, helper = backend.begin(program, "chief"), backend.begin(program, "helper")
    assert chief.identity.thread_id != helper.identity.thread_id
    for call in (chief, helper):
        opened.asked(call.identity)
        opened.answered(helper.identity)
    row = backend.table.get(program.program_id)
    assert row is not None
    assert math.isnan(row.answered_s)
    opened.answered(chief.identity)
    assert row.answered_s == 0.0


def test_a_thread_that_has_ended_without_an_answer_waits_for_nothing() -> None:
    """A sub-agent's call failed for good, and the agent that has asked it goes on without it."""
    clock = FakeClock()
    backend, opened = RecordingBackend(clock), OpenPrograms(clock)
    program = opened.enter(identity())
    chief, helper = backend.begin(program, "chief"), backend.begin(program, "helper")
    opened.asked(chief.identity)
    opened.asked(helper.identity)
    opened.asked(chief.identity, ended=[helper.identity.thread_id])
    opened.answered(chief.identity)
    row = backend.table.get(program.program_id)
    assert row is not None
    assert row.answered_s == 0.0


@pytest.mark.parametrize(
    ("opening", "is_after", "is_over"), [(b"Hi", True, True), (b"", True, False), (b"Hi", False, False)]
)
@pytest.mark.parametrize("is_selected", [False, True])
def test_an_agent_that_has_handed_its_conversation_on_waits_for_nothing(
    opening: bytes, is_after: bool, is_over: bool, is_selected: bool
) -> None:
    """The other one goes on with it and answers, perhaps because a third one says so, as AutoGen's selector does. One
    that works beside it has not got it."""
    clock = FakeClock()
    backend, opened = RecordingBackend(clock), OpenPrograms(clock)
    program = opened.enter(identity())
    desk, reporter = backend.begin(program, "desk"), backend.begin(program, "reporter")
    opened.asked(desk.identity, b"Hi")
    before = desk.identity
    if is_selected:
        before = replace(backend.begin(program, "selector").identity, parents=(before.call_id,))
        opened.asked(before, b"Who is next?")
        opened.answered(before)
    opened.asked(replace(reporter.identity, parents=(before.call_id,) if is_after else ()), opening)
    opened.answered(reporter.identity)
    row = backend.table.get(program.program_id)
    assert row is not None
    assert math.isnan(row.answered_s) is not is_over
