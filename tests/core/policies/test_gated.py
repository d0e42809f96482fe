"""The gate: what is open, what is held back, who makes way, and that nothing waits for ever."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.errors import PolicyError
from weft.core.policies import Call, Policy, PolicyConfig, ProgramView, StepCosts
from weft.core.policies.gate.admission_gate import FILL
from weft.core.policies.gate.gated import Gated
from weft.core.policies.view import KvSize, ProgramEnded
from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate

COSTS = StepCosts(fixed_s=0.016, decode_token_s=0.0, prefill_token_s=0.01, slots=16)


def gated(name: str = "fcfs", kv_tokens: float = 1000, host_tokens: float = 0, **parameters: object) -> Gated:
    """A policy behind a gate, for a KV cache of 1000 tokens: 920 for programs that open, 10 s until idle ones close."""
    policy = PolicyConfig(name, gate=True, **parameters).make()
    assert isinstance(policy, Gated)
    policy.on_event(COSTS)
    policy.on_event(KvSize(kv_tokens, host_tokens))
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


@pytest.mark.parametrize(("host_tokens", "opened"), [(0, 2), (250, 2), (750, 2), (2400, 5), (math.inf, 6)])
def test_a_little_host_memory_opens_no_more_programs(host_tokens: float, opened: int) -> None:
    """It has copies of what the KV cache has as well, so the two together hold less than their sum."""
    policy = gated(host_tokens=host_tokens)
    for number in range(6):
        arrive(policy, f"p{number}", 400, float(number))
    assert len(passing(policy)) == opened
    policy.check_integrity()


@pytest.mark.parametrize(("host_tokens", "part"), [(0, 1.0), (1000, 0.5), (3000, 0.25)])
def test_host_memory_takes_what_outgrows_the_kv_cache(host_tokens: float, part: float) -> None:
    """Behind a policy that learns, the gate leaves less room for the growth of contexts then."""
    policy, alone = gated("learned", 1e6, host_tokens * 1000), gated("learned", 1e6)
    program = ProgramView("a", "a")
    for each in (policy, alone):
        for number in range(12):
            run(each, arrive(each, f"a{number}", 100 * number + 99, float(number), program), 1, float(number))
    assert alone.gate.growth_tokens > 10
    assert policy.gate.growth_tokens == pytest.approx(part * alone.gate.growth_tokens, abs=1)


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
    policy.on_event(ProgramEnded(first.program))
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


def test_programs_that_are_alike_keep_their_places_by_arrival() -> None:
    """What a program of a class of like work has had does not cost it its place at the gate."""
    policy = gated("learned", kv_tokens=10_000)
    for number in range(12):
        call = arrive(policy, f"p{number}", 1, 0.0, ProgramView(f"p{number}", "alike", arrival_s=0.0))
        run(policy, call, 1000, 0.0)
        policy.on_event(ProgramEnded(call.program))
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
    assert policy.gate[early.program].standing < policy.gate[late.program].standing
    assert policy.gate.last().program is late.program


def loop(
    policy: Policy, name: str, gaps_s: list[float], *, of: str = "agent", result: int = 0, output: int = 1
) -> ProgramView:
    """A program calls, and again after each gap, with its context and the tokens of a tool's result. Then it ends."""
    program = ProgramView(name, of, arrival_s=0.0)
    now_s, context = 0.0, 10
    for number, gap_s in enumerate([0.0, *gaps_s]):
        now_s += gap_s
        call = arrive(policy, f"{name}-{number}", context + result, now_s, program)
        call.cached_tokens = context
        run(policy, call, output, now_s)
        context += result + output
    policy.on_event(ProgramEnded(program))
    policy.decide(now_s)
    return program


@pytest.mark.parametrize(
    ("name", "result", "output", "opened"), [("learned", 99, 1, 2), ("learned", 0, 100, 5), ("fcfs", 99, 1, 5)]
)
def test_room_is_left_for_what_contexts_will_grow(name: str, result: int, output: int, opened: int) -> None:
    """Six contexts of 180 tokens, whose calls add 100 tokens each, and a cache of 1000. If the 100 are results of
    tools, which take all of a call's time, there is room for three calls more: two open, because three would need 1440.
    If they are outputs, five open, because that makes larger batches. The plain gate always opens five."""
    policy = gated(name)
    for number in range(4):
        loop(policy, f"past{number}", [1.0] * 24, result=result, output=output)
    now_s, expected_output = 100.0, round(policy.gate._mean_output_tokens)
    for number in range(6):
        view = ProgramView(f"p{number}", "agent", arrival_s=now_s, arrival_order=number)
        arrive(policy, f"p{number}", 180 - expected_output, now_s, view)
    assert len(passing(policy)) == opened
    policy.check_integrity()


@pytest.mark.parametrize("name", ["learned", "fcfs"])
def test_a_part_of_the_cache_is_left_for_what_nobody_expects(name: str) -> None:
    """Calls have added a token each until now. Still only four contexts of 190 tokens open, because five take 950."""
    policy = gated(name)
    loop(policy, "past", [1.0] * 24, result=0, output=1)
    for number in range(6):
        view = ProgramView(f"p{number}", "agent", arrival_s=100.0, arrival_order=number)
        arrive(policy, f"p{number}", 189, 100.0, view)
    assert len(passing(policy)) == 4
    policy.check_integrity()


