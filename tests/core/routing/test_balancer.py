"""Balancers: Algorithm 2 line by line, its baselines, and invariants under any sequence of events."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import (
    BALANCERS,
    AdaptiveLocality,
    Affinity,
    Arrival,
    Balancer,
    BalancerConfig,
    LeastUsed,
    Loads,
    Locality,
    RoundRobinBalancer,
)
from weft.core.routing.replicas import ReplicaSet

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
SHORT, LONG = 2048, 2049
CAPACITY = 10  # calls that each engine runs at once
MAX_CALLS = 12  # calls in flight on an engine in a set of replicas


def arrival(program: str = "p", tokens: int = LONG, session: str = "s") -> Arrival:
    return Arrival(ProgramId(program), SessionId(session), tokens)


def loads(**calls: int) -> Loads:
    made = Loads(CAPACITY)
    for number, (name, count) in enumerate(calls.items()):
        made.open(EngineId(name), number, count)
    return made


def send(balancer: Balancer, offered: Loads, call: Arrival) -> EngineId:
    """A call that ends at once."""
    chosen = balancer.choose(call, offered)
    offered.add(chosen, is_choice=True)
    offered.add(chosen, -1)
    return chosen


def test_a_short_call_goes_to_the_least_used_engine_and_assigns_nothing() -> None:
    """Algorithm 2 lines 2-3: a prompt of 2048 tokens is still short, and its program stays unassigned."""
    balancer = Locality()
    assert balancer.choose(arrival(tokens=SHORT), loads(a=1, b=0)) == B
    assert balancer.choose(arrival(tokens=SHORT), loads(a=0, b=1)) == A
    assert len(balancer) == 0


def test_a_long_call_goes_to_its_programs_engine_however_busy() -> None:
    """Lines 5-10: the first long call assigns the program to the least used engine; all later ones go there."""
    balancer = Locality()
    assert balancer.choose(arrival(), loads(a=5, b=4)) == B
    assert balancer.choose(arrival(), loads(a=0, b=50)) == B
    assert balancer.choose(arrival("other"), loads(a=0, b=50)) == A
    assert balancer.choose(arrival(), loads(a=0, b=50)) == B


def test_a_short_call_of_an_assigned_program_still_goes_to_the_least_used() -> None:
    """Line 2 comes first: the program's assignment does not count for a short call."""
    balancer = Locality()
    balancer.choose(arrival(), loads(a=0, b=9))
    assert balancer.choose(arrival(tokens=SHORT), loads(a=1, b=0)) == B
    assert balancer.choose(arrival(), loads(a=1, b=0)) == A


def test_the_threshold_is_configurable() -> None:
    """With a threshold of 0 tokens, every call is long."""
    balancer = BalancerConfig("locality", threshold_tokens=0).make()
    assert balancer.choose(arrival(tokens=1), loads(a=0, b=1)) == A
    assert balancer.choose(arrival(tokens=1), loads(a=9, b=0)) == A


def test_programs_that_arrive_at_idle_engines_are_spread() -> None:
    """A tie goes to the engine that was chosen longest ago, not always to the first engine."""
    balancer, idle = Locality(), loads(a=0, b=0, c=0)
    chosen = [send(balancer, idle, arrival(f"p{n}")) for n in range(6)]
    assert chosen == [A, B, C, A, B, C]


def test_a_full_engine_keeps_its_programs() -> None:
    """An engine that is left out once gets the program's next call."""
    balancer = Locality()
    balancer.choose(arrival(), loads(a=0, b=1))
    assert balancer.choose(arrival(), loads(b=1)) == B
    assert balancer.choose(arrival(), loads(a=7, b=1)) == A


def test_a_lost_engines_programs_are_assigned_again() -> None:
    """They stay on the new engine when the lost engine comes back."""
    balancer = Locality()
    balancer.choose(arrival(), loads(a=0, b=1))
    balancer.lose_engine(A)
    assert balancer.choose(arrival(), loads(b=1)) == B
    assert balancer.choose(arrival(), loads(a=0, b=1)) == B


