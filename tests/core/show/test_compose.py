"""The state of an engine, put together from its process table and what its schedulers say."""

from __future__ import annotations

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ProgramId, SessionId, ThreadId
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramState
from weft.core.process_table import ProcessTable
from weft.core.routing.replicas import ReplicaHealth, ReplicaState
from weft.core.show import LiveCall, LiveProgram, LiveRow, LiveState, ProgramKv, SchedulerState, compose

ENGINE = EngineId("engine-0")


def opened(*names: str) -> ProcessTable:
    table = ProcessTable()
    for number, name in enumerate(names):
        table.open(ProgramInfo(ProgramId(name), SessionId(f"s-{name}"), name), float(number))
    return table


def arrive(table: ProcessTable, program: str, call: str = "c", at_s: float = 10.0) -> CallRow:
    identity = CallIdentity(ProgramId(program), ThreadId(f"t-{call}"), CallId(call))
    return table.arrive(identity, ENGINE, at_s)[0]


def replica(*calls: LiveCall, kv: tuple[ProgramKv, ...] = (), running: int | None = None) -> LiveRow:
    count = sum(call.runs for call in calls) if running is None else running
    health = ReplicaHealth(ENGINE, ReplicaState.READY, len(calls), 0)
    return LiveRow("m", health, SchedulerState(count, max(0, len(calls) - count), 0.5, calls, kv))


def live(program: str, call: str = "c", *, runs: bool = True, level: int | None = 0, s: float = 0.0) -> LiveCall:
    return LiveCall(CallId(call), ProgramId(program), level, runs, s, s, 20, 4)


def state_of(table: ProcessTable, *replicas: LiveRow, now_s: float = 20.0, scope: str = "") -> LiveState:
    return compose(list(table), table.ended(), replicas, now_s=now_s, model="m", policy="atlas", scope=scope)


def only(state: LiveState) -> LiveProgram:
    assert len(state.programs) == 1
    return state.programs[0]


def test_a_program_runs_waits_uses_a_tool_or_is_idle() -> None:
    """Each program is in one state, by its calls at the schedulers and by its tools."""
    table = opened("runs", "waits", "tool", "idle")
    arrive(table, "runs")
    arrive(table, "waits", "d")
    table.tool_started(ProgramId("tool"), 1, "search", 11.0)
    state = state_of(table, replica(live("runs"), live("waits", "d", runs=False)))
    assert [each.state for each in state.programs] == ["running", "waiting", "tool", "idle"]
    assert state.programs[2].tools == ("search",)


def test_a_call_that_no_scheduler_runs_waits() -> None:
    """It may be on its way. Without the answer of every scheduler nobody knows, and it counts as running."""
    table = opened("p")
    arrive(table, "p")
    assert only(state_of(table, replica(live("p", runs=False)))).state == "waiting"
    assert only(state_of(table, replica())).state == "waiting"
    silent = LiveRow("m", ReplicaHealth(ENGINE, ReplicaState.READY, 1, 0), None)
    assert only(state_of(table, replica(), silent)).state == "running"
    cut = replica(running=1)
    assert only(state_of(table, cut)).state == "running"


def test_calls_in_flight_count() -> None:
    """The row has what has left the engine. The scheduler knows what calls have used and waited since."""
    table = opened("p")
    first = arrive(table, "p", "first")
    first.account = Account(2.0, 1.0, prompt_tokens=10, output_tokens=5)
    table.leave(first, 12.0)
    second = arrive(table, "p", "second", 13.0)
    second.account = Account(0.5, 0.0, preemptions=1, prompt_tokens=20, output_tokens=2)
    program = only(state_of(table, replica(live("p", "second", level=1, s=3.0))))
    assert (program.service_s, program.wait_s) == (5.0, 4.0)
    assert (program.prompt_tokens, program.output_tokens, program.preemptions) == (30, 9, 1)
    assert (program.calls, program.calls_in_flight, program.threads, program.level) == (2, 1, 2, 1)
    assert (program.tools_s, program.age_s, program.due_in_s) == (1.0, 20.0, None)


