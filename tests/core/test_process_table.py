"""The process table: the metrics of Autellix §4.2.1 and the update of Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import growth
from program_rows import AMOUNTS, ENDINGS, ENGINE, identity, info

from weft.core.accounts import Account, Attained
from weft.core.errors import InvalidIdError, ProgramEndedError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallRow, FoldedThreads, ProgramInfo, ProgramRow, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.testing import FakeClock


class Table:
    """A process table with one open program `p` and a clock, with short methods for tests."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.table = ProcessTable()
        self.table.open(info(), self.clock())

    @property
    def row(self) -> ProgramRow:
        row = self.table.get(ProgramId("p"))
        assert row is not None
        return row

    def arrive(self, call: str, thread: str = "t", engine: EngineId = ENGINE) -> CallRow:
        return self.table.arrive(identity(call, thread), engine, self.clock())[0]

    def leave(self, call: CallRow, service_s: float = 0.0, wait_s: float = 0.0) -> None:
        call.account = Account(service_s, wait_s)
        self.table.leave(call, self.clock())


@pytest.fixture
def it() -> Iterator[Table]:
    """Return a table whose integrity is checked at the end of the test."""
    made = Table()
    yield made
    made.table.check_integrity()


# -- the six metrics of §4.2.1


def test_service_of_a_chain_is_its_sum(it: Table) -> None:
    """For a chain of calls, service is the sum of the execution times of the completed calls."""
    for number, service_s in enumerate([4.0, 3.0, 1.0]):
        it.leave(it.arrive(f"c{number}"), service_s)
    assert it.row.attained.service_s == 8.0
    assert it.row.attained.total_service_s == 8.0


def test_service_counts_only_completed_calls(it: Table) -> None:
    """The cost of a call in flight is in the call's own row, not yet in the program's."""
    call = it.arrive("c")
    call.account = Account(service_s=5.0, wait_s=2.0)
    assert it.row.attained == Attained()
    assert it.row.active[CallId("c")].account.service_s == 5.0


def test_parallel_calls_count_once_for_the_critical_path(it: Table) -> None:
    """Line 4: of calls that inherit the same service, the longest counts for the path; the total is their sum."""
    it.leave(it.arrive("first"), 1.0)
    left, right = it.arrive("left", "t"), it.arrive("right", "u")
    assert left.inherited.service_s == right.inherited.service_s == 1.0
    it.leave(right, 5.0)
    assert it.row.attained.service_s == 6.0
    it.leave(left, 3.0)
    assert it.row.attained.service_s == 6.0, "the shorter branch does not lengthen the path"
    assert it.row.attained.total_service_s == 9.0
    assert it.arrive("join").inherited.service_s == 6.0


def test_a_call_inherits_the_service_attained_before_its_arrival(it: Table) -> None:
    """Line 11: a call that arrives while a long call runs does not inherit the long one, even if it leaves later."""
    long, short = it.arrive("long"), it.arrive("short", "u")
    it.leave(long, 10.0)
    it.leave(short, 2.0)
    assert short.inherited.service_s == 0.0
    assert it.row.attained.service_s == 10.0


def test_the_wait_is_that_of_the_chain_with_the_most_service(it: Table) -> None:
    """A parallel call that waited long and was served little has no part in it; no chain has both maxima."""
    served, waited = it.arrive("served"), it.arrive("waited", "u")
    it.leave(waited, service_s=1.0, wait_s=50.0)
    assert (it.row.attained.service_s, it.row.attained.wait_s) == (1.0, 50.0)
    it.leave(served, service_s=9.0, wait_s=2.0)
    assert (it.row.attained.service_s, it.row.attained.wait_s) == (9.0, 2.0)
    assert it.row.attained.total_wait_s == 52.0
    it.leave(it.arrive("join"), service_s=1.0, wait_s=3.0)
    assert (it.row.attained.service_s, it.row.attained.wait_s) == (10.0, 5.0)