def test_round_robin_ignores_the_load() -> None:
    """Engines are chosen in order, also when an engine joins or leaves."""
    balancer, offered = RoundRobinBalancer(), loads(a=9, b=0)
    assert [send(balancer, offered, arrival()) for _ in range(4)] == [A, B, A, B]
    offered.open(C, 2)
    assert [send(balancer, offered, arrival()) for _ in range(4)] == [C, A, B, C]
    offered.close(A)
    assert [send(balancer, offered, arrival()) for _ in range(3)] == [B, C, B]


def test_least_used_goes_by_load_alone() -> None:
    """The engine of a program's earlier calls does not count."""
    balancer = LeastUsed()
    assert [balancer.choose(arrival(), loads(a=a, b=1)) for a in (0, 2, 0)] == [A, B, A]


def test_affinity_holds_a_session_until_its_engine_is_overloaded() -> None:
    """Eq. 7 with theta 0.8: a session stays while its engine has less than 80 % of what it runs at once."""
    balancer = Affinity()
    assert balancer.choose(arrival(tokens=1), loads(a=3, b=4)) == A
    assert balancer.choose(arrival("other", tokens=1), loads(a=7, b=0)) == A
    assert balancer.choose(arrival(tokens=1), loads(a=8, b=7)) == B
    assert balancer.choose(arrival(tokens=1), loads(a=0, b=7)) == B


def test_a_session_that_left_an_overloaded_engine_does_not_return() -> None:
    """The other engine has computed its whole prompt by then."""
    balancer = Affinity()
    balancer.choose(arrival(), loads(a=0, b=1))
    assert [balancer.choose(arrival(), loads(a=calls, b=5)) for calls in (8, 0)] == [B, B]


@pytest.mark.parametrize(
    ("threshold", "calls", "stays"),
    [(0.8, 7, True), (0.8, 8, False), (0.5, 4, True), (0.5, 5, False), (1.0, 9, True), (1.0, 10, False), (2, 19, True)],
)
def test_the_threshold_of_affinity_is_a_share_of_the_capacity(threshold: float, calls: int, stays: bool) -> None:
    """The load must be below the share. Above 1, calls of a session may queue on its engine."""
    balancer = Affinity(threshold)
    balancer.choose(arrival(), loads(a=0, b=1))
    assert (balancer.choose(arrival(), loads(a=calls, b=0)) == A) == stays


def test_affinity_by_program_parts_the_programs_of_a_session() -> None:
    """By session they share an engine; by program each has its own, until that program ends."""
    session, program, idle = Affinity(), Affinity(by="program"), loads(a=0, b=0)
    two = [arrival("one"), arrival("two")]
    assert [send(session, loads(a=0, b=0), call) for call in two] == [A, A]
    assert [send(program, idle, call) for call in two] == [A, B]
    program.end_session(SessionId("s"))
    assert program.choose(two[1], loads(a=0, b=5)) == B
    program.end_program(ProgramId("two"))
    assert program.choose(two[1], loads(a=0, b=5)) == A


def test_adaptive_locality_weighs_a_prompt_against_the_difference_in_load() -> None:
    """At equal load a program stays. 1024 tokens are worth a call next to an idle engine, fewer next to a busy one."""
    cases = [
        (loads(a=3, b=3), 1, A),
        (loads(a=3, b=9), 1, A),
        (loads(a=2, b=0), 2049, A),
        (loads(a=2, b=0), 2048, B),
        (loads(a=9, b=7), 257, A),
        (loads(a=9, b=7), 256, B),
    ]
    for offered, tokens, expected in cases:
        balancer = AdaptiveLocality()
        assert balancer.choose(arrival(), loads(a=0, b=1)) == A
        assert balancer.choose(arrival(tokens=tokens), offered) == expected


