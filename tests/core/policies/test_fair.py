"""Fair shares of tenants: what each gets, in the long run and while it waits; and with one tenant, nothing changes."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.core.errors import PolicyError
from weft.core.ids import ProgramId
from weft.core.policies import Call, Fair, PolicyConfig, ProgramView
from weft.core.policies.fair_shares.fair import EPOCH_S, PATIENCE_S, LearnedRemaining, Task, Tenant, demand, shares
from weft.core.policies.fair_shares.stride import CREDIT_CALLS
from weft.core.policies.view import ProgramEnded
from weft.core.sim import SimSettings, simulate
from weft.core.trace.workloads import generate, poisson

# -- shares


def test_half_the_time_left_is_twice_the_demand() -> None:
    """A tenant needs the work left of its programs by the time left of each."""
    assert demand([Task(0.2, 14.0, 1.0)], 10.0) == pytest.approx(0.05)
    assert demand([Task(0.2, 12.0, 1.0)], 10.0) == pytest.approx(0.1)
    assert demand([Task(0.2, 12.0, 1.0), Task(0.2, 14.0, 1.0)], 10.0) == pytest.approx(0.15)


def test_a_deadline_that_has_passed_needs_no_more_than_one_that_is_near() -> None:
    """The time left is at least an epoch, and 5 % of the program's time alone."""
    assert demand([Task(0.02, 5.0, 1.0)], 10.0) == pytest.approx(0.02 / EPOCH_S)
    assert demand([Task(0.02, 5.0, 4.0)], 10.0) == pytest.approx(0.02 / 0.2)
    assert demand([Task(0.02, math.inf, 1.0)], 10.0) == 0.0
    assert demand([Task(math.nan, 11.0, 1.0)], 10.0) == math.inf


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 2) | st.just(math.inf)), min_size=1, max_size=12))
def test_the_engine_is_divided(given_tenants: list[tuple[float, float]]) -> None:
    """All shares are above a quarter of the weight's part, their sum is 1, and who gets less than it needs gets as much
    by weight as anybody, if the small part that comes regardless is left out."""
    tenants = [Tenant(*each) for each in given_tenants]
    found = shares(tenants)
    total = math.fsum(tenant.weight for tenant in tenants)
    assert math.fsum(found) == pytest.approx(1)
    by_weight = []
    for tenant, share in zip(tenants, found, strict=True):
        assert share >= 0.249 * tenant.weight / total
        by_weight.append(share / tenant.weight)
    for tenant, share in zip(tenants, found, strict=True):
        if tenant.demand == math.inf:
            assert share / tenant.weight == pytest.approx(max(by_weight), rel=1e-6)


def test_sending_more_does_not_buy_more() -> None:
    """Two tenants that need more than there is share it equally, however much each needs; a small one gets all it
    needs and its part of what comes regardless."""
    light, heavy, heaviest = shares([Tenant(1, 0.1), Tenant(1, 0.9), Tenant(1, math.inf)])
    assert heavy == heaviest == pytest.approx(0.25 / 3 + 0.75 * 0.45)
    assert light == pytest.approx(0.25 / 3 + 0.75 * 0.1)


# -- one tenant


@pytest.mark.parametrize("inner", ["fcfs", "rr", "mlfq", "plas", "atlas", "learned", "auto", "astraea"])
@pytest.mark.parametrize("gate", [False, True])
def test_one_tenant_has_the_runs_of_the_inner_policy(inner: str, gate: bool) -> None:
    """Every call runs when it runs under the inner policy, with a gate too, whether the tenant has a name or not."""
    programs = generate("mixed", 12, poisson(random.Random(1), 2.0), random.Random(2))
    settings = SimSettings(policy=PolicyConfig(inner, gate=gate), batch_size=6, kv_tokens=40_000)
    expected = simulate(programs, settings, runs=True)
    named = [replace(program, tenant="one") for program in programs]
    for given_programs in (programs, named):
        fair = replace(settings, policy=PolicyConfig("fair", inner=inner, gate=gate))
        result = simulate(given_programs, fair, runs=True)
        assert (result.programs, result.runs, result.counts) == (expected.programs, expected.runs, expected.counts)


