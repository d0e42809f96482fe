"""The scheduler's table of programs and calls, without vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.accounts import Attained
from weft.core.ids import CallId, ProgramId, SessionId, ThreadId
from weft.core.policies import Fcfs, PolicyEvent, ProgramEnded, ProgramView
from weft.core.process_rows import CallIdentity
from weft.engine.wire.call_header import CallHeader, program_of_request

call_table = pytest.importorskip("weft.engine.scheduler.call_table", reason="its package imports vLLM")

pytestmark = pytest.mark.engine


class Listening(Fcfs):
    """A policy that notes which programs end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def on_event(self, event: PolicyEvent) -> None:
        if isinstance(event, ProgramEnded):
            self.ended.append(event.program.program_id)


def header(program: str, call: str = "c", **more: object) -> CallHeader:
    return CallHeader(CallIdentity(ProgramId(program), ThreadId("t"), CallId(call)), **more)  # type: ignore[arg-type]


@dataclass
class Tables:
    """A table and its policy."""

    policy: Listening = field(default_factory=Listening)

    def __post_init__(self) -> None:
        self.table = call_table.CallTable(self.policy)

    def open(self, request_id: str, header: CallHeader, now_s: float = 0.0) -> ProgramView:
        entry = self.table.open(request_id, header, 10, now_s)
        self.policy.arrive(entry.call, now_s)
        view: ProgramView = entry.call.program
        return view


def test_a_policy_sees_name_tenant_session_and_deadline() -> None:
    """What travels with a call is there when the policy ranks the call."""
    tables = Tables()
    first = header(
        "p",
        attained=Attained(1.0, 2.0, 3.0, 4.0),
        session_id=SessionId("s"),
        program_name="agent",
        tenant="acme",
        program_calls=4,
        time_left_s=5.0,
    )
    entry = tables.table.open("r", first, 10, 100.0)
    view = entry.call.program
    assert (view.program_id, view.name, view.tenant, view.session_id) == ("p", "agent", "acme", "s")
    assert (view.attained, view.calls, view.arrival_s) == (Attained(1.0, 2.0, 3.0, 4.0), 4, 100.0)
    assert (entry.call.prompt_tokens, entry.call.deadline_s) == (10, 105.0)


def test_the_deadline_of_a_program_stays_where_it_was() -> None:
    """Each call says how much time is left. A call that was long on its way does not postpone the deadline, and one
    that says nothing does not remove it. A deadline that has passed is one."""
    tables = Tables()
    view = tables.open("r1", header("p", program_time_left_s=30.0), 100.0)
    assert view.deadline_s == 130.0
    assert tables.open("r2", header("p", program_time_left_s=29.0), 102.0).deadline_s == 130.0
    assert tables.open("r3", header("p"), 103.0).deadline_s == 130.0
    assert tables.open("r4", header("late", program_time_left_s=0.0), 104.0).deadline_s == 104.0
    assert tables.open("r5", header("other"), 105.0).deadline_s == math.inf


def test_a_call_that_waited_elsewhere_has_waited() -> None:
    """Its account begins with that wait, and so does what a policy sees, which promotes calls that starve."""
    tables = Tables()
    entry = tables.table.open("r", header("p", waited_s=7.0), 10, 100.0)
    assert entry.call.wait_s == 7.0
    entry.ledger.start(103.0)
    entry.ledger.stop(104.0)
    entry.ledger.start(106.0)
    account = entry.ledger.account()
    assert (account.wait_s, account.waits) == (12.0, ((0.0, 10.0), (11.0, 2.0)))


def test_programs_are_numbered_by_their_first_arrival() -> None:
    """The order of arrival stays with a program, also while it has no call here."""
    tables = Tables()
    first = tables.open("r1", header("a"))
    second = tables.open("r2", header("b"))
    tables.table.close("r1", 1.0)
    again = tables.open("r3", header("a"), 2.0)
    assert again is first
    assert (first.arrival_order, second.arrival_order, first.arrival_s, first.calls) == (0, 1, 0.0, 2)


def test_the_samples_of_a_call_are_one_call() -> None:
    """Requests with one call id count as one call of their program."""
    tables = Tables()
    view = tables.open("r1", header("a"))
    assert tables.open("r2", header("a")) is view
    assert view.calls == 1


def test_a_program_ends_while_it_is_idle() -> None:
    """The table forgets the program and the policy hears of it, once."""
    tables = Tables()
    tables.open("r", header("a"))
    tables.table.close("r", 1.0)
    assert tables.table.end_program(ProgramId("a"), 0.0)
    assert not tables.table.end_program(ProgramId("a"), 0.0)
    assert tables.policy.ended == ["a"]
    assert tables.open("r2", header("a")).calls == 1, "the same id later is a new program"


def test_a_program_ends_while_a_call_of_it_is_being_aborted() -> None:
    """The policy hears of the end at once, and the program is not remembered after its last request."""
    tables = Tables()
    tables.open("r", header("a"))
    assert tables.table.end_program(ProgramId("a"), 0.0)
    assert tables.policy.ended == ["a"]
    tables.table.close("r", 1.0)
    assert not tables.table.end_program(ProgramId("a"), 0.0)
    assert tables.policy.ended == ["a"]