def test_adaptive_locality_moves_any_prompt_whose_kv_comes_along_from_uneven_engines() -> None:
    """From a difference of 1.5 calls for each that the least used engine has, and one more. Without the KV it stays."""
    cases = [(loads(a=1, b=0), False), (loads(a=2, b=0), True), (loads(a=3, b=1), False), (loads(a=4, b=1), True)]
    for offered, goes in cases:
        for offered.moves_kv in (True, False):
            for seen in (offered, offered.without(())):
                balancer = AdaptiveLocality()
                assert balancer.choose(arrival(), loads(a=0, b=1)) == A
                assert balancer.choose(arrival(tokens=100_000), seen) == (B if goes and offered.moves_kv else A)


def test_adaptive_locality_assigns_a_program_to_the_engine_that_took_its_call() -> None:
    """That engine has the whole prompt. A call that only found its engine full comes back."""
    balancer = AdaptiveLocality()
    chosen = [balancer.choose(arrival(), offered) for offered in (loads(a=0, b=1), loads(b=1), loads(a=9, b=9))]
    assert chosen == [A, B, A]
    assert balancer.choose(arrival(tokens=9), loads(a=9, b=0)) == B
    assert balancer.choose(arrival(), loads(a=9, b=9)) == B


def test_ended_programs_and_sessions_are_forgotten() -> None:
    """Locality keeps nothing of an ended program, and affinity nothing of an ended session."""
    balancers = Locality(), AdaptiveLocality(), Affinity()
    for balancer in balancers:
        balancer.choose(arrival(), loads(a=0))
        balancer.end_program(ProgramId("p"))
        balancer.end_session(SessionId("s"))
    assert [len(balancer) for balancer in balancers] == [0, 0, 0]


class Naive:
    """The rules of five balancers over a plain dict, which is looked through for each call."""

    rules: Final = ("adaptive_locality", "affinity", "least_used", "locality", "round_robin")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: dict[EngineId, int] = {}  # of every engine, in the order in which they were added
        self.last_choice: dict[EngineId, int] = {}
        self.assigned: dict[str, EngineId] = {}
        self.choices = 0
        self.moves_kv = False

    def key(self, call: Arrival) -> str:
        return call.session_id if self.name == "affinity" else call.program_id

    def take(self, chosen: EngineId) -> None:
        """A balancer has sent a call to this engine."""
        self.choices += 1
        self.last_choice[chosen] = self.choices
        self.calls[chosen] += 1

    def rule(self, call: Arrival, able: list[EngineId]) -> EngineId:
        def chosen_at(engine: EngineId) -> int:
            return self.last_choice.get(engine, 0)

        least = min(able, key=lambda engine: (self.calls[engine], chosen_at(engine)))
        if self.name == "round_robin":
            return min(able, key=chosen_at)
        if self.name == "least_used" or (self.name == "locality" and call.prompt_tokens <= SHORT):
            return least
        own, key = self.assigned.get(self.key(call)), self.key(call)
        if self.name == "locality":
            own = self.assigned.setdefault(key, least)
            return own if own in able else least
        if self.name == "affinity":
            if own not in able or self.calls[own] >= 0.8 * CAPACITY:
                self.assigned[key] = least
            return self.assigned[key]
        if own is not None and own not in able:
            return least
        gap = self.calls[own] - self.calls[least] if own is not None else 0
        is_uneven = self.moves_kv and gap >= 1.5 * (1 + self.calls[least])
        if own is None or is_uneven or call.prompt_tokens * (1 + self.calls[least]) <= 1024 * gap:
            self.assigned[key] = least
        return self.assigned[key]