def test_of_chains_with_equal_service_the_longer_wait_counts(it: Table) -> None:
    """The longer of parallel waits counts for the chain; all of them count for the sum."""
    left, right = it.arrive("left"), it.arrive("right", "u")
    it.leave(left, wait_s=2.0)
    it.leave(right, wait_s=3.0)
    assert (it.row.attained.wait_s, it.row.attained.total_wait_s) == (3.0, 5.0)
    it.leave(it.arrive("join"), wait_s=1.0)
    assert (it.row.attained.wait_s, it.row.attained.total_wait_s) == (4.0, 6.0)


def test_engine_ids_in_the_order_of_their_latest_use(it: Table) -> None:
    """The row names each engine that the program has used, once."""
    for number, engine in enumerate(["b", "a", "b"]):
        it.leave(it.arrive(f"c{number}", engine=EngineId(engine)))
    assert it.row.engine_ids == ["a", "b"]


def test_a_call_that_goes_elsewhere_is_told_where_the_programs_latest_kv_is(it: Table) -> None:
    """A program none of whose calls has ended has left no KV anywhere."""
    a, b = EngineId("a"), EngineId("b")
    first = it.table.arrive(identity("c1"), None, 0.0)[0]
    assert it.table.assign(first, a) is None
    assert it.table.assign(first, b) is None
    it.leave(first)
    second = it.table.arrive(identity("c2"), None, 0.0)[0]
    assert it.table.assign(second, b) is None
    assert it.table.assign(second, a) == b
    assert it.table.assign(second, a) is None
    it.table.lose_engine(a)
    assert it.table.assign(second, b) is None, "what was on the other engine is lost"


def test_threads_metadata(it: Table) -> None:
    """A thread's row has its active calls with arrival, wait and service, and the cost of its past calls."""
    it.leave(it.arrive("c1", "t"), 1.0, 0.5)
    it.clock.advance(5.0)
    call = it.arrive("c2", "t")
    other = it.arrive("c3", "u")
    call.account = Account(service_s=2.0, wait_s=0.25)
    thread = it.row.threads[ThreadId("t")]
    assert (thread.arrival_s, thread.calls) == (100.0, 2)
    assert thread.account == Account(service_s=1.0, wait_s=0.5)
    assert thread.active == {CallId("c2"): call}
    assert (call.arrival_s, call.engine_id, call.account.wait_s) == (105.0, ENGINE, 0.25)
    assert it.row.threads[ThreadId("u")].arrival_s == 105.0
    assert it.row.active == {CallId("c2"): call, CallId("c3"): other}


def test_most_recent_arrival_and_completion(it: Table) -> None:
    """The row has the times of the last arrival and the last completion; both are nan at first."""
    assert math.isnan(it.row.last_arrival_s)
    assert math.isnan(it.row.last_completion_s)
    first = it.arrive("first")
    it.clock.advance(1.0)
    it.arrive("second", "u")
    assert it.row.last_arrival_s == 101.0
    it.clock.advance(1.0)
    it.leave(first)
    assert (it.row.last_arrival_s, it.row.last_completion_s) == (101.0, 102.0)


def test_interception_is_the_time_with_no_call_in_flight(it: Table) -> None:
    """The time before the first call does not count, nor the time while another call is in flight."""
    it.clock.advance(3.0)
    first = it.arrive("a")
    it.clock.advance(1.0)
    parallel = it.arrive("b", thread="u")
    it.leave(first)
    it.clock.advance(1.0)
    it.leave(parallel)
    it.clock.advance(0.5)
    it.leave(it.arrive("c"))
    it.clock.advance(2.0)
    it.arrive("d")
    assert it.row.interception_s == 2.5


def test_all_fields_of_an_account_are_summed(it: Table) -> None:
    """Preemptions and tokens add up over the calls, in the program's row and in the thread's."""
    for number in range(2):
        call = it.arrive(f"c{number}")
        call.account = Account(1.0, 2.0, preemptions=3, prompt_tokens=4, output_tokens=5, cached_tokens=6)
        it.table.leave(call, it.clock())
    assert it.row.account == it.row.threads[ThreadId("t")].account == Account(2.0, 4.0, 6, 8, 10, 12)


# -- wide and long programs