def test_a_program_has_the_best_place_of_its_calls() -> None:
    """The call that starts next says how long the program still waits. None of another program's counts."""
    table = opened("p", "other")
    for call in ("second", "first"):
        arrive(table, "p", call)
    arrive(table, "other", "next")
    waiting = [live("other", "next", runs=False), live("p", "first", runs=False), live("p", "second", runs=False)]
    places = [each._replace(place=number) for number, each in enumerate(waiting, 1)]
    assert [program.place for program in state_of(table, replica(*places)).programs] == [2, 1]


def test_the_present_pause_counts() -> None:
    """A program whose tool runs has been away since its last call left."""
    table = opened("p")
    table.leave(arrive(table, "p"), 12.0)
    assert only(state_of(table)).tools_s == 8.0


def test_the_kv_of_a_program_is_that_of_all_replicas() -> None:
    """On devices and in host memory. It is unknown where no scheduler knows it."""
    table = opened("p", "q")
    kv = (ProgramKv(ProgramId("p"), 32, 16),)
    p, q = state_of(table, replica(kv=kv), replica(kv=kv)).programs
    assert (p.kv_tokens, q.kv_tokens) == (96, None)


def test_ended_programs_follow_the_newest_first() -> None:
    """They say how they ended, how long they took and how long ago that was."""
    table = opened("p", "q")
    table.close(ProgramId("p"), ProgramState.FINISHED, 5.0)
    table.close(ProgramId("q"), ProgramState.FAILED, 9.0)
    state = state_of(table)
    assert (state.programs, state.programs_total) == ((), 0)
    assert [(each.name, each.state, each.age_s, each.ended_ago_s) for each in state.ended] == [
        ("q", "failed", 8.0, 11.0),
        ("p", "finished", 5.0, 15.0),
    ]


def test_of_many_programs_those_used_last_are_shown() -> None:
    """The document stays small, and says how many there are. They keep the order of their starts."""
    table = opened(*(f"p{number}" for number in range(600)))
    arrive(table, "p0", at_s=1000.0)
    for number in range(60):
        table.close(ProgramId(f"p{500 + number}"), ProgramState.FINISHED, 1000.0)
    state = state_of(table, now_s=2000.0)
    assert (len(state.programs), state.programs_total, len(state.ended)) == (500, 540, 50)
    assert [each.program_id for each in state.programs[:2]] == ["p0", "p41"]


def test_a_scope_hides_other_programs_and_itself() -> None:
    """A key sees its own programs, by the ids that it has given them."""
    table = ProcessTable()
    for name in ("k1/p", "k2/p", "k1/ended"):
        table.open(ProgramInfo(ProgramId(name), SessionId(f"{name}-s"), name, scope=name[:3]), 0.0)
    table.close(ProgramId("k1/ended"), ProgramState.FINISHED, 5.0)
    state = state_of(table, scope="k1/")
    assert [(each.program_id, each.session_id) for each in (*state.programs, *state.ended)] == [
        ("p", "p-s"),
        ("ended", "ended-s"),
    ]
    assert state.programs_total == 1


def test_calls_of_one_id_are_told_apart_by_their_programs() -> None:
    """Clients choose the ids of calls."""
    table = opened("p", "q")
    for program in ("p", "q"):
        arrive(table, program, "c")
    calls = [
        LiveCall(CallId("c"), ProgramId(program), None, runs, 0.0, 0.0, 0, 0)
        for program, runs in (("p", True), ("q", False))
    ]
    state = state_of(table, replica(*calls, running=1))
    assert [(each.program_id, each.state) for each in state.programs] == [("p", "running"), ("q", "waiting")]


def test_a_long_name_is_cut_off() -> None:
    """A name costs the viewers no megabytes. Ids stay whole, because they name the program."""
    table = ProcessTable()
    table.open(ProgramInfo(ProgramId("p" * 256), SessionId("s"), "\ud800" + "n" * 10_000), 0.0)
    table.tool_started(ProgramId("p" * 256), 1, "t" * 10_000, 1.0)
    program = only(state_of(table))
    assert (len(program.program_id), len(program.name), len(program.tools[0])) == (256, 200, 200)
    assert program.name[0] == "?", "a letter that UTF-8 has not, which JSON in UTF-8 cannot carry"