# -- several tenants


class Engine:
    """Some slots that a fair policy fills. Each call takes 256 tokens, which is what the policy expects at first."""

    def __init__(self, weights: Mapping[str, float], slots: int = 2, inner: str = "fcfs") -> None:
        policy = PolicyConfig("fair", inner=inner, weights=weights).make()
        assert isinstance(policy, Fair)
        self.policy, self.slots = policy, slots
        self.running: list[Call] = []
        self.now_s = 0.0
        self.served: Counter[str] = Counter()
        self.numbers = itertools.count()

    def arrive(self, tenant: str, program: ProgramView | None = None) -> Call:
        number = next(self.numbers)
        if program is None:
            program = ProgramView(ProgramId(f"p{number}"), "name", tenant, arrival_s=self.now_s)
        call = Call(f"c{number}", program)
        self.policy.arrive(call, self.now_s)
        return call

    def preempt(self) -> list[Call]:
        self.policy.decide(self.now_s)
        free = self.slots - len(self.running)
        victims = self.policy.victims(self.running, free) if len(self.policy.waiting) else []
        for call in victims:
            self.running.remove(call)
            self.policy.preempt(call, self.now_s)
        return victims

    def fill(self) -> list[Call]:
        started = []
        while len(self.running) < self.slots and len(self.policy.waiting):
            call = self.policy.waiting.peek()
            self.policy.start(call, self.now_s)
            self.running.append(call)
            started.append(call)
        return started

    def finish(self, call: Call) -> None:
        self.running.remove(call)
        call.output_tokens = 256
        self.policy.leave(call)
        self.policy.on_event(ProgramEnded(call.program))
        self.served[call.program.tenant or ""] += 1


def test_in_the_long_run_tenants_are_served_by_weight() -> None:
    """Tenants that always wait are served in proportion to their weights, however many calls each has sent."""
    engine = Engine({"a": 1.0, "b": 2.0, "c": 5.0})
    for tenant, count in (("a", 2000), ("b", 500), ("c", 600)):
        for _ in range(count):
            engine.arrive(tenant)
    for _ in range(800):
        engine.now_s += 0.05
        engine.preempt()
        engine.fill()
        engine.finish(engine.running[0])
    total = sum(engine.served.values())
    assert {tenant: round(8 * count / total, 1) for tenant, count in engine.served.items()} == {"a": 1, "b": 2, "c": 5}


def test_a_tenant_that_returns_has_little_credit_and_no_debt_for_idle_time() -> None:
    """After a thousand calls of another tenant a newcomer gets its credit of calls first, not a thousand. Then the two
    take turns."""
    engine = Engine({}, slots=1)
    for _ in range(1100):
        engine.arrive("a")
    engine.arrive("b")
    for _ in range(1000):
        engine.fill()
        engine.finish(engine.running[0])
    for _ in range(20):
        engine.arrive("b")
    engine.served.clear()
    for _ in range(20):
        engine.fill()
        engine.finish(engine.running[0])
    assert engine.served["b"] - CREDIT_CALLS in (8, 9)  # of the other 16


def test_a_tenant_that_is_kept_waiting_preempts_the_one_with_more_than_its_share() -> None:
    """Without credit not before half a second, nor at the cost of a tenant that has had no more than its share."""
    engine = Engine({}, slots=4)
    arrive = engine.arrive

    def arrive_without_credit(tenant: str) -> Call:
        call = arrive(tenant)
        queue = engine.policy.queue
        queue._set_virtual_time(queue.tenants[tenant], max(queue.tenants[tenant].virtual_time, 0.0))
        return call

    engine.arrive = arrive_without_credit  # type: ignore[method-assign,assignment]
    for _ in range(4):
        engine.arrive("a")
    engine.policy.queue.tenants["a"].share = 0.5
    engine.fill()
    first = engine.arrive("b")
    assert engine.preempt() == []
    engine.now_s = PATIENCE_S + EPOCH_S
    victims = engine.preempt()
    assert [call.program.tenant for call in victims] == ["a"]
    assert engine.fill() == [first]
    engine.arrive("b")
    engine.now_s += PATIENCE_S + EPOCH_S
    assert len(engine.preempt()) == 1
    engine.fill()
    engine.arrive("b")
    engine.now_s += PATIENCE_S + EPOCH_S
    assert engine.preempt() == []  # both run two calls


