"""The process table under any order of events, against a naive model, and with many threads."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from program_rows import AMOUNTS, ENDINGS, ENGINE, identity, info

from weft.core.accounts import Account, Attained
from weft.core.errors import ProgramEndedError
from weft.core.ids import EngineId, ProgramId
from weft.core.process_rows import CallRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.testing import FakeClock

# -- any order of events, and many threads


def test_many_threads_at_once() -> None:
    """Eight threads send, finish and read calls of shared programs: no call is lost and the sums agree."""
    table = ProcessTable()
    programs = ["p0", "p1", "p2"]
    for program in programs:
        table.open(info(program), 0.0)
    together = threading.Barrier(8)

    def work(worker: int) -> None:
        together.wait()
        for number in range(150):
            call = identity(f"{worker}-{number}", f"t{worker}", programs[(worker + number) % 3])
            row, _ = table.arrive(call, ENGINE, float(number))
            row.account = Account(service_s=1.0, wait_s=0.5)
            table.leave(row, float(number))
            table.leave(row, float(number))
            assert len(list(table)) == 3

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, worker) for worker in range(8)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    table.check_integrity()
    assert sum(row.calls for row in table) == 8 * 150
    assert sum(row.attained.total_service_s for row in table) == 8 * 150
    assert sum(row.attained.total_wait_s for row in table) == 8 * 150 / 2


def test_only_one_of_many_threads_closes_a_program() -> None:
    """A program that ends on several threads at once has one last row, which counts each call once."""
    table = ProcessTable()
    table.open(info(), 0.0)
    for number in range(20):
        table.arrive(identity(f"c{number}"), ENGINE, 0.0)[0].account = Account(service_s=1.0)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda _: table.close(ProgramId("p"), ProgramState.FINISHED, 1.0), range(8)))
    [row] = [row for row in rows if row is not None]
    assert row.attained == Attained(service_s=1.0, total_service_s=20.0)
    assert table.ended() == [row]


@dataclass
class Sent:
    """A call in the log of events."""

    program: str
    thread: str
    engine: str
    arrived: int  # index of the event
    at_s: float
    left: int | None = None
    left_s: float = math.nan
    account: Account = field(default_factory=Account)


@dataclass
class Opened:
    """A program in the log of events."""

    at_s: float
    state: ProgramState | None = None
    end_s: float = math.nan


class TableMachine(RuleBasedStateMachine):
    """Any order of open, arrive, charge, leave and close, checked against sums over a log of the events."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ProcessTable()
        self.clock = FakeClock()
        self.programs: dict[str, Opened] = {}
        self.calls: dict[str, Sent] = {}
        self.rows: dict[str, CallRow] = {}
        self.events = 0

    # -- events

    def tick(self) -> int:
        self.clock.advance(1.0)
        self.events += 1
        return self.events

    @rule()
    def open(self) -> None:
        self.tick()
        program = f"p{len(self.programs)}"
        self.table.open(info(program), self.clock())
        self.programs[program] = Opened(self.clock())

    @precondition(lambda self: self.programs)
    @rule(data=st.data(), thread=st.sampled_from("tuv"), engine=st.sampled_from(["e0", "e1"]))
    def arrive(self, data: st.DataObject, thread: str, engine: str) -> None:
        event = self.tick()
        program = data.draw(st.sampled_from(sorted(self.programs)))
        call = f"c{len(self.calls)}"
        if self.programs[program].state is not None:
            with pytest.raises(ProgramEndedError):
                self.table.arrive(identity(call, thread, program), EngineId(engine), self.clock())
            return
        expected = self.attained(program)
        row, sent = self.table.arrive(identity(call, thread, program), EngineId(engine), self.clock())
        assert sent == expected
        assert row.inherited == expected
        self.calls[call] = Sent(program, thread, engine, event, self.clock())
        self.rows[call] = row

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), service_s=AMOUNTS, wait_s=AMOUNTS, tokens=st.integers(0, 9))
    def output(self, data: st.DataObject, service_s: float, wait_s: float, tokens: int) -> None:
        """A call's account arrives, perhaps after the call has left."""
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.rows[call].account = Account(service_s, wait_s, output_tokens=tokens)
        if self.calls[call].left is None:
            self.calls[call].account = self.rows[call].account

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A call leaves, perhaps for the second time, perhaps after its program's end."""
        event = self.tick()
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.table.leave(self.rows[call], self.clock())
        sent = self.calls[call]
        if sent.left is None:
            sent.left, sent.left_s = event, self.clock()

    @precondition(lambda self: self.programs)
    @rule(data=st.data(), state=st.sampled_from(ENDINGS))
    def close(self, data: st.DataObject, state: ProgramState) -> None:
        event = self.tick()
        program = data.draw(st.sampled_from(sorted(self.programs)))
        row = self.table.close(ProgramId(program), state, self.clock())
        assert (row is None) == (self.programs[program].state is not None)
        if row is None:
            return
        self.programs[program].state, self.programs[program].end_s = state, self.clock()
        for sent in self.calls.values():
            if sent.program == program and sent.left is None:
                sent.left, sent.left_s = event, self.clock()

    # -- expectations

    def of(self, program: str, thread: str | None = None) -> dict[str, Sent]:
        return {
            call: sent for call, sent in self.calls.items() if sent.program == program and thread in (None, sent.thread)
        }

    def longest_chain(self, program: str, before: float = math.inf) -> tuple[float, float]:
        """Service and wait of the longest chain of calls that left before an event, computed from its definition."""
        chains = [(0.0, 0.0)]
        for sent in self.of(program).values():
            if sent.left is not None and sent.left < before:
                service_s, wait_s = self.longest_chain(program, sent.arrived)
                chains.append((service_s + sent.account.service_s, wait_s + sent.account.wait_s))
        return max(chains)

    def attained(self, program: str) -> Attained:
        left = [sent for sent in self.of(program).values() if sent.left is not None]
        service_s, wait_s = self.longest_chain(program)
        return Attained(
            service_s, sum(sent.account.service_s for sent in left), wait_s, sum(sent.account.wait_s for sent in left)
        )

    @invariant()
    def it_adds_up(self) -> None:
        self.table.check_integrity()

    @invariant()
    def rows_are_the_programs_that_run(self) -> None:
        live = [program for program, opened in self.programs.items() if opened.state is None]
        assert [row.info.program_id for row in self.table] == live
        assert len(self.table) == len(live)
        ended = sorted((opened.end_s for opened in self.programs.values() if opened.state is not None), reverse=True)
        assert [row.end_s for row in self.table.ended()] == ended

    @invariant()
    def rows_say_what_happened(self) -> None:
        for row in [*self.table, *self.table.ended()]:
            program = row.info.program_id
            opened, calls = self.programs[program], self.of(program)
            active = {call for call, sent in calls.items() if sent.left is None}
            assert row.attained == self.attained(program)
            assert row.calls == len(calls)
            assert set(row.active) == active
            assert row.state is (opened.state or (ProgramState.ACTIVE if active else ProgramState.IDLE))
            assert row.start_s == opened.at_s
            latest_first = dict.fromkeys(sent.engine for sent in reversed(calls.values()))
            assert row.engine_ids == [*latest_first][::-1]
            assert row.account == sum((sent.account for sent in calls.values() if sent.left is not None), Account())
            assert same(row.last_arrival_s, max((sent.at_s for sent in calls.values()), default=math.nan))
            left = [sent.left_s for sent in calls.values() if sent.left is not None]
            assert same(row.last_completion_s, max(left, default=math.nan))
            assert row.thread_count == len(row.threads)
            assert set(row.threads) == {sent.thread for sent in calls.values()}
            for name, thread in row.threads.items():
                mine = self.of(program, name)
                assert thread.calls == len(mine)
                assert thread.arrival_s == min(sent.at_s for sent in mine.values())
                assert set(thread.active) == set(mine) & active


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


TestTableMachine = TableMachine.TestCase
TestTableMachine.__doc__ = "After any order of events, the table agrees with the log of events."
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=30)