def parallel(calls: int) -> None:
    """Calls on as many threads, all in flight at once."""
    it = Table()
    for call in [it.arrive(f"c{number}", f"t{number}") for number in range(calls)]:
        it.leave(call, 1.0)


def one_after_another(calls: int) -> None:
    """Calls one after another, each on a thread of its own."""
    it = Table()
    for number in range(calls):
        it.leave(it.arrive(f"c{number}", f"t{number}"), 1.0)


@pytest.mark.parametrize("shape", [parallel, one_after_another])
def test_a_call_costs_the_same_in_a_program_of_many_threads(shape: Callable[[int], None]) -> None:
    """An arrival and a leave look at no other thread of the program."""
    assert growth(shape) < 1.1


def test_threads_that_have_long_been_idle_are_folded_into_sums(it: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row keeps the threads with calls in flight and a number of others, so it does not grow for days. The sums stay,
    and a final account of an aborted call on a folded thread still counts."""
    monkeypatch.setattr("weft.core.process_table.KEEP_IDLE_THREADS", 2)
    busy = it.arrive("busy", "busy")
    calls = [it.arrive(f"c{number}", f"t{number}") for number in range(5)]
    for call in calls:
        it.leave(call, 1.0)
    assert set(it.row.threads) == {"busy", "t3", "t4"}
    assert it.row.folded == FoldedThreads(threads=3, calls=3, account=Account(3.0))
    it.leave(it.arrive("c5", "t3"), 1.0)
    it.leave(it.arrive("c6", "t6"), 1.0)
    assert set(it.row.threads) == {"busy", "t3", "t6"}, "a thread that is used again stays"
    it.table.settle(calls[0], Account(service_s=1.5))
    assert (it.row.folded.account.service_s, it.row.account.service_s) == (4.5, 7.5)
    it.leave(busy, 1.0)
    assert (it.row.thread_count, it.row.calls) == (7, 8)


# -- arrival


def test_arrival_returns_a_copy_of_the_attained_service(it: Table) -> None:
    """The copy that travels with a call does not change with the row, nor the row with the copy."""
    it.leave(it.arrive("c1"), 3.0, 1.0)
    call, sent = it.table.arrive(identity("c2"), ENGINE, it.clock())
    assert sent == Attained(3.0, 3.0, 1.0, 1.0)
    it.leave(call, 1.0)
    assert sent.service_s == 3.0
    sent.service_s = 99.0
    assert it.row.attained.service_s == 4.0


def test_a_call_of_an_unknown_program_is_refused() -> None:
    """A call is accepted only if its program has a row."""
    with pytest.raises(ProgramEndedError):
        ProcessTable().arrive(identity("c"), ENGINE, 0.0)


@pytest.mark.parametrize("thread", ["t", "another"])
def test_a_call_in_flight_cannot_arrive_again(it: Table, thread: str) -> None:
    """The id of a call in flight is refused on every thread of the program, and the row stays as it was."""
    it.arrive("c")
    before = (it.row.calls, set(it.row.threads), it.row.last_arrival_s)
    it.clock.advance(1.0)
    with pytest.raises(InvalidIdError, match="call c is already in flight"):
        it.arrive("c", thread)
    assert (it.row.calls, set(it.row.threads), it.row.last_arrival_s) == before


def test_a_program_cannot_open_twice(it: Table) -> None:
    """A second row for the same program is refused, and the first one stays."""
    it.arrive("c")
    with pytest.raises(InvalidIdError, match="program p is already in the table"):
        it.table.open(info(), it.clock())
    assert it.row.calls == 1


# -- leaving, states, the end


def test_an_aborted_call_counts(it: Table) -> None:
    """An aborted call has used the executor, so its account is folded in."""
    call = it.arrive("c")
    call.account = Account(service_s=2.0, wait_s=1.0, output_tokens=7)
    it.table.leave(call, it.clock())
    assert it.row.attained == Attained(2.0, 2.0, 1.0, 1.0)
    assert it.row.account.output_tokens == 7


def test_leaving_twice_changes_nothing(it: Table) -> None:
    """The second `leave` of a call adds nothing, even if its account has grown."""
    call = it.arrive("c")
    it.leave(call, 2.0)
    it.clock.advance(9.0)
    it.leave(call, 50.0)
    assert it.row.attained.total_service_s == 2.0
    assert it.row.last_completion_s == 100.0


def test_active_while_a_call_is_in_flight(it: Table) -> None:
    """A program is active from its first call in flight to its last, and idle in between."""
    states = [it.row.state]
    calls = [it.arrive("left"), it.arrive("right", "u")]
    states.append(it.row.state)
    for call in calls:
        it.leave(call)
        states.append(it.row.state)
    assert states == [ProgramState.IDLE, ProgramState.ACTIVE, ProgramState.ACTIVE, ProgramState.IDLE]


@pytest.mark.parametrize("state", ENDINGS)
def test_closing_takes_the_row_out(it: Table, state: ProgramState) -> None:
    """The row of an ended program leaves the table, with the state and time of the end."""
    it.clock.advance(3.0)
    row = it.table.close(ProgramId("p"), state, it.clock())
    assert row is not None
    assert (row.state, row.start_s, row.end_s) == (state, 100.0, 103.0)
    assert it.table.get(ProgramId("p")) is None
    assert len(it.table) == 0
    assert it.table.ended() == [row]


@pytest.mark.parametrize("answered_s", [101.0, 103.0])
def test_a_program_that_had_its_last_answer_has_ended_with_it(it: Table, answered_s: float) -> None:
    """The answer may be read before or after its call leaves. What came after both is no time of the program."""
    call = it.arrive("last")
    it.clock.advance(2.0)
    it.leave(call)
    it.row.answered_s = answered_s
    row = it.table.close(ProgramId("p"), ProgramState.FINISHED, 200.0)
    assert row is not None
    assert row.end_s == max(102.0, answered_s)


def test_closing_folds_calls_in_flight(it: Table) -> None:
    """Calls in flight count with their cost so far, and their later `leave` changes nothing."""
    done, left, right = it.arrive("done"), it.arrive("left", "t"), it.arrive("right", "u")
    it.leave(done, 1.0)
    left.account, right.account = Account(2.0, 1.0), Account(4.0, 1.0)
    row = it.table.close(ProgramId("p"), ProgramState.CANCELLED, it.clock())
    assert row is not None
    assert row.attained == Attained(4.0, 7.0, 1.0, 2.0)
    assert row.active == {}
    assert row.state is ProgramState.CANCELLED
    frozen = replace(row.attained)
    it.leave(left, 100.0)
    assert row.attained == frozen
    assert row.state is ProgramState.CANCELLED
    with pytest.raises(ProgramEndedError):
        it.arrive("late")


def test_closing_twice_or_an_unknown_program_returns_none(it: Table) -> None:
    """Only the first `close` finds a row, and the row keeps the state of that call."""
    assert it.table.close(ProgramId("other"), ProgramState.FINISHED, it.clock()) is None
    row = it.table.close(ProgramId("p"), ProgramState.FAILED, it.clock())
    assert it.table.close(ProgramId("p"), ProgramState.FINISHED, it.clock()) is None
    assert row is not None
    assert row.state is ProgramState.FAILED


@pytest.mark.parametrize(("keep", "kept"), [(0, []), (2, ["p2", "p1"]), (10, ["p2", "p1", "p0"])])
def test_the_last_rows_are_kept(keep: int, kept: list[str]) -> None:
    """`keep_ended` rows stay readable, the newest first."""
    table = ProcessTable(keep_ended=keep)
    for number in range(3):
        table.open(info(f"p{number}"), 0.0)
        table.close(ProgramId(f"p{number}"), ProgramState.FINISHED, 1.0)
    assert [row.info.program_id for row in table.ended()] == kept


def test_rows_can_be_read_while_programs_come_and_go(it: Table) -> None:
    """An iteration sees the rows that were in the table at its start."""
    seen = []
    for row in it.table:
        seen.append(row.info.program_id)
        it.table.open(info("q"), 0.0)
    assert seen == ["p"]
    assert len(it.table) == 2


@pytest.mark.parametrize(
    "break_it",
    [
        lambda row: setattr(row, "calls", 7),
        lambda row: setattr(row, "state", ProgramState.ACTIVE),
        lambda row: setattr(row, "account", Account(9.0)),
        lambda row: setattr(row.attained, "wait_s", 9.0),
        lambda row: setattr(row.attained, "total_service_s", 9.0),
        lambda row: setattr(row.attained, "service_s", 9.0),
    ],
    ids=["calls", "state", "account", "wait", "total", "path longer than total"],
)
def test_check_integrity_finds_what_does_not_add_up(break_it: Callable[[ProgramRow], None]) -> None:
    """The check fails on a row that was tampered with, and names the program."""
    it = Table()
    it.leave(it.arrive("c"), 1.0, 1.0)
    it.table.check_integrity()
    break_it(it.row)
    with pytest.raises(AssertionError, match="process table row of p does not add up"):
        it.table.check_integrity()


# -- attained service


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS)))
def test_critical_path_is_never_longer_than_the_total(calls: list[tuple[float, float]]) -> None:
    """For calls in any overlap, path <= total; for a chain of calls, path == total."""
    parallel, chain = Attained(), Attained()
    for service_s, wait_s in calls:
        parallel.fold(Attained(), service_s, wait_s)
        chain.fold(replace(chain), service_s, wait_s)
    assert (parallel.service_s, parallel.wait_s) == max(calls, default=(0.0, 0.0))
    assert parallel.service_s <= parallel.total_service_s
    assert chain.service_s == chain.total_service_s == parallel.total_service_s
    assert chain.wait_s == chain.total_wait_s == parallel.total_wait_s == sum(wait_s for _, wait_s in calls)
    assert parallel.wait_s <= parallel.total_wait_s


attained = st.builds(Attained, AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS)


@given(attained, attained, attained)
def test_merging_copies_is_order_free(a: Attained, b: Attained, c: Attained) -> None:
    """Copies that are merged in any order, any number of times, agree, and no value is lost."""

    def merged(*copies: Attained) -> Attained:
        result = Attained()
        for each in copies:
            result.merge(each)
        return result

    assert merged(a, b, c) == merged(c, a, b, a) == merged(merged(a, b), merged(b, c))
    assert merged(a, b).service_s >= a.service_s
    assert merged(a, Attained()) == a
    chains = [(each.service_s, each.wait_s) for each in (a, b)]
    assert (merged(a, b).service_s, merged(a, b).wait_s) in chains, "service and wait are of the same chain"


calls_of_a_program = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6), AMOUNTS, AMOUNTS, st.booleans(), AMOUNTS, AMOUNTS), max_size=9
)


@given(calls_of_a_program)
def test_service_and_wait_are_those_of_one_chain(
    calls: list[tuple[int, int, float, float, bool, float, float]],
) -> None:
    """In any overlap of calls, the table has the longest of all chains, found by listing them, with its wait.

    A call may leave before its final account comes, which is then settled before any other call arrives. The copies of
    two schedulers, which know some of the calls each, merge to the same chain when they know all of them together.
    """
    table = ProcessTable()
    table.open(info(), 0.0)
    spans = [(begin, begin + length + 1) for begin, length, *_ in calls]
    events = [(end, 0, n) for n, (_, end) in enumerate(spans)] + [(begin, 1, n) for n, (begin, _) in enumerate(spans)]
    arrived: dict[int, CallRow] = {}
    copies = [Attained(), Attained()]
    for time, arrives, n in sorted(events):
        _, _, service_s, wait_s, settles, more_service_s, more_wait_s = calls[n]
        if arrives:
            arrived[n] = table.arrive(identity(f"c{n}", f"t{n}"), ENGINE, float(time))[0]
            continue
        arrived[n].account = Account(service_s, wait_s)
        table.leave(arrived[n], float(time))
        if settles:
            table.settle(arrived[n], Account(service_s + more_service_s, wait_s + more_wait_s))
        copies[n % 2].fold(arrived[n].inherited, arrived[n].account.service_s, arrived[n].account.wait_s)
    costs = {n: arrived[n].account for n in arrived}

    def chains(before: int) -> Iterator[tuple[float, float]]:
        """The service and the wait of every chain whose calls left no later than `before`."""
        yield 0.0, 0.0
        for n, (begin, end) in enumerate(spans):
            if end <= before:
                for service_s, wait_s in chains(begin):
                    yield service_s + costs[n].service_s, wait_s + costs[n].wait_s

    row = table.get(ProgramId("p"))
    assert row is not None
    assert (row.attained.service_s, row.attained.wait_s) == max(chains(99))
    copies[0].merge(copies[1])
    assert (copies[0].service_s, copies[0].wait_s) == max(chains(99))
    table.check_integrity()


def test_a_call_may_be_assigned_to_an_engine_later(it: Table) -> None:
    """Before a balancer has chosen, the row names no engine; after a call was moved, it names both engines."""
    call, _ = it.table.arrive(identity("c1"), None, 0.0)
    assert (call.engine_id, it.row.engine_ids) == (None, [])
    it.table.assign(call, EngineId("a"))
    it.table.assign(call, EngineId("b"))
    it.table.assign(call, EngineId("a"))
    assert (call.engine_id, it.row.engine_ids) == ("a", ["b", "a"])
    assert call.earlier_engine_ids == ("a", "b")


def test_a_call_that_moves_for_ever_keeps_its_latest_engines(it: Table) -> None:
    """An assignment to the engine that it is on changes nothing."""
    call, _ = it.table.arrive(identity("c1"), None, 0.0)
    for number in (*range(100), 99):
        it.table.assign(call, EngineId(f"e{number}"))
    assert call.earlier_engine_ids == ("e95", "e96", "e97", "e98")


def test_no_program_has_kv_on_a_lost_engine(it: Table) -> None:
    """A lost engine is removed from the rows until a call of the program goes there again."""
    it.leave(it.arrive("c1", engine=EngineId("a")))
    it.leave(it.arrive("c2", engine=EngineId("b")))
    it.table.lose_engine(EngineId("a"))
    it.table.lose_engine(EngineId("a"))
    assert it.row.engine_ids == ["b"]
    it.leave(it.arrive("c3", engine=EngineId("a")))
    assert it.row.engine_ids == ["b", "a"]


# -- tools


def test_a_row_shows_the_tools_that_run() -> None:
    """From the start of each to its end. Runs that are no tools, and repetitions, change nothing."""
    table = ProcessTable()
    table.open(ProgramInfo(ProgramId("p"), SessionId("s"), "agent"), 0.0)
    first = table.tool_started(ProgramId("p"), "run 1", "search", 1.0)
    second = table.tool_started(ProgramId("p"), "run 2", "search", 2.0)
    assert table.tool_started(ProgramId("p"), "run 1", "search", 3.0) is None
    assert table.tool_started(ProgramId("unknown"), "run 1", "search", 3.0) is None
    row = table.get(ProgramId("p"))
    assert row is not None
    assert row.tools_running == (first, second) == (("search", 1.0, 1), ("search", 2.0, 2))
    assert "in search" in str(table)
    assert "waits for" in str(row)
    assert table.tools_ended(ProgramId("p"), ["run 1", "no tool"]) == [first]
    assert table.tools_ended(ProgramId("p"), ["run 1"]) == table.tools_ended(ProgramId("unknown"), ["run 2"]) == []
    last = table.close(ProgramId("p"), ProgramState.FINISHED, 4.0)
    assert last is not None
    assert last.tools_running == ()


def test_a_program_that_never_ends_its_tools_keeps_the_latest() -> None:
    """A model may call tools for ever that nobody runs."""
    table = ProcessTable()
    table.open(ProgramInfo(ProgramId("p"), SessionId("s"), "agent"), 0.0)
    for number in range(10_000):
        table.tool_started(ProgramId("p"), number, f"tool {number}", 1.0)
    row = table.get(ProgramId("p"))
    assert row is not None
    assert [tool.name for tool in row.tools_running] == [f"tool {number}" for number in range(9_744, 10_000)]