class BalancerMachine(RuleBasedStateMachine):
    """Any balancer in a set of replicas that come, go, fill up and are avoided, against the rule over a plain dict."""

    config: BalancerConfig

    def __init__(self) -> None:
        super().__init__()
        self.replicas = ReplicaSet(self.config.make(), max_calls=MAX_CALLS)
        self.replicas.loads.capacity = CAPACITY
        self.naive = Naive(self.config.name)
        self.open: set[EngineId] = set()
        self.down: set[EngineId] = set()
        for _ in range(3):
            self.add(ready=True)

    @rule()
    def share_memory(self) -> None:
        self.naive.moves_kv = self.replicas.loads.moves_kv = True

    def some(self, index: int) -> EngineId:
        return list(self.naive.calls)[index % len(self.naive.calls)]

    @rule(ready=st.booleans())
    def add(self, ready: bool) -> None:
        engine = EngineId(f"e{len(self.naive.calls)}")
        self.replicas.add(engine)
        self.naive.calls[engine] = 0
        if ready:
            self.start(len(self.naive.calls) - 1)

    @rule(index=st.integers(0, 9))
    def start(self, index: int) -> None:
        engine = self.some(index)
        if engine in self.down:
            self.replicas.due(1000.0)
            self.down.clear()  # all others that were down start, too
        self.replicas.ready(engine, 0.0)
        self.open.add(engine)

    @rule(
        program=st.integers(0, 3), tokens=st.sampled_from([1, 300, SHORT, LONG, 9000]), avoid=st.sets(st.integers(0, 2))
    )
    def call(self, program: int, tokens: int, avoid: set[int]) -> None:
        avoided = {self.some(index) for index in avoid}
        able = [engine for engine in self.naive.calls if engine in self.open and self.naive.calls[engine] < MAX_CALLS]
        able = [engine for engine in able if engine not in avoided] or able
        call = arrival(f"p{program}", tokens, f"s{program % 2}")
        chosen = self.replicas.dispatch(call, avoided)
        if not able:
            assert chosen is None
            return
        assert chosen in able
        if self.config.name in Naive.rules:
            assert chosen == self.naive.rule(call, able)
        self.naive.take(chosen)

    @rule(index=st.integers(0, 9), count=st.integers(1, 4))
    def finish(self, index: int, count: int) -> None:
        engine = self.some(index)
        for _ in range(min(count, self.naive.calls[engine])):
            self.replicas.leave(engine)
            self.naive.calls[engine] -= 1

    @rule(index=st.integers(0, 9))
    def move(self, index: int) -> None:
        engine = self.some(index)
        takes = engine in self.open and self.naive.calls[engine] < MAX_CALLS
        assert self.replicas.move(engine) == takes
        self.naive.calls[engine] += takes

    @rule(index=st.integers(0, 9))
    def die(self, index: int) -> None:
        engine = self.some(index)
        self.replicas.down(engine, "killed", 0.0)
        self.open.discard(engine)
        self.down.add(engine)
        self.naive.last_choice.pop(engine, None)
        self.naive.assigned = {key: own for key, own in self.naive.assigned.items() if own != engine}

    @rule(program=st.integers(0, 3))
    def end(self, program: int) -> None:
        call = arrival(f"p{program}", 1, f"s{program % 2}")
        self.replicas.balancer.end_program(call.program_id)
        self.replicas.balancer.end_session(call.session_id)
        self.naive.assigned.pop(self.naive.key(call), None)

    @invariant()
    def agrees(self) -> None:
        balancer, loads = self.replicas.balancer, self.replicas.loads
        if isinstance(balancer, Locality | AdaptiveLocality | Affinity):
            assert len(balancer) == len(self.naive.assigned)
        expected = [(engine, calls) for engine, calls in self.naive.calls.items() if engine in self.open]
        assert [(load.engine_id, load.calls) for load in loads.all()] == expected
        assert [(load.engine_id, load.calls) for load in loads.able()] == [
            (engine, calls) for engine, calls in expected if calls < MAX_CALLS
        ]
        if expected:
            assert (loads.fewest_calls, loads.most_calls) == (min(c for _, c in expected), max(c for _, c in expected))


@pytest.mark.parametrize("name", BALANCERS)
def test_any_sequence_of_events(name: str) -> None:
    """Each call goes to an engine that can take it. If `Naive` has the balancer's rule, the engine is the one to which
    that rule sends the call."""
    machine = type(f"Machine_{name}", (BalancerMachine,), {"config": BalancerConfig(name)})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40)
    case("runTest").runTest()