def test_an_idle_program_keeps_its_place_for_as_long_as_its_kind_takes_to_return() -> None:
    """Behind a policy that learns: of some programs most return within 2 s and the others never, so they keep their
    places for 2 s, though to compute the cache again takes 10. Programs that return after 60 s lose theirs at once."""
    policy = gated("learned")
    for number in range(4):
        loop(policy, f"quick{number}", [1.0, 2.0] * 4, of="quick")
        loop(policy, f"slow{number}", [60.0] * 8, of="slow")
    for number in range(8):  # nobody has reported their ends
        gone = ProgramView(f"gone{number}", "quick", arrival_s=0.0)
        run(policy, arrive(policy, f"g{number}", 10, 0.0, gone), 1, 0.0)
        policy.on_event(ProgramEnded(gone, is_known=False))
    for name, kept_s in (("quick", 2.0), ("slow", 0.0), ("unknown", 10.0)):
        program = ProgramView(name, name, arrival_s=1000.0)
        call = arrive(policy, name, 10, 1000.0, program)
        run(policy, call, 1, 1000.0)
        assert policy.gate[program].keep_until_s - 1000.0 == pytest.approx(kept_s)
        policy.on_event(ProgramEnded(program))


def test_where_nobody_tells_of_ends_idle_programs_make_way_sooner() -> None:
    """Programs call again within a second, or have ended, and nobody tells. The first ones keep their places for 10 s.
    Once one has lost its place in this way, later ones keep theirs for a second."""
    policy = gated("learned")
    loop(policy, "past", [1.0] * 24)
    first, second, third = (ProgramView(name, "agent", arrival_s=100.0) for name in "abc")
    run(policy, arrive(policy, "a1", 500, 100.0, first), 1, 100.0)
    assert policy.gate[first].keep_until_s == pytest.approx(110.0)
    policy.start(arrive(policy, "busy", 300, 111.0, ProgramView("busy", "other", arrival_s=111.0)), 111.0)
    loop(policy, "later", [1.0] * 8)
    policy.start(arrive(policy, "b1", 500, 111.0, second), 111.0)
    assert not policy.gate[first].is_open
    loop(policy, "more", [1.0] * 8)
    run(policy, arrive(policy, "c1", 10, 111.0, third), 1, 111.0)
    assert policy.gate[third].keep_until_s == pytest.approx(112.0)


def test_a_plain_gate_does_not_learn_when_programs_return() -> None:
    """Behind a policy that does not learn, each program keeps its place for as long as the cache takes to fill."""
    policy = gated("fcfs")
    loop(policy, "past", [60.0] * 20)
    call = arrive(policy, "a", 10, 1000.0, ProgramView("a", "agent", arrival_s=1000.0))
    run(policy, call, 1, 1000.0)
    assert policy.gate[call.program].keep_until_s == pytest.approx(1010.0)


@pytest.mark.parametrize("name", ["fcfs", "priority", "atlas", "learned", "auto"])
def test_programs_that_never_end_do_not_shut_others_out_for_ever(name: str) -> None:
    """Two programs that fill the cache call again and again without a pause, and never end. Of three that wait at the
    gate, each has had a turn after three times a hundred times the seconds that the cache takes to fill."""
    policy = gated(name)
    endless = [ProgramView(f"e{number}", "agent", arrival_s=0.0, arrival_order=number) for number in range(2)]
    late = [ProgramView(f"l{number}", "agent", arrival_s=1.0, arrival_order=2 + number) for number in range(3)]
    calls = {view: arrive(policy, view.program_id, 450, 0.0, view) for view in endless}
    calls |= {view: arrive(policy, view.program_id, 450, 1.0, view) for view in late}
    served: set[ProgramView] = set()
    for now_s in range(2, 3100):
        policy.decide(float(now_s))
        for call in list(policy.waiting):
            served.add(call.program)
            run(policy, call, 1, float(now_s))
            calls[call.program] = arrive(policy, f"{call.program.program_id}-{now_s}", 450, float(now_s), call.program)
        policy.check_integrity()
    assert served == {*endless, *late}


def test_programs_do_not_take_turns_at_each_decision_where_prompts_seem_to_take_no_time() -> None:
    """The costs of an engine whose steps are alike may have no time for prompts. A program that is held back waits for
    a minute all the same, before it gets the place of another one."""
    policy = gated()
    policy.on_event(StepCosts(fixed_s=0.016, decode_token_s=0.0, prefill_token_s=0.0, slots=16))
    first, last = arrive(policy, "a", 800), arrive(policy, "b", 800)
    policy.start(first, 0.0)
    for now_s in (0.0, 1.0, 59.0):
        policy.decide(now_s)
        assert held(policy) == ["b"]
    policy.decide(60.0)
    assert last in policy.waiting
    policy.check_integrity()


def test_a_call_taken_back_leaves_nothing_at_the_gate() -> None:
    """A held call that leaves for another replica does not keep its program in the queue of those held back."""
    policy = gated()
    arrive(policy, "a", 800)
    gone = arrive(policy, "b", 800, 1.0)
    policy.held.discard(gone)  # as a driver does that takes it back
    policy.leave(gone)
    last = arrive(policy, "c", 800, 2.0)
    assert policy.gate.first_shut().program is last.program
    policy.check_integrity()


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
        assert view not in open_before or call in self.policy.waiting

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
        self.policy.on_event(ProgramEnded(self.programs.pop(data.draw(st.integers(0, len(self.programs) - 1)))))

    @rule(seconds=st.floats(0, 40))
    def decide(self, seconds: float) -> None:
        self.now_s += seconds
        self.policy.decide(self.now_s)
        if self.policy.held:
            assert not self.policy.gate.fits(self.policy.gate.first_shut())  # the gate is work-conserving
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
            self.policy.on_event(ProgramEnded(view))
        assert not self.policy.held
        assert list(self.policy.gate) == []
        assert self.policy.gate.used_tokens == 0


TestGateMachine = GateMachine.TestCase
TestGateMachine.__doc__ = "The gate never deadlocks, never holds back a call of an open program, and uses free room."
TestGateMachine.settings = settings(max_examples=100, stateful_step_count=40)
