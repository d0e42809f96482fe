"""Multilevel queues under any sequence of events, against a naive model."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.core.policies import Atlas, Call, MultilevelPolicy, Plas, ProgramView
from weft.core.policies.view import ProgramChanged

# -- any sequence of events


class ModelCall:
    """The expected queue, quantum and times of a call, computed without the policy."""

    def __init__(self, call: Call, program: ProgramView, level: int, quantum_s: float, since_s: float) -> None:
        self.call = call
        self.program = program
        self.inherited = replace(program.attained)
        self.level = level
        self.quantum_s = quantum_s
        self.waiting = True
        self.since_s = since_s
        self.wait_s = 0.0  # since arrival or promotion, as line 29 has it
        self.model_time_s = 0.0
        self.all_wait_s = 0.0  # over the call's whole life
        self.all_service_s = 0.0


quarters = st.integers(1, 20).map(lambda number: number / 4)  # exact in binary, so that times can equal bounds


class PolicyMachine(RuleBasedStateMachine):
    """Any sequence of a driver's actions. A model keeps every call's queue, quantum and wait."""

    policy: MultilevelPolicy

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.programs = [ProgramView("p") for _ in range(3)]
        self.calls: list[ModelCall] = []
        self.made = 0

    @initialize(
        kind=st.sampled_from([Plas, Atlas]),
        bounds=st.sampled_from([(), (1.0,), (1.0, 3.0), (0.5, 1.0, 2.0, 4.0)]),
        beta=st.sampled_from([None, 0.5, 2.0]),
    )
    def set_up(self, kind: type[Plas | Atlas], bounds: tuple[float, ...], beta: float | None) -> None:
        self.policy = kind(bounds, beta)

    # -- the model

    def service_s(self, program: ProgramView) -> float:
        attained = program.attained
        return attained.total_service_s if isinstance(self.policy, Plas) else attained.service_s

    def program_wait_s(self, program: ProgramView) -> float:
        attained = program.attained
        return attained.total_wait_s if isinstance(self.policy, Plas) else attained.wait_s

    def width_s(self, level: int) -> float:
        edges = (0.0, *self.policy.bounds_s, math.inf)
        return edges[level + 1] - edges[level]

    @property
    def running(self) -> list[ModelCall]:
        return [each for each in self.calls if not each.waiting]

    @property
    def in_queue(self) -> list[ModelCall]:
        return sorted((each for each in self.calls if each.waiting), key=lambda each: each.call.rank)

    def enter(self, each: ModelCall, level: int) -> None:
        each.level, each.quantum_s = level, self.width_s(level)
        assert each.call.rank == max((other.call.rank for other in self.calls if other.level == level), default=None)

    # -- the driver's actions

    @rule(seconds=quarters)
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(program=st.integers(0, 2))
    def arrive(self, program: int) -> None:
        self.made += 1
        mine = self.programs[program]
        call = Call(f"c{self.made}", mine)
        self.policy.arrive(call, self.now_s)
        service_s = self.service_s(mine)
        level = sum(bound <= service_s for bound in self.policy.bounds_s)
        each = ModelCall(call, mine, level, self.width_s(level), self.now_s)
        self.calls.append(each)
        self.enter(each, level)
        assert call.service_s == service_s

    @precondition(lambda self: self.in_queue)
    @rule(skip=st.integers(0, 2))
    def start(self, skip: int) -> None:
        """The first waiting call starts, or one behind it because the first ones are not ready."""
        each = self.in_queue[min(skip, len(self.in_queue) - 1)]
        self.policy.start(each.call, self.now_s)
        self.stop_waiting(each)

    def stop_waiting(self, each: ModelCall) -> None:
        each.waiting = False
        each.wait_s += self.now_s - each.since_s
        each.all_wait_s += self.now_s - each.since_s

    @precondition(lambda self: self.running)
    @rule(seconds=quarters)
    def step(self, seconds: float) -> None:
        """All running calls run for one step."""
        self.now_s += seconds
        for each in self.running:
            self.charge(each, seconds)

    @precondition(lambda self: self.in_queue)
    @rule(data=st.data(), seconds=quarters)
    def late_step(self, data: st.DataObject, seconds: float) -> None:
        """A step ends whose call has been preempted in the meantime."""
        self.charge(data.draw(st.sampled_from(self.in_queue)), seconds)

    def charge(self, each: ModelCall, seconds: float) -> None:
        rank = each.call.rank
        self.policy.charge(each.call, seconds, self.now_s)
        each.model_time_s += seconds
        each.all_service_s += seconds
        each.quantum_s -= seconds
        if each.quantum_s <= 0:
            self.enter(each, each.level + 1)
        else:
            assert each.call.rank == rank

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.preempt_call(data.draw(st.sampled_from(self.running)))

    def preempt_call(self, each: ModelCall) -> None:
        rank = each.call.rank
        self.policy.preempt(each.call, self.now_s)
        each.waiting, each.since_s = True, self.now_s
        assert each.call.rank == rank

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.calls))
        if each.waiting:
            self.stop_waiting(each)
        self.policy.leave(each.call)
        self.calls.remove(each)
        each.program.attained.fold(each.inherited, each.all_service_s, each.all_wait_s)
        self.policy.on_event(ProgramChanged(each.program))

    @rule()
    def promote(self) -> None:
        def starved(each: ModelCall) -> bool:
            wait_s = self.program_wait_s(each.program) + each.wait_s + self.now_s - each.since_s
            service_s = self.service_s(each.program) + each.model_time_s
            return self.policy.beta is not None and each.level > 0 and wait_s / service_s >= self.policy.beta

        expected = [each for each in self.in_queue if starved(each)]
        assert self.policy.promote(self.now_s) == [each.call for each in expected]
        for each in expected:
            each.level, each.quantum_s = 0, self.width_s(0)
            each.all_wait_s += self.now_s - each.since_s
            each.wait_s, each.model_time_s, each.since_s = 0.0, 0.0, self.now_s
        in_q1 = [each for each in self.in_queue if each.level == 0]
        assert in_q1[len(in_q1) - len(expected) :] == expected, "at the tail of Q_1"

    @rule(slots=st.integers(0, 6), data=st.data())
    def form_a_batch(self, slots: int, data: st.DataObject) -> None:
        """The batch becomes the first calls in rank order that fit, of the running and the ready ones (lines 32-39)."""
        ready = data.draw(st.sets(st.sampled_from([each.call.key for each in self.calls]))) if self.calls else set()
        free = max(0, slots - len(self.running))
        running = {each.call.key: each for each in self.running}
        victims = self.policy.victims([each.call for each in self.running], free, ready=lambda call: call.key in ready)
        candidates = [each for each in self.in_queue if each.call.key in ready]
        by_rank = sorted([*self.running, *candidates], key=lambda each: each.call.rank)
        batch = {each.call.key for each in by_rank[: len(running) + free]}
        assert {call.key for call in victims} == set(running) - batch
        assert victims == sorted(victims, key=lambda call: call.rank, reverse=True)
        for victim in victims:
            assert any(each.call.rank < victim.rank for each in candidates)
            self.preempt_call(running[victim.key])
        for each in candidates:
            if each.call.key in batch:
                self.policy.start(each.call, self.now_s)
                self.stop_waiting(each)

    # -- invariants

    @invariant()
    def each_call_either_runs_or_waits(self) -> None:
        assert {id(each.call) for each in self.in_queue} == {id(call) for call in self.policy.waiting}
        assert len(self.policy.waiting) == len(self.in_queue)

    @invariant()
    def the_queue_reads_in_rank_order(self) -> None:
        if self.calls:
            assert list(self.policy.waiting) == [each.call for each in self.in_queue]

    @invariant()
    def ranks_are_unique(self) -> None:
        ranks = [each.call.rank for each in self.calls]
        assert len(set(ranks)) == len(ranks)
        assert len({rank.order for rank in ranks}) == len(ranks)

    @invariant()
    def calls_agree_with_the_model(self) -> None:
        for each in self.calls:
            call = each.call
            assert (call.rank.level, call.quantum_s) == (each.level, each.quantum_s)
            assert (call.wait_s, call.model_time_s) == (each.wait_s, each.model_time_s)
            assert call.quantum_s > 0
            if each.waiting:
                assert call.waiting_since_s == each.since_s
            else:
                assert math.isnan(call.waiting_since_s)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.__doc__ = (
    "After any sequence of events, each call has the queue and the position that Algorithm 1 gives it."
)
TestPolicyMachine.settings = settings(max_examples=150, stateful_step_count=40)