def test_a_tenant_with_credit_preempts_at_once() -> None:
    """A tenant that has asked for less than its share does not wait for a slot, until its credit is used up."""
    engine = Engine({}, slots=2)
    for _ in range(40):
        engine.arrive("a")
    for _ in range(20):
        engine.fill()
        engine.finish(engine.running[0])
    engine.fill()
    waits = []
    for _ in range(2 * CREDIT_CALLS):
        call = engine.arrive("b")
        waits.append(not engine.preempt())
        engine.fill()
        if call in engine.running:
            engine.finish(call)
        engine.fill()
    assert not any(waits[: CREDIT_CALLS - 1])
    assert any(waits[CREDIT_CALLS:])


def test_a_call_preempts_those_of_its_own_tenant_as_the_inner_policy_says() -> None:
    """Among several tenants a program that has had little displaces one of its tenant that has had much."""
    engine = Engine({}, slots=1, inner="atlas")
    old = ProgramView(ProgramId("old"), "name", "a", arrival_s=0.0)
    old.attained.service_s = 100.0
    running = engine.arrive("a", old)
    engine.fill()
    engine.arrive("b")
    engine.arrive("a")
    engine.policy.queue.tenants["a"].virtual_time = -1.0  # so that it is its turn
    assert engine.preempt() == [running]


def test_a_tenant_that_is_named_late_stays_where_it_was() -> None:
    """A program whose first call named no tenant counts with those without one, until it ends."""
    engine = Engine({})
    program = ProgramView(ProgramId("p"), "name", None, arrival_s=0.0)
    first = engine.arrive("", program)
    engine.fill()
    program.tenant = "late"
    second = engine.arrive("", program)
    engine.fill()
    engine.finish(first)
    engine.finish(second)
    assert list(engine.policy.queue.tenants) == [""]
    assert engine.policy.queue.tenants[""].programs == {}


def test_the_work_left_is_learned_by_tenant_and_name() -> None:
    """Nothing is known until three programs have ended; then those of the name count, and for others all together."""
    remaining, short = LearnedRemaining(), ProgramView(ProgramId("s"), "short", "t")
    long = ProgramView(ProgramId("l"), "long", "t")
    assert math.isnan(remaining.remaining_tokens(short, 0.0))
    for _ in range(3):
        remaining.ended(short, 100.0)
        remaining.ended(long, 10_000.0)
    for _ in range(3):
        remaining.refresh()
    assert 100 <= remaining.remaining_tokens(short, 0.0) < 2000
    assert remaining.remaining_tokens(long, 0.0) > 5 * remaining.remaining_tokens(short, 0.0)
    assert remaining.remaining_tokens(long, 9000.0) < remaining.remaining_tokens(long, 0.0)
    other = ProgramView(ProgramId("o"), "other", "t")
    assert remaining.remaining_tokens(other, 0.0) > remaining.remaining_tokens(short, 0.0)


def test_a_deadline_gets_a_tenant_the_larger_share() -> None:
    """Two tenants send the same programs, too many for both. The one whose programs have deadlines that are near, and
    work that is known by then, has its programs done earlier."""
    made = generate("chat", 60, poisson(random.Random(3), 3.0), random.Random(4))
    halves = [
        replace(program, tenant="near" if number % 2 else "far", deadline_s=2.0 if number % 2 else 10_000.0)
        for number, program in enumerate(made)
    ]
    result = simulate(halves, SimSettings(policy=PolicyConfig("fair", inner="fcfs", slo=1000.0), batch_size=4))
    means = {
        tenant: statistics.fmean(result.programs[each.program].latency for each in halves if each.tenant == tenant)
        for tenant in ("near", "far")
    }
    assert means["near"] < 0.8 * means["far"]


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}


