"""The scheduler plugin compared with a naive model of Algorithm 1, which scans lists and does not use vLLM."""

from __future__ import annotations

import itertools
import math
import tempfile
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

pytestmark = pytest.mark.engine

BOUNDS_S = (2.0, 5.0, 11.0)
QUANTA_S = (2.0, 3.0, 6.0, math.inf)
BETA = 1.5
SLOTS = 3


@dataclass
class NaiveProgram:
    service_s: float = 0.0
    total_service_s: float = 0.0
    wait_s: float = 0.0
    total_wait_s: float = 0.0


@dataclass
class NaiveCall:
    """The call `c` of Algorithm 1, and the service and wait that its program is charged at its end."""

    name: str
    program: NaiveProgram
    tokens_left: int
    arrived_s: float
    inherited_s: float
    inherited_wait_s: float
    level: int = 0
    order: int = 0
    quantum_s: float = 0.0
    model_time_s: float = 0.0
    wait_s: float = 0.0
    waiting_since_s: float = 0.0
    running: bool = False
    preempted: bool = False
    resumed: bool = False  # whether it resumed in this step
    service_s: float = 0.0
    total_wait_s: float = 0.0
    queued_since_s: float = 0.0  # start of the present wait; a promotion leaves it as it is

    @property
    def rank(self) -> tuple[int, int]:
        return self.level, self.order


@dataclass
class NaiveScheduler:
    """Algorithm 1 with steps of one second, in which every scheduled call computes one token."""

    policy: str
    now_s: float = 0.0
    calls: list[NaiveCall] = field(default_factory=list)
    programs: dict[str, NaiveProgram] = field(default_factory=dict)
    orders: itertools.count[int] = field(default_factory=itertools.count)

    def attained_s(self, program: NaiveProgram) -> float:
        return {"plas": program.total_service_s, "atlas": program.service_s, "mlfq": 0.0}[self.policy]

    def waited_s(self, program: NaiveProgram) -> float:
        return {"plas": program.total_wait_s, "atlas": program.wait_s, "mlfq": 0.0}[self.policy]

    def enter(self, call: NaiveCall, level: int) -> None:
        call.level = min(level, len(BOUNDS_S))
        call.order = next(self.orders)
        call.quantum_s = QUANTA_S[call.level]

    def arrive(self, name: str, program_name: str, tokens: int) -> None:
        program = self.programs.setdefault(program_name, NaiveProgram())
        call = NaiveCall(name, program, tokens, self.now_s, program.service_s, program.wait_s)
        call.waiting_since_s = call.queued_since_s = self.now_s
        self.enter(call, bisect_right(BOUNDS_S, self.attained_s(program)))
        self.calls.append(call)

    def leave(self, call: NaiveCall) -> None:
        self.calls.remove(call)
        if not call.running:
            call.total_wait_s += self.now_s - call.queued_since_s
        program = call.program
        chain = call.inherited_s + call.service_s, call.inherited_wait_s + call.total_wait_s
        program.service_s, program.wait_s = max((program.service_s, program.wait_s), chain)
        program.total_service_s += call.service_s
        program.total_wait_s += call.total_wait_s

    def promote(self) -> None:
        for call in sorted(self.calls, key=lambda call: call.rank):
            if call.running or call.level == 0:
                continue
            waited = self.waited_s(call.program) + call.wait_s + self.now_s - call.waiting_since_s
            served = self.attained_s(call.program) + call.model_time_s
            if waited >= BETA * served:
                self.enter(call, 0)
                call.wait_s, call.model_time_s, call.waiting_since_s = 0.0, 0.0, self.now_s

    def step(self) -> set[str]:
        self.promote()
        best = sorted(self.calls, key=lambda call: call.rank)[:SLOTS]
        for call in self.calls:
            if call.running and call not in best:
                call.running, call.preempted = False, True
                call.waiting_since_s = call.queued_since_s = self.now_s
        stayed, entered = [c for c in best if c.running], [c for c in best if not c.running]
        for call in entered:
            call.running, call.resumed = True, call.preempted
            call.wait_s += self.now_s - call.waiting_since_s
            call.total_wait_s += self.now_s - call.queued_since_s
        self.now_s += 1.0
        for call in stayed + entered:
            call.model_time_s += 1.0
            call.service_s += 1.0
            if not call.resumed:  # the step that rebuilds its KV cache does not count against the quantum
                call.quantum_s -= 1.0
            call.resumed = False
            if call.quantum_s <= 0:
                self.enter(call, call.level + 1)
        for call in best:
            call.tokens_left -= 1
            if call.tokens_left == 0:
                self.leave(call)
        return {call.name for call in best}


class SchedulerMachine(RuleBasedStateMachine):
    """Applies random arrivals, steps and aborts to the plugin and to the model."""

    @initialize(policy=st.sampled_from(["mlfq", "plas", "atlas"]))
    def begin(self, policy: str) -> None:
        from scheduler_harness import SchedulerHarness

        self.folder = tempfile.TemporaryDirectory()
        config = {"name": policy, "bounds_s": list(BOUNDS_S), "beta": BETA}
        self.real = SchedulerHarness(Path(self.folder.name), config, slots=SLOTS, blocks=2000, batched_tokens=4096)
        self.naive = NaiveScheduler(policy)
        self.names = (f"call-{n}" for n in itertools.count())

    @rule(program=st.integers(0, 4), tokens=st.integers(1, 14))
    def arrive(self, program: int, tokens: int) -> None:
        name = next(self.names)
        self.naive.arrive(name, f"p{program}", tokens)
        self.real.add(name, program_id=f"p{program}", max_tokens=tokens)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            assert self.real.step() == self.naive.step()
            self._compare()

    @precondition(lambda self: self.naive.calls)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        call = data.draw(st.sampled_from(self.naive.calls))
        self.naive.leave(call)
        self.real.abort(call.name)
        self._compare()

    def _compare(self) -> None:
        scheduler = self.real.scheduler
        entries = scheduler._entries
        assert {name: entry.call.rank.level for name, entry in entries.items()} == {
            call.name: call.level for call in self.naive.calls
        }
        table = scheduler._table
        known = {name: each.view.attained for name, each in table._programs.items()}
        known |= {name: idle.view.attained for name, idle in table._idle.items()}
        for name, program in self.naive.programs.items():
            got = known[name]
            assert (got.service_s, got.total_service_s) == (program.service_s, program.total_service_s), name
            assert (got.wait_s, got.total_wait_s) == (program.wait_s, program.total_wait_s), name

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
