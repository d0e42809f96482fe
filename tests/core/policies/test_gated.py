"""The gate: what is open, what is held back, who makes way, and that nothing waits for ever."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.accounts import Attained
from weft.core.errors import PolicyError
from weft.core.policies import Call, Policy, PolicyConfig, ProgramView, Srpt, StepCosts
from weft.core.policies.admission_gate import FILL
from weft.core.policies.gated import Gated
from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate

COSTS = StepCosts(fixed_s=0.016, decode_token_s=0.0, prefill_token_s=0.01, slots=16)


def gated(name: str = "fcfs", kv_tokens: float = 1000, **parameters: object) -> Gated:
    """A policy behind a gate, for a KV cache of 1000 tokens: 920 for programs that open, 10 s until idle ones close."""
    policy = PolicyConfig(name, gate=True, **parameters).make()
    assert isinstance(policy, Gated)
    policy.use_costs(COSTS)
    policy.use_kv(kv_tokens)
    return policy


def arrive(
    policy: Policy, name: str, prompt_tokens: int, now_s: float = 0.0, program: ProgramView | None = None
) -> Call:
    """A call of a program, a new one if none is given, arrives."""
    call = Call(name, program or ProgramView(name, arrival_s=now_s, arrival_order=int(now_s)), prompt_tokens)
    policy.arrive(call, now_s)
    return call


def run(policy: Policy, call: Call, output_tokens: int, now_s: float) -> None:
    """A call starts, generates its output and leaves."""
    policy.start(call, now_s)
    call.output_tokens = output_tokens
    policy.charge(call, 0.1, now_s)
    policy.leave(call)


def passing(policy: Gated) -> list[str]:
    return [call.key for call in policy.waiting]


def held(policy: Gated) -> list[str]:
    return [call.key for call in policy.held]


def test_programs_open_until_the_cache_is_full() -> None:
    """Two contexts of 400 tokens fit in 920, and the third program waits at the gate."""
    policy = gated()
    for number in range(3):
        arrive(policy, f"p{number}", 400, float(number))
    assert (passing(policy), held(policy)) == (["p0", "p1"], ["p2"])
    policy.check_integrity()


def test_calls_of_an_open_program_always_pass() -> None:
    """A later call of an open program passes those that are held back, even if it does not fit."""
    policy = gated()
    first = arrive(policy, "a1", 400)
    arrive(policy, "b1", 400, 1.0)
    arrive(policy, "c1", 400, 2.0)
    run(policy, first, 10, 3.0)
    arrive(policy, "a2", 900, 4.0, first.program)
    assert "a2" in passing(policy)
    assert held(policy) == ["c1"]
    policy.check_integrity()


def test_between_calls_only_what_is_used_again_counts() -> None:
    """Programs whose next calls use a quarter of the context take a quarter of it while their tools run."""
    policy = gated()
    program = ProgramView("web", "web")
    for number in range(12):
        call = arrive(policy, f"a{number}", 399, float(number), program)
        call.cached_tokens = 100 if number else 0
        run(policy, call, 1, float(number))
        assert policy.gate.used_tokens == (400 if number < 8 else 100)
        policy.check_integrity()
    arrive(policy, "b", 800, 20.0)
    assert held(policy) == []


def test_what_others_have_evicted_is_no_sign_of_less_use() -> None:
    """Of programs that were shut out nothing is learned: their contexts are gone."""
    policy = gated()
    program = ProgramView("loop", "loop")
    for number in range(12):
        call = arrive(policy, f"a{number}", 399, 100.0 * number, program)
        run(policy, call, 1, 100.0 * number)
        policy.gate.close(policy.gate[program])
    policy.gate.open(policy.gate[program])
    assert policy.gate.used_tokens == 400


def test_nobody_overtakes_at_the_gate() -> None:
    """A small program that would fit waits behind a large one, or the large one would wait for ever."""
    policy = gated()
    for name, tokens in (("a", 500), ("large", 800), ("small", 100)):
        arrive(policy, name, tokens)
    assert held(policy) == ["large", "small"]


def test_the_end_of_a_program_makes_room() -> None:
    """When a program ends, the first that is held back opens, at the next decision."""
    policy = gated()
    first = arrive(policy, "a", 800)
    arrive(policy, "b", 800, 1.0)
    run(policy, first, 10, 2.0)
    policy.program_ended(first.program)
    policy.decide(2.0)
    assert (passing(policy), held(policy)) == (["b"], [])


def test_a_program_larger_than_the_cache_opens_alone() -> None:
    """While no open program has a call, the first opens whatever its size."""
    policy = gated()
    arrive(policy, "huge", 5000)
    arrive(policy, "next", 10, 1.0)
    policy.decide(2.0)
    assert (passing(policy), held(policy)) == (["huge"], ["next"])
    policy.check_integrity()


def test_an_idle_program_keeps_its_place_for_a_while() -> None:
    """Between its calls a program stays open for as long as it takes to fill the cache, here 10 s."""
    policy = gated()
    first, busy = arrive(policy, "a1", 500), arrive(policy, "b1", 400)
    run(policy, first, 10, 1.0)
    arrive(policy, "c1", 400, 2.0)
    assert held(policy) == ["c1"]
    policy.decide(2.0)
    assert policy.next_change_s() == 11.0
    policy.decide(10.9)
    assert held(policy) == ["c1"]
    policy.decide(11.0)
    assert passing(policy) == ["b1", "c1"]
    arrive(policy, "a2", 600, 12.0, first.program)
    assert held(policy) == ["a2"]
    assert busy in policy.waiting


def test_idle_programs_make_way_at_once_when_nobody_is_busy() -> None:
    """If the only open program has no call, the engine would stand still; so it closes before its time."""
    policy = gated()
    first = arrive(policy, "a1", 800)
    run(policy, first, 10, 1.0)
    arrive(policy, "b1", 800, 2.0)
    assert passing(policy) == ["b1"]


def test_the_last_in_rank_closes_when_the_cache_is_exceeded() -> None:
    """Contexts that have grown over the cache shut out the last in rank. What it has waiting is held back."""
    policy = gated()
    first, second = arrive(policy, "a1", 400), arrive(policy, "b1", 400)
    run(policy, first, 300, 1.0)
    arrive(policy, "a2", 800, 2.0, first.program)
    policy.decide(3.0)
    assert (passing(policy), held(policy)) == (["b1"], ["a2"])
    assert second in policy.waiting


def test_a_preempted_call_of_a_closed_program_is_held_back() -> None:
    """A running call of a program that closes runs on. Once preempted, it waits at the gate."""
    policy = gated()
    first, second = arrive(policy, "a1", 400), arrive(policy, "b1", 400)
    for call in (first, second):
        policy.start(call, 0.0)
    arrive(policy, "b2", 900, 1.0, second.program)
    policy.decide(1.0)
    assert held(policy) == ["b2"]
    policy.preempt(second, 2.0)
    assert set(held(policy)) == {"b1", "b2"}
    policy.check_integrity()


def test_a_better_queue_takes_the_room_of_a_worse_one() -> None:
    """Under ATLAS a new program displaces an open one in a later queue, and none of its own queue."""
    policy = gated("atlas", bounds_s=(1.0, 2.0))
    old, other = arrive(policy, "old", 450), arrive(policy, "other", 450)
    policy.start(old, 0.0)
    policy.charge(old, 5.0, 5.0)
    assert old.rank.level > 0
    policy.preempt(old, 5.0)
    policy.decide(5.0)
    arrive(policy, "new", 450, 5.0)
    assert passing(policy) == ["other", "new"]
    assert held(policy) == ["old"]
    arrive(policy, "newer", 450, 6.0)
    assert set(held(policy)) == {"old", "newer"}
    assert other in policy.waiting


def test_displacement_must_pay() -> None:
    """Learned ranks displace only if the better rank outweighs twice the time to compute the lost context again."""
    for prefill_token_s, is_displaced in ((1e-6, True), (10.0, False)):
        policy = gated("learned", kv_tokens=1000)
        for size, name in ((10, "short"), (50_000, "long")):
            for number in range(12):
                call = arrive(policy, f"{name}{number}", 1, 0.0, ProgramView(f"{name}{number}", name, arrival_s=0.0))
                policy.start(call, 0.0)
                call.computed_tokens = size
                policy.charge(call, 1.0, 0.0)
                policy.leave(call)
                policy.program_ended(call.program)
        policy.use_costs(StepCosts(0.016, 0.0, prefill_token_s, 16))
        long = arrive(policy, "L", 800, 2.0, ProgramView("L", "long", arrival_s=2.0))
        policy.decide(2.0)
        while policy.next_change_s() <= 2.0:
            policy.decide(2.0)
        arrive(policy, "S", 800, 3.0, ProgramView("S", "short", arrival_s=3.0, arrival_order=1))
        assert (long in policy.held) == is_displaced


@pytest.mark.parametrize(("left", "is_displaced"), [(15_000.0, True), (5_000.0, False)])
def test_the_clairvoyant_displaces_if_it_pays(left: float, is_displaced: bool) -> None:
    """SRPT behind the gate knows sizes and cache: 100 tokens displace a program only if it has more left than they and
    twice the time to compute again the 430 tokens that it loses, which is that of 8,600 output tokens here."""
    policy = Gated(Srpt(lambda call: call.program.predicted_tokens))
    policy.use_costs(COSTS)
    policy.use_kv(1000)
    for name, work in (("long", left), ("other", 1.0), ("short", 100.0)):
        arrive(policy, name, 450, 0.0, ProgramView(name, predicted_tokens=work))
    policy.decide(0.0)
    assert ("long" in held(policy)) == is_displaced
    assert ("short" in passing(policy)) == is_displaced


def test_a_newcomer_pays_only_for_its_own_room() -> None:
    """The open programs have grown beyond what may open, by 60 tokens. A newcomer of 100 needs 100, and no more."""
    policy = gated("atlas", bounds_s=(1.0,))
    costs_s: list[float] = []
    policy.inner.displaces = lambda _call, _rank, cost_s: bool(costs_s.append(cost_s)) or True  # type: ignore[method-assign,func-returns-value]
    old = arrive(policy, "old", 900)
    policy.start(old, 0.0)
    policy.charge(old, 5.0, 5.0)
    policy.preempt(old, 5.0)
    policy.decide(5.0)
    policy.gate.used_tokens += 80  # as if it had grown
    policy.gate[old.program].calls[old] += 80
    arrive(policy, "new", 100, 5.0)
    assert costs_s == [pytest.approx(2 * 100 * COSTS.prefill_token_s)]
    assert passing(policy) == ["new"]


def test_programs_that_are_alike_keep_their_places_by_arrival() -> None:
    """What a program of a class of like work has had does not cost it its place at the gate."""
    policy = gated("learned", kv_tokens=10_000)
    for number in range(12):
        call = arrive(policy, f"p{number}", 1, 0.0, ProgramView(f"p{number}", "alike", arrival_s=0.0))
        run(policy, call, 1000, 0.0)
        policy.program_ended(call.program)
    for _ in range(5):
        policy.decide(1.0)
    early = arrive(policy, "early", 450, 2.0, ProgramView("early", "alike", arrival_s=2.0))
    late = arrive(policy, "late", 400, 2.0, ProgramView("late", "alike", arrival_s=2.0, arrival_order=1))
    policy.start(early, 2.5)
    early.output_tokens = 500
    policy.charge(early, 1.0, 3.0)
    for _ in range(5):
        policy.decide(3.0)
    assert late.rank < early.rank
    assert [each.program for each in policy.gate.last_first()] == [late.program, early.program]


def test_two_programs_do_not_displace_each_other() -> None:
    """A program counts with its best call. If it counted with another one, these two would displace each other for
    ever: each has a call in a better queue than some call of the other."""
    policy = gated("atlas", bounds_s=(1.0, 2.0))
    first = arrive(policy, "a1", 800)
    policy.start(first, 0.0)
    arrive(policy, "a2", 800, 0.0, first.program)
    for now_s in (5.0, 10.0):
        policy.charge(first, 5.0, now_s)
    middle = ProgramView("b", attained=Attained(service_s=1.5))
    assert [call.rank.level for call in (first, arrive(policy, "b1", 800, 10.0, middle))] == [2, 1]
    assert (passing(policy), held(policy)) == (["a2"], ["b1"])


def test_only_what_is_lost_is_a_cost() -> None:
    """A context of 800 tokens makes way for 200, of which 80 are missing: twice 80 tokens are computed again, at 10 ms
    each. A policy that would pay for that, and not for the whole context, displaces."""
    policy, costs_s = gated("priority"), []
    policy.inner.displaces = lambda _call, _rank, cost_s: bool(costs_s.append(cost_s)) or cost_s < 10  # type: ignore[method-assign,func-returns-value]
    arrive(policy, "worse", 800, 2.0)
    arrive(policy, "better", 200, 1.0)
    assert costs_s == [pytest.approx(1.6)]
    assert (passing(policy), held(policy)) == (["better"], ["worse"])


def test_prefixes_of_other_programs_are_not_counted() -> None:
    """What a program's first call finds in the prefix cache is there for others too. Counted once, three programs fit
    that would not fit with their whole prompts."""
    policy = gated()
    for number in range(3):
        call = arrive(policy, f"p{number}", 500, float(number))
        call.cached_tokens = 400 if number else 0
        if call in policy.waiting:
            policy.start(call, float(number))
        policy.decide(float(number))
    policy.decide(4.0)
    assert policy.gate.used_tokens <= 920


def test_without_a_bound_everything_passes() -> None:
    """Where the KV cache has no bound, the gate changes nothing."""
    policy = gated(kv_tokens=math.inf)
    for number in range(50):
        arrive(policy, f"p{number}", 10_000, float(number))
    assert not policy.held


def test_a_gate_that_is_neither_true_nor_false_is_refused() -> None:
    """1 is no gate."""
    with pytest.raises(PolicyError, match="gate must be true or false, not 1"):
        PolicyConfig("atlas", gate=1)  # type: ignore[arg-type]


def agents(seed: int, count: int = 24) -> list[TraceProgram]:
    """Programs of up to eight calls one after another, each with the context of those before it, and pauses."""
    rng, programs = random.Random(seed), []
    for number in range(count):
        calls: list[TraceCall] = []
        context = 0
        for index in range(rng.randint(1, 8)):
            parents = (f"c{index - 1}",) if index else ()
            prompt, output = context + rng.randint(20, 100), rng.randint(1, 40)
            calls.append(
                TraceCall(
                    f"c{index}", parents, output, prompt, float(rng.choice((0, 0, 1))), shared_prefix_tokens=context
                )
            )
            context = prompt + output
        programs.append(TraceProgram(f"p{number}", tuple(calls), number * 0.2, rng.choice("ab")))
    return programs


@pytest.mark.parametrize("name", ["fcfs", "atlas", "plas", "mlfq", "rr", "priority", "srpt", "learned"])
def test_the_gate_computes_less_again(name: str) -> None:
    """Under every policy all programs end behind the gate, and where contexts exceed the cache, fewer prompt tokens
    are computed than without the gate."""
    computed = {}
    for gate in (False, True):
        policy = PolicyConfig(name, gate=gate)
        results = [
            simulate(agents(seed, 40), SimSettings(policy=policy, batch_size=4, kv_tokens=1500)) for seed in range(3)
        ]
        assert all(row.finish >= row.arrival for result in results for row in result.programs.values())
        counts = [result.counts for result in results]
        computed[gate] = sum(each.prompt - each.prefix_hits + each.recomputed for each in counts)
    assert computed[True] < computed[False]


@pytest.mark.parametrize("name", ["fcfs", "atlas", "learned"])
def test_the_same_seed_gives_the_same_schedule_behind_the_gate(name: str) -> None:
    """Ten runs of one workload agree call by call."""
    settings = SimSettings(policy=PolicyConfig(name, gate=True), batch_size=4, kv_tokens=1500)
    first = simulate(agents(1), settings, runs=True)
    assert all(simulate(agents(1), settings, runs=True) == first for _ in range(9))


def test_a_call_that_makes_room_is_held_back_at_once() -> None:
    """A better program is shut out because the open ones are too small to make room for it. When a call of an open one
    adds what is missing, that program is displaced, and the call is held back with it."""
    policy, served = gated("atlas", bounds_s=(1.0, 3.0)), Attained(service_s=5.0, total_service_s=5.0)
    better = ProgramView("better")
    worse, other = (ProgramView(name, attained=served) for name in ("worse", "other"))
    first = arrive(policy, "first", 320, 0.0, better)
    arrive(policy, "long", 500, 0.0, worse)
    run(policy, first, 100, 0.0)
    arrive(policy, "other", 200, 10.0, other)  # it takes the room of the better program, which has been idle
    large = arrive(policy, "large", 925, 10.0, better)
    assert held(policy) == ["large"]
    arrive(policy, "more", 300, 10.0, worse)
    assert large in policy.waiting
    assert "more" in held(policy)


class GateMachine(RuleBasedStateMachine):
    """Programs open, call, pause, are preempted, abort and end, in any order, under any policy."""

    @initialize(name=st.sampled_from(["fcfs", "atlas", "priority", "learned"]))
    def make(self, name: str) -> None:
        parameters = {"bounds_s": (1.0, 3.0)} if name == "atlas" else {}
        self.policy = gated(name, **parameters)
        self.calls: dict[Call, bool] = {}  # whether it runs
        self.programs: list[ProgramView] = []
        self.numbers = itertools.count()
        self.now_s = 0.0

    @rule(prompt_tokens=st.integers(1, 1500), name=st.sampled_from("ab"))
    def new_program(self, prompt_tokens: int, name: str) -> None:
        number = next(self.numbers)
        view = ProgramView(f"p{number}", name, arrival_s=self.now_s, arrival_order=number)
        self.programs.append(view)
        self.calls[arrive(self.policy, f"c{number}", prompt_tokens, self.now_s, view)] = False

    @precondition(lambda self: self.programs)
    @rule(data=st.data(), prompt_tokens=st.integers(1, 1500))
    def next_call(self, data: st.DataObject, prompt_tokens: int) -> None:
        view = data.draw(st.sampled_from(self.programs))
        gate = self.policy.gate
        open_before = {each.program for each in gate if each.is_open}
        call = arrive(self.policy, f"c{next(self.numbers)}", prompt_tokens, self.now_s, view)
        self.calls[call] = False
        if view in open_before and call not in self.policy.waiting:  # it made room for a better program
            opened = [each.standing for each in gate if each.is_open and each.program not in open_before]
            assert min(opened) < gate[view].standing

    @precondition(lambda self: self.policy.waiting)
    @rule(cached=st.integers(0, 200))
    def start_first(self, cached: int) -> None:
        call = self.policy.waiting.peek()
        call.cached_tokens = min(cached, call.prompt_tokens)
        self.policy.start(call, self.now_s)
        self.calls[call] = True

    @precondition(lambda self: any(self.calls.values()))
    @rule(data=st.data(), tokens=st.integers(1, 200), service_s=st.floats(0.01, 3.0))
    def serve(self, data: st.DataObject, tokens: int, service_s: float) -> None:
        call = data.draw(st.sampled_from([call for call, runs in self.calls.items() if runs]))
        call.output_tokens += tokens
        self.policy.charge(call, service_s, self.now_s)

    @precondition(lambda self: any(self.calls.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from([call for call, runs in self.calls.items() if runs]))
        self.policy.preempt(call, self.now_s)
        self.calls[call] = False

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A call ends, or is aborted while it waits or is held back."""
        call = data.draw(st.sampled_from(list(self.calls)))
        del self.calls[call]
        self.policy.leave(call)

    @precondition(lambda self: self.programs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A program ends; calls of it may be left, which are aborted later."""
        self.policy.program_ended(self.programs.pop(data.draw(st.integers(0, len(self.programs) - 1))))

    @rule(seconds=st.floats(0, 40))
    def decide(self, seconds: float) -> None:
        self.now_s += seconds
        self.policy.decide(self.now_s)
        if self.policy.held:
            first = self.policy.gate[self.policy.held.peek().program]
            assert not self.policy.gate.fits(first)  # the gate is work-conserving
        assert not self.policy.gate.is_exceeded()

    @invariant()
    def exactly_the_closed_are_held_back(self) -> None:
        if not hasattr(self, "policy"):
            return
        self.policy.check_integrity()  # and somebody may run, if anybody is held back
        waiting = [call for call, runs in self.calls.items() if not runs]
        assert len(self.policy.waiting) + len(self.policy.held) == len(waiting)
        assert FILL < 1

    def teardown(self) -> None:
        """All calls are served in the end: nothing is held back for ever, and nothing is kept of what has ended."""
        if not hasattr(self, "policy"):
            return
        for _ in range(len(self.calls)):
            self.policy.decide(self.now_s)
            call = next((call for call, runs in self.calls.items() if runs), None)
            if call is None:
                call = self.policy.waiting.peek()
                self.policy.start(call, self.now_s)
            del self.calls[call]
            self.policy.leave(call)
        for view in self.programs:
            self.policy.program_ended(view)
        assert not self.policy.held
        assert list(self.policy.gate) == []
        assert self.policy.gate.used_tokens == 0


TestGateMachine = GateMachine.TestCase
TestGateMachine.__doc__ = "The gate never deadlocks, shuts a program out for a better one only, and uses free room."
TestGateMachine.settings = settings(max_examples=100, stateful_step_count=40)