def test_an_aborted_call_that_comes_after_its_programs_end_leaves_nothing() -> None:
    """The message of the end may be quicker than the call and its abort."""
    tables = Tables()
    tables.table.end_program(ProgramId("a"), 0.0)
    tables.open("r", header("a"))
    tables.table.close("r", 1.0, is_aborted=True)
    assert tables.table.is_empty
    assert tables.policy.ended == ["a"]


def test_a_program_that_goes_on_after_its_end_is_remembered() -> None:
    """Its call is answered, so its client is there, and one that it aborts later does not end it."""
    tables = Tables()
    tables.table.end_program(ProgramId("a"), 0.0)
    view = tables.open("r1", header("a"))
    tables.table.close("r1", 1.0)
    assert tables.open("r2", header("a")) is view
    tables.table.close("r2", 2.0, is_aborted=True)
    assert tables.table.knows(ProgramId("a"))
    assert tables.policy.ended == []


def test_a_program_that_goes_on_later_is_remembered() -> None:
    """Its client came back, and aborted the first call."""
    tables = Tables()
    tables.table.end_program(ProgramId("a"), 0.0)
    tables.open("r", header("a"), 60.0)
    tables.table.close("r", 61.0, is_aborted=True)
    assert tables.table.knows(ProgramId("a"))


def test_the_ends_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more programs, an aborted call that is late is taken for one of a program that goes on."""
    monkeypatch.setattr(call_table, "_REMEMBERED_PROGRAMS", 3)
    tables = Tables()
    for number in range(5):
        tables.table.end_program(ProgramId(f"p{number}"), 0.0)
    for name in ("p1", "p2"):
        tables.open(name, header(name))
        tables.table.close(name, 1.0, is_aborted=True)
    assert tables.table.knows(ProgramId("p1"))
    assert not tables.table.knows(ProgramId("p2"))


def test_a_call_can_end_its_program() -> None:
    """Over HTTP the last call says so, and the program ends when that call does."""
    tables = Tables()
    tables.open("r", header("a", ends_program=True))
    assert tables.policy.ended == []
    tables.table.close("r", 1.0)
    assert tables.policy.ended == ["a"]
    assert not tables.table.end_program(ProgramId("a"), 0.0)


def test_an_unknown_program_ends_without_effect() -> None:
    """A notice may be late, repeated or for another engine."""
    tables = Tables()
    assert not tables.table.end_program(ProgramId("never seen"), 0.0)
    assert tables.policy.ended == []


def test_a_request_without_ids_is_forgotten() -> None:
    """It is a program of its own that will not come again."""
    tables = Tables()
    own = program_of_request("r")
    tables.open("r", header(own))
    tables.table.close("r", 1.0)
    assert tables.policy.ended == [own]


def test_the_oldest_idle_program_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may send ids for ever and never an end; memory stays bounded and the policy hears of it."""
    monkeypatch.setattr(call_table, "_REMEMBERED_PROGRAMS", 3)
    tables = Tables()
    for number in range(5):
        tables.open(f"r{number}", header(f"p{number}"))
        tables.table.close(f"r{number}", float(number))
    assert tables.policy.ended == ["p0", "p1"]
    assert not tables.table.end_program(ProgramId("p1"), 0.0)
    assert tables.table.end_program(ProgramId("p2"), 0.0)


class CallTableMachine(RuleBasedStateMachine):
    """Requests open and close and programs end in any order, against sets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.open_requests: dict[str, str] = {}
        self.known: set[str] = set()  # programs that the table remembers
        self.ending: set[str] = set()  # ended while requests were under way
        self.made = 0

    @rule(program=st.sampled_from("abc"), call=st.sampled_from("xy"), ends=st.booleans())
    def open(self, program: str, call: str, ends: bool) -> None:
        self.made += 1
        self.tables.open(f"r{self.made}", header(program, f"{call}{self.made}", ends_program=ends), float(self.made))
        self.open_requests[f"r{self.made}"] = program
        self.known.add(program)
        self.ending.discard(program)
        if ends:
            self.ends_with = getattr(self, "ends_with", {}) | {f"r{self.made}": program}

    @precondition(lambda self: self.open_requests)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.open_requests)))
        program = self.open_requests.pop(request)
        assert self.tables.table.close(request, float(self.made)) is not None
        self.tables.policy.waiting.check_integrity()
        is_busy = program in self.open_requests.values()
        if not is_busy and program in self.ending:
            self.ending.discard(program)
            self.known.discard(program)
        if getattr(self, "ends_with", {}).pop(request, None) is not None:
            self.model_end(program)

    def model_end(self, program: str) -> None:
        if program in self.open_requests.values():
            self.ending.add(program)
        else:
            self.known.discard(program)

    @rule(program=st.sampled_from("abc"))
    def end(self, program: str) -> None:
        was_known = program in self.known and program not in self.ending
        assert self.tables.table.end_program(ProgramId(program), 0.0) == was_known
        if was_known:
            self.model_end(program)

    @rule()
    def close_unknown(self) -> None:
        assert self.tables.table.close("never opened", 0.0) is None

    @invariant()
    def the_sums_agree(self) -> None:
        table = self.tables.table
        table.check_integrity(set())
        assert set(table.entries) == set(self.open_requests)
        assert set(table._programs) == set(self.open_requests.values())
        assert set(table._idle) == self.known - set(self.open_requests.values())


TestCallTableMachine = CallTableMachine.TestCase
TestCallTableMachine.__doc__ = "Whatever comes, the table holds what is open, and remembers what has not ended."
TestCallTableMachine.settings = settings(max_examples=100, stateful_step_count=30)
