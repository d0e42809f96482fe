"""Replicas that come and go: which are offered to the balancer, and which are started again and when."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.errors import ReplicaError
from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import BALANCERS, Arrival, BalancerConfig, LeastUsed, Locality
from weft.core.routing.replicas import ReplicaSet, ReplicaState, pause_s

A, B = EngineId("a"), EngineId("b")
CALL = Arrival(ProgramId("p"), SessionId("s"), 5000)


def ready(*names: EngineId, max_calls: int = 10, locality: bool = False) -> ReplicaSet:
    """Return a set whose replicas are all ready since second 0."""
    replicas = ReplicaSet(Locality() if locality else LeastUsed(), max_calls=max_calls)
    for name in names:
        replicas.add(name)
        replicas.ready(name, 0.0)
    return replicas


def test_only_ready_replicas_get_calls() -> None:
    """A replica that starts, drains or is down gets none; the result is None if no replica is ready."""
    replicas = ready(A, B)
    replicas.add(EngineId("starting"))
    replicas.drain(B)
    assert [replicas.dispatch(CALL) for _ in range(3)] == [A, A, A]
    replicas.down(A, "killed", 5.0)
    assert replicas.dispatch(CALL) is None


def test_least_used_counts_what_is_in_flight() -> None:
    """A call counts from its dispatch until it leaves, queued or running."""
    replicas = ready(A, B)
    assert [replicas.dispatch(CALL) for _ in range(4)] == [A, B, A, B]
    replicas.leave(B)
    replicas.leave(B)
    assert [replicas.dispatch(CALL) for _ in range(2)] == [B, B]


def test_a_full_replica_is_passed_over_and_keeps_its_programs() -> None:
    """The queue of a replica is bounded; the program comes back once a call has left."""
    replicas = ready(A, B, max_calls=2, locality=True)
    assert [replicas.dispatch(CALL) for _ in range(5)] == [A, A, B, B, None]
    replicas.leave(A)
    assert replicas.dispatch(CALL) == A


def test_a_retry_avoids_the_replica_it_failed_on_unless_there_is_no_other() -> None:
    """The replica that died may be ready again already."""
    replicas = ready(A, B)
    assert replicas.dispatch(CALL, avoid={A}) == B
    assert replicas.dispatch(CALL, avoid={A}) == B
    replicas.down(B, "killed", 1.0)
    assert replicas.dispatch(CALL, avoid={A}) == A


def test_a_dead_replicas_programs_are_assigned_again_and_stay() -> None:
    """They stay when the dead replica is back, because their KV is on the other replica now."""
    replicas = ready(A, B, locality=True)
    assert replicas.dispatch(CALL) == A
    replicas.down(A, "killed", 1.0)
    replicas.leave(A)
    assert replicas.dispatch(CALL) == B
    assert replicas.due(100.0) == [A]
    replicas.ready(A, 100.0)
    assert replicas.dispatch(CALL) == B


def test_pauses_grow_with_failures_in_a_row_and_are_forgiven() -> None:
    """The pauses are 1, 2, 4 s …; after a minute of being ready they begin with 1 s again."""
    replicas = ready(A)
    now_s, pauses = 0.0, []
    for healthy_s in (1.0, 0.0, 59.0, 60.0, 1.0):
        now_s += healthy_s
        replicas.down(A, "killed", now_s)
        (health,) = replicas.health(now_s)
        assert health.restart_in_s is not None
        pauses.append(health.restart_in_s)
        assert replicas.due(now_s + health.restart_in_s - 0.01) == []
        now_s += health.restart_in_s
        assert replicas.due(now_s) == [A]
        assert replicas.due(now_s) == []  # it is starting now
        replicas.ready(A, now_s)
    assert pauses == [1, 2, 4, 1, 2]


def test_a_start_that_fails_counts_as_a_failure() -> None:
    """The replica never was ready, so its failures still count."""
    replicas = ReplicaSet(LeastUsed(), max_calls=1)
    replicas.add(A)
    for failures, now_s in ((1, 0.0), (2, 1000.0), (3, 2000.0)):
        replicas.down(A, "no memory", now_s)
        (health,) = replicas.health(now_s)
        assert (health.deaths, health.restart_in_s, health.reason) == (failures, 2.0 ** (failures - 1), "no memory")
        assert replicas.due(now_s + 900) == [A]
    assert replicas.reason == "no memory"


@given(st.integers(1, 10_000))
def test_pauses_are_bounded(failures: int) -> None:
    """After any number of failures the pause is at most a minute, and not shorter than the pause before."""
    assert pause_s(failures) <= pause_s(failures + 1) <= 60


def test_a_replica_that_drains_is_never_restarted() -> None:
    """This holds when the replica dies, and when its start completes after the drain."""
    replicas = ready(A, B)
    replicas.drain(A)
    replicas.down(A, "killed", 1.0)
    assert replicas.due(math.inf) == []
    replicas.ready(A, 2.0)
    assert replicas.state(A) is ReplicaState.DRAINING
    replicas.remove(A)
    assert replicas.state(A) is None
    replicas.leave(A)  # a call that ends after its replica was removed
    assert len(replicas) == 1


@pytest.mark.parametrize("was", ["ready", "starting", "started meanwhile", "down", "died meanwhile"])
def test_a_replica_that_is_not_removed_after_all_goes_on_as_it_is(was: str) -> None:
    """It takes calls again, or goes on starting, or is started again after its pause."""
    replicas = ready(B) if was in ("starting", "started meanwhile") else ready(A, B)
    if was in ("starting", "started meanwhile"):
        replicas.add(A)
    if was == "down":
        replicas.down(A, "killed", 5.0)
    replicas.drain(A)
    if was == "started meanwhile":
        replicas.ready(A, 6.0)
    elif was == "died meanwhile":
        replicas.down(A, "killed", 6.0)
    replicas.resume(A, 7.0, is_starting=was == "starting")
    expected = {"starting": ReplicaState.STARTING, "down": ReplicaState.DOWN, "died meanwhile": ReplicaState.DOWN}
    assert replicas.state(A) == expected.get(was, ReplicaState.READY)
    assert replicas.due(7.9) == []
    assert replicas.due(8.0) == ([A] if expected.get(was) == ReplicaState.DOWN else [])


def test_the_programs_of_a_draining_replica_are_assigned_again() -> None:
    """Their next calls stay together on another replica, although a third replica is idle."""
    replicas = ready(A, B, locality=True)
    assert replicas.dispatch(CALL) == A
    replicas.drain(A)
    assert replicas.dispatch(CALL) == B
    replicas.add(EngineId("c"))
    replicas.ready(EngineId("c"), 1.0)
    assert replicas.dispatch(CALL) == B


def test_wrong_names_are_refused() -> None:
    """The error lists the names of the replicas."""
    replicas = ready(A)
    with pytest.raises(ReplicaError, match="there is a replica a already"):
        replicas.add(A)
    for act in (replicas.drain, replicas.remove, replicas.calls):
        with pytest.raises(ReplicaError, match="no replica 'b'; there are: a"):
            act(B)


def test_capacity_follows_the_replicas_that_are_ready() -> None:
    """While no replica is ready, as many calls may wait as one replica takes."""
    replicas = ready(A, B, max_calls=7)
    assert replicas.capacity == 14
    replicas.down(A, "killed", 0.0)
    assert replicas.capacity == 7
    replicas.down(B, "killed", 0.0)
    assert (replicas.capacity, len(replicas.loads)) == (7, 0)


class ReplicaMachine(RuleBasedStateMachine):
    """Random events in the lives of replicas, checked against plain bookkeeping."""

    @initialize(balancer=st.sampled_from(BALANCERS))
    def begin(self, balancer: str) -> None:
        self.now_s = 0.0
        self.replicas = ReplicaSet(BalancerConfig(balancer).make(), max_calls=3)
        self.calls: dict[EngineId, int] = {}
        self.states: dict[EngineId, ReplicaState] = {}
        self.added = 0

    def some(self, index: int, *states: ReplicaState) -> EngineId | None:
        fitting = [name for name, state in self.states.items() if state in states]
        return fitting[index % len(fitting)] if fitting else None

    @rule()
    def add(self) -> None:
        name = EngineId(f"r{self.added}")
        self.added += 1
        self.replicas.add(name)
        self.calls[name], self.states[name] = 0, ReplicaState.STARTING

    @rule(index=st.integers(0, 9))
    def start(self, index: int) -> None:
        if (name := self.some(index, ReplicaState.STARTING)) is not None:
            self.replicas.ready(name, self.now_s)
            self.states[name] = ReplicaState.READY

    @rule(index=st.integers(0, 9))
    def die(self, index: int) -> None:
        if (name := self.some(index, ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)) is not None:
            self.replicas.down(name, "killed", self.now_s)
            if self.states[name] is not ReplicaState.DRAINING:
                self.states[name] = ReplicaState.DOWN

    @rule(index=st.integers(0, 9))
    def drain(self, index: int) -> None:
        if (name := self.some(index, *ReplicaState)) is not None:
            self.replicas.drain(name)
            self.states[name] = ReplicaState.DRAINING

    @rule(index=st.integers(0, 9))
    def remove(self, index: int) -> None:
        if (name := self.some(index, ReplicaState.DRAINING)) is not None and not self.calls[name]:
            self.replicas.remove(name)
            del self.calls[name], self.states[name]

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.replicas.due(self.now_s):
            assert self.states[name] is ReplicaState.DOWN
            self.states[name] = ReplicaState.STARTING

    @rule(program=st.integers(0, 3), tokens=st.sampled_from([10, 5000]))
    def call(self, program: int, tokens: int) -> None:
        arrival = Arrival(ProgramId(f"p{program}"), SessionId(f"s{program}"), tokens)
        able = {name for name, state in self.states.items() if state is ReplicaState.READY and self.calls[name] < 3}
        chosen = self.replicas.dispatch(arrival)
        assert chosen in able if able else chosen is None
        if chosen is not None:
            self.calls[chosen] += 1

    @precondition(lambda self: any(self.calls.values()))
    @rule(index=st.integers(0, 9))
    def finish(self, index: int) -> None:
        busy = [name for name, calls in self.calls.items() if calls]
        name = busy[index % len(busy)]
        self.replicas.leave(name)
        self.calls[name] -= 1

    @invariant()
    def agrees(self) -> None:
        health = self.replicas.health(self.now_s)
        assert {each.engine_id: each.state for each in health} == self.states
        assert {each.engine_id: each.calls for each in health} == self.calls
        assert all((each.restart_in_s is not None) == (each.state is ReplicaState.DOWN) for each in health)


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=150, stateful_step_count=50)
