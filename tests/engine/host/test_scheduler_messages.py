"""Messages to schedulers, on a real event-loop thread and with schedulers that the test answers for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from polling import until

from weft.core.accounts import Account
from weft.core.errors import EngineDiedError
from weft.core.ids import EngineId, ProgramId
from weft.core.process_rows import ProgramState
from weft.core.process_table import ProcessTable
from weft.core.program import Program
from weft.core.program.graph import CallState
from weft.engine.host.scheduler_messages import AbortedCall, SchedulerMessages
from weft.engine.processes.loop_thread import LoopThread
from weft.engine.wire.control import CallKey, EventKind, ProgramEvent, ProgramEvents, decode_control
from weft.engine.wire.reports import encode_aborted, encode_account

pytestmark = pytest.mark.anyio


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.stop()


class Schedulers:
    """Two schedulers. They answer when `answers` is set, and fail while `fails`."""

    def __init__(self, loop: LoopThread) -> None:
        self.table = ProcessTable()
        self.messages: list[Mapping[str, Any]] = []
        self.accounts: dict[CallKey, Account] = {}
        self.late: dict[CallKey, Account] = {}  # accounts of calls whose aborts come after the next question
        self.answers = asyncio.Event()
        self.answers.set()
        self.fails = False
        self.under_test = SchedulerMessages(loop, self.send, self.table)

    async def send(self, message: Mapping[str, Any]) -> list[Any]:
        self.messages.append(message)
        await self.answers.wait()
        if self.fails:
            raise EngineDiedError
        if message["type"] == "program_events":
            return [{}, None]
        if message["type"] == "programs_ended":
            return [{"ended": 0}, None]
        keys = [key for key in map(tuple, message["calls"]) if key in self.accounts]
        found = {key: encode_account(self.accounts.pop(key)) for key in keys}
        self.accounts |= self.late
        return [None, encode_aborted(found)]

    def aborted_call(self, program: Program, service_s: float) -> AbortedCall:
        """A call that has left with this service so far."""
        identity = program.reports.start_call("run")
        row, _ = self.table.arrive(identity, EngineId("e"), 0.0)
        program.reports.call_arrived(identity.call_id, 0.0)
        row.account = Account(service_s)
        self.table.leave(row, 1.0)
        program.reports.call_left(identity.call_id, 1.0, row.account, CallState.CANCELLED)
        return AbortedCall(program, row)


def key_of(call: AbortedCall) -> CallKey:
    return call.row.identity.program_id, call.row.identity.call_id


@pytest.fixture
def it(loop: LoopThread) -> Schedulers:
    return Schedulers(loop)


async def test_the_table_and_the_graph_get_the_final_account(it: Schedulers) -> None:
    """A question follows every abort, so the row settles although no further call is made."""
    program = Program()
    it.table.open(program._shared.info, 0.0)
    call = it.aborted_call(program, 1.0)
    it.accounts[key_of(call)] = Account(3.0)
    it.under_test.call_aborted(call)
    await until(lambda: it.under_test.is_idle)
    row = it.table.get(program.program_id)
    assert row is not None
    assert (row.account.service_s, row.attained.total_service_s) == (3.0, 3.0)
    assert [node.account.service_s for node in program.graph.calls] == [3.0]
    assert len(it.messages) == 1


async def test_a_question_that_overtakes_an_abort_is_repeated_once(it: Schedulers) -> None:
    """A call that no scheduler knows, for example because it never reached one, is asked for twice and then dropped."""
    program = Program()
    it.table.open(program._shared.info, 0.0)
    late, unknown = it.aborted_call(program, 1.0), it.aborted_call(program, 0.0)
    it.late[key_of(late)] = Account(2.0)
    it.under_test.call_aborted(late)
    it.under_test.call_aborted(unknown)
    await until(lambda: it.under_test.is_idle)
    row = it.table.get(program.program_id)
    assert row is not None
    assert row.account.service_s == 2.0
    assert sum(list(key_of(unknown)) in message["calls"] for message in it.messages) == 2


async def test_what_comes_while_a_message_is_under_way_shares_the_next_one(loop: LoopThread, it: Schedulers) -> None:
    """A crowd of clients that leave costs a few messages, not one each. A failure loses one message only."""
    it.answers.clear()
    programs = [Program() for _ in range(100)]
    it.under_test.program_ended(programs[0].program_id, ProgramState.FINISHED)
    await until(lambda: it.messages)
    for program in programs[1:]:
        it.under_test.program_ended(program.program_id, ProgramState.FINISHED)
    it.fails = True
    loop.call_soon(it.answers.set)
    await until(lambda: it.under_test.is_idle)
    assert [len(message["program_ids"]) for message in it.messages] == [1, 99]
    it.fails = False
    it.under_test.program_ended(programs[0].program_id, ProgramState.FINISHED)
    await until(lambda: len(it.messages) == 3)


async def test_abandoned_programs_are_told_from_those_that_ended(it: Schedulers) -> None:
    """The scheduler must not learn from a program that a time-out ended."""
    ended, abandoned = Program(), Program()
    it.under_test.program_ended(ended.program_id, ProgramState.FINISHED)
    it.under_test.program_ended(abandoned.program_id, ProgramState.ABANDONED)
    await until(lambda: it.under_test.is_idle)
    assert [each for message in it.messages for each in message["program_ids"]] == [ended.program_id]
    assert [each for message in it.messages for each in message["abandoned"]] == [abandoned.program_id]


async def test_what_happens_between_calls_is_told_in_order_and_once(loop: LoopThread, it: Schedulers) -> None:
    """A tool that returns while a message is under way has not begun after that. An announcement that is repeated says
    no more than one."""
    it.answers.clear()
    started = ProgramEvent(EventKind.TOOL_STARTED, ProgramId("a"), "search", 1)
    ended = ProgramEvent(EventKind.TOOL_ENDED, ProgramId("a"), "search", 1, 0.5)
    soon = ProgramEvent(EventKind.PREFETCH, ProgramId("a"))
    it.under_test.happened(soon)
    await until(lambda: it.messages)
    for event in (started, soon, soon, ended, soon):
        it.under_test.happened(event)
    loop.call_soon(it.answers.set)
    await until(lambda: len(it.messages) == 2)
    assert decode_control(it.messages[1]) == ProgramEvents((started, soon, ended))


async def test_a_scheduler_that_does_not_answer_costs_a_bounded_memory(loop: LoopThread, it: Schedulers) -> None:
    """The latest 10,000 items wait."""
    it.answers.clear()
    for number in range(30_000):
        it.under_test.program_ended(f"p{number}", ProgramState.FINISHED)  # type: ignore[arg-type]  # a plain string will do
    await until(lambda: it.messages)
    assert len(it.under_test._ended._unsent) <= 10_000
    loop.call_soon(it.answers.set)
    await until(lambda: it.under_test.is_idle)
    assert sum(len(message["program_ids"]) for message in it.messages) <= 20_000
