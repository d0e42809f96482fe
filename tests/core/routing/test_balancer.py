"""Balancers: Algorithm 2 line by line, its baselines, and invariants under any sequence of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.ids import EngineId, ProgramId, SessionId
from weft.core.routing import (
    BALANCERS,
    AdaptiveLocality,
    Affinity,
    Arrival,
    Balancer,
    BalancerConfig,
    EngineLoad,
    LeastUsed,
    Locality,
    RoundRobinBalancer,
)

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
SHORT, LONG = 2048, 2049
CAPACITY = 10  # calls that each engine runs at once


def arrival(program: str = "p", tokens: int = LONG, session: str = "s") -> Arrival:
    return Arrival(ProgramId(program), SessionId(session), tokens)


def loads(**calls: int) -> list[EngineLoad]:
    return [EngineLoad(EngineId(name), count, CAPACITY) for name, count in calls.items()]


def test_a_short_call_goes_to_the_least_used_engine_and_assigns_nothing() -> None:
    """Algorithm 2 lines 2-3: a prompt of 2048 tokens is still short, and its program stays unassigned."""
    balancer = Locality()
    assert balancer.choose(arrival(tokens=SHORT), loads(a=1, b=0)) == B
    assert balancer.choose(arrival(tokens=SHORT), loads(a=0, b=1)) == A
    assert balancer.assigned(ProgramId("p")) is None


def test_a_long_call_goes_to_its_programs_engine_however_busy() -> None:
    """Lines 5-10: the first long call assigns the program to the least used engine; all later ones go there."""
    balancer = Locality()
    assert balancer.choose(arrival(), loads(a=5, b=4)) == B
    assert balancer.choose(arrival(), loads(a=0, b=50)) == B
    assert balancer.choose(arrival("other"), loads(a=0, b=50)) == A
    assert balancer.assigned(ProgramId("p")) == B


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
    balancer = Locality()
    chosen = [balancer.choose(arrival(f"p{n}"), loads(a=0, b=0, c=0)) for n in range(6)]
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
    balancer = RoundRobinBalancer()
    assert [balancer.choose(arrival(), loads(a=9, b=0)) for _ in range(4)] == [A, B, A, B]
    assert [balancer.choose(arrival(), loads(a=9, b=0, c=0)) for _ in range(4)] == [C, A, B, C]
    assert [balancer.choose(arrival(), loads(b=0, c=0)) for _ in range(3)] == [B, C, B]


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
    assert balancer.assigned(SessionId("s")) == B


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
    session, program = Affinity(), Affinity(by="program")
    two = [arrival("one"), arrival("two")]
    assert [session.choose(call, loads(a=0, b=0)) for call in two] == [A, A]
    assert [program.choose(call, loads(a=0, b=0)) for call in two] == [A, B]
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


@pytest.mark.parametrize("name", BALANCERS)
def test_no_engine_at_all_is_an_error(name: str) -> None:
    """Only the caller can wait or refuse the call; a balancer cannot."""
    with pytest.raises(ValueError, match="no engine"):
        BalancerConfig(name).make().choose(arrival(), [])


@given(st.data(), st.sampled_from(BALANCERS))
def test_the_same_calls_get_the_same_engines(data: st.DataObject, name: str) -> None:
    """There is no hidden randomness: two balancers that see the same calls choose the same engines."""
    seen = data.draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4000), st.lists(st.integers(0, 9), min_size=1)))
    )
    one, other = BalancerConfig(name).make(), BalancerConfig(name).make()
    for program, tokens, calls in seen:
        offered = [EngineLoad(EngineId(f"e{n}"), count, CAPACITY) for n, count in enumerate(calls)]
        call = arrival(f"p{program}", tokens, f"s{program % 3}")
        assert one.choose(call, offered) == other.choose(call, offered)


class BalancerMachine(RuleBasedStateMachine):
    """Any balancer, with engines and programs that come and go, checked against Algorithm 2 and eq. 7."""

    config: BalancerConfig

    def __init__(self) -> None:
        super().__init__()
        self.balancer: Balancer = self.config.make()
        self.calls: Counter[EngineId] = Counter()
        self.engines: list[EngineId] = [A, B]
        self.added = 0
        self.expected: dict[str, EngineId] = {}  # the engine of each program, or session, by the rules of the paper

    def key(self, program: int) -> str:
        return f"s{program % 2}" if self.balancer.name == "affinity" else f"p{program}"

    @rule(program=st.integers(0, 3), tokens=st.sampled_from([1, SHORT, LONG, 9000]), full=st.integers(0, 4))
    def call(self, program: int, tokens: int, full: int) -> None:
        offered = [
            EngineLoad(engine, self.calls[engine], CAPACITY) for n, engine in enumerate(self.engines) if n != full
        ]
        if not offered:
            return
        chosen = self.balancer.choose(arrival(f"p{program}", tokens, f"s{program % 2}"), offered)
        by_engine = {load.engine_id: load.calls for load in offered}
        assert chosen in by_engine
        least = min(by_engine.values())
        expected = self.expected.get(self.key(program))
        if self.balancer.name == "least_used" or (self.balancer.name == "locality" and tokens <= SHORT):
            assert by_engine[chosen] == least
        elif self.balancer.name == "locality":
            assert chosen == expected if expected in by_engine else by_engine[chosen] == least
            self.expected.setdefault(self.key(program), chosen)
        elif self.balancer.name == "adaptive_locality":
            if expected in by_engine and tokens * (1 + least) > 1024 * (by_engine[expected] - least):
                assert chosen == expected
            else:
                assert by_engine[chosen] == least
                if expected in by_engine or expected is None:
                    self.expected[self.key(program)] = chosen
        elif self.balancer.name == "affinity":
            if expected in by_engine and by_engine[expected] < 0.8 * CAPACITY:
                assert chosen == expected
            else:
                assert by_engine[chosen] == least
            self.expected[self.key(program)] = chosen
        self.calls[chosen] += 1

    @rule(index=st.integers(0, 9))
    def finish(self, index: int) -> None:
        engine = self.engines[index % len(self.engines)]
        self.calls[engine] = max(0, self.calls[engine] - 1)

    @rule()
    def add_engine(self) -> None:
        self.added += 1
        self.engines.append(EngineId(f"new{self.added}"))

    @precondition(lambda self: len(self.engines) > 1)
    @rule(index=st.integers(0, 9), returns=st.booleans())
    def lose_engine(self, index: int, returns: bool) -> None:
        lost = self.engines[index % len(self.engines)]
        self.balancer.lose_engine(lost)
        self.calls[lost] = 0
        self.expected = {key: engine for key, engine in self.expected.items() if engine != lost}
        if not returns:
            self.engines.remove(lost)

    @rule(program=st.integers(0, 3))
    def end(self, program: int) -> None:
        self.balancer.end_program(ProgramId(f"p{program}"))
        self.balancer.end_session(SessionId(f"s{program % 2}"))
        self.expected.pop(self.key(program), None)

    @invariant()
    def remembers_only_live_programs_and_sessions(self) -> None:
        if isinstance(self.balancer, Locality | AdaptiveLocality | Affinity):
            assert len(self.balancer) == len(self.expected)


@pytest.mark.parametrize("name", BALANCERS)
def test_any_sequence_of_events(name: str) -> None:
    """Each call goes to the engine that the rule demands, and ended programs and sessions are forgotten."""
    machine = type(f"Machine_{name}", (BalancerMachine,), {"config": BalancerConfig(name)})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40)
    case("runTest").runTest()