class FairMachine(RuleBasedStateMachine):
    """Tenants of four weights send calls of one size, in any order, and the engine serves them."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(WEIGHTS, slots=3)
        self.passed_over: Counter[str] = Counter()  # starts of others while a tenant waits

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), count=st.integers(1, 30))
    def send(self, tenant: str, count: int) -> None:
        for _ in range(count):
            self.engine.arrive(tenant)

    @rule(data=st.data())
    @precondition(lambda self: len(self.engine.policy.waiting))
    def abort(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.engine.policy.waiting)[:5]))
        self.engine.policy.leave(call)
        self.engine.policy.on_event(ProgramEnded(call.program))

    @rule(steps=st.integers(1, 60), seconds=st.sampled_from([0.0, 0.02, 0.3, 1.0]), seed=st.integers(0, 99))
    def serve(self, steps: int, seconds: float, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(steps):
            self.engine.now_s += seconds
            self.engine.preempt()
            for call in self.engine.fill():
                self.note(call)
            if self.engine.running:
                self.engine.finish(rng.choice(self.engine.running))

    def note(self, started: Call) -> None:
        waiting = {call.program.tenant or "" for call in self.engine.policy.waiting}
        for tenant in WEIGHTS:
            if tenant == started.program.tenant or tenant not in waiting:
                self.passed_over[tenant] = 0
            else:
                self.passed_over[tenant] += 1

    @invariant()
    def nobody_starves(self) -> None:
        """A tenant's virtual time grows by at most 256 tokens over a quarter of its weight's part with each of its
        calls, and those of others by at least 256. Each of the others may have credit first."""
        total = sum(WEIGHTS.values())
        for tenant, count in self.passed_over.items():
            assert count <= (len(WEIGHTS) - 1) * (4 * total / WEIGHTS[tenant] + 2 + CREDIT_CALLS + self.engine.slots)

    @invariant()
    def state_is_bounded(self) -> None:
        queue = self.engine.policy.queue
        queue.check_integrity()
        calls = set(self.engine.running) | set(queue)
        assert {call for tenant in queue.tenants.values() for call in tenant.calls} == calls
        assert set(queue._reserved) == {call for t in queue.tenants.values() for call in t.running}
        assert set(queue.entered) == calls
        assert set(self.engine.policy._programs) == {call.program for call in calls}

    def teardown(self) -> None:
        """When all have ended, tenants that owe nothing are forgotten."""
        engine = self.engine
        while engine.running or len(engine.policy.waiting):
            engine.fill()
            engine.finish(engine.running[0])
        engine.policy.queue._system_time = math.inf
        engine.policy.queue.forget_idle()
        assert engine.policy.queue.tenants == {}


TestFairMachine = FairMachine.TestCase
TestFairMachine.settings = settings(max_examples=60, stateful_step_count=30)  # one rule serves up to 60 steps


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"inner": "fair"}, "inner must be a policy that an engine can run, other than fair"),
        ({"inner": "srpt"}, "inner must be a policy that an engine can run"),
        ({"inner": "nothing"}, "unknown policy 'nothing'"),
        ({"weights": 3}, "weights must give each tenant's weight"),
        ({"weights": (("a",),)}, "each of weights must be a tenant and its weight"),
        ({"weights": {"a": 0}}, "the weight of tenant 'a' must be"),
        ({"slo": 0.5}, "slo must be a multiple"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], said: str) -> None:
    """The error names the parameter."""
    with pytest.raises(PolicyError, match=said):
        PolicyConfig("fair", **parameters)


def test_weights_survive_json() -> None:
    """A mapping becomes pairs, which JSON can hold, and lists of them come back as pairs."""
    config = PolicyConfig("fair", weights={"a": 2.0})
    assert config.parameters.weights == (("a", 2.0),)
    assert PolicyConfig.from_dict({"name": "fair", "weights": [["a", 2.0]]}) == config
    assert hash(config) == hash(PolicyConfig("fair", weights=[["a", 2.0]]))


@pytest.mark.parametrize(("inner", "gate"), [({}, True), ({"inner": "learned"}, False), ({"gate": False}, False)])
def test_the_inner_policy_says_whether_there_is_a_gate(inner: dict[str, Any], gate: bool) -> None:
    """Fair shares have the gate over `auto`, which is the default. The user may say otherwise."""
    assert PolicyConfig("fair", **inner).gate is gate
