"""Ranks that change while calls wait: any policy that re-ranks, driven in any way, against a sorted list."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from reranking import Shuffled

from weft.core.policies import Call, Policy, ProgramView, Rank
from weft.core.sim import SimSettings, TraceCall, TraceProgram, simulate


class ResponseRatio(Policy):
    """Highest response ratio next, to the letter: (wait + service) / service, which changes while a call waits."""

    name = "ratio"

    def rank(self, call: Call, now_s: float) -> Rank:
        return Rank(0, 0.0)

    def rerank(self, now_s: float) -> Iterable[tuple[Call, Rank]]:
        for call in list(self.waiting):
            wait_s = call.wait_s + now_s - call.waiting_since_s
            yield call, Rank(0, -(wait_s + call.prompt_tokens) / call.prompt_tokens)

    def next_change_s(self) -> float:
        return 0.0 if len(self.waiting) > 1 else float("inf")


def test_a_call_overtakes_while_it_waits() -> None:
    """The short call arrives later and is ahead as soon as its ratio has grown faster."""
    policy = ResponseRatio()
    long, short = Call("long", ProgramView("a"), 100), Call("short", ProgramView("b"), 10)
    policy.arrive(long, 0.0)
    policy.arrive(short, 5.0)
    assert policy.decide(5.0) == [long, short]
    assert [call.key for call in policy.waiting] == ["long", "short"]
    policy.decide(6.0)
    assert [call.key for call in policy.waiting] == ["short", "long"]
    policy.waiting.check_integrity()


def test_a_running_call_is_reranked_too() -> None:
    """A new rank of a running call decides whether a waiting call preempts it."""
    policy = Shuffled(seed=0, share=0.0)
    running, waits = Call("running", ProgramView("a")), Call("waits", ProgramView("b"))
    policy.arrive(running, 0.0)
    policy.start(running, 0.0)
    policy.arrive(waits, 1.0)
    policy.queue_change(running, Rank(0, -1.0))
    assert policy.decide(1.0) == [running]
    assert policy.victims([running], 0) == []
    policy.queue_change(running, Rank(0, 99.0))
    assert policy.decide(1.0) == [running]
    assert policy.victims([running], 0) == [running]


def test_the_simulator_takes_new_ranks_in() -> None:
    """Programs under a policy that re-ranks at random all end, jumps or not, and the same seed gives one result."""
    rng = random.Random(4)
    programs = [
        TraceProgram(
            f"p{number}",
            tuple(
                TraceCall(f"c{n}", (f"c{n - 1}",) if n else (), rng.randint(1, 20), rng.randint(0, 50))
                for n in range(rng.randint(1, 4))
            ),
            rng.random(),
        )
        for number in range(20)
    ]
    results = []
    for jump in (True, False, True):
        with Shuffled.registered(seed=7, share=0.3):
            results.append(simulate(programs, SimSettings(policy="shuffled", batch_size=3), jump=jump))  # type: ignore[arg-type]
    assert results[0].programs == results[2].programs
    assert results[0].programs == results[1].programs
    assert {row.calls for row in results[0].programs.values()} == {len(p.calls) for p in programs}


@dataclass(eq=False)
class Known:
    """What the model knows of a call."""

    call: Call
    waits: bool = True


class RerankMachine(RuleBasedStateMachine):
    """Calls arrive, start, are preempted, leave and get new ranks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Shuffled(seed=0, share=0.0)
        self.known: list[Known] = []
        self.made = 0
        self.now_s = 0.0

    @rule()
    def arrive(self) -> None:
        self.made += 1
        call = Call(f"c{self.made}", ProgramView("p"))
        self.policy.arrive(call, self.now_s)
        self.known.append(Known(call))

    @precondition(lambda self: any(each.waits for each in self.known))
    @rule()
    def start_first(self) -> None:
        first = self.policy.waiting.peek()
        expected = min((each for each in self.known if each.waits), key=lambda each: each.call.rank)
        assert first is expected.call
        self.policy.start(first, self.now_s)
        expected.waits = False

    @precondition(lambda self: any(not each.waits for each in self.known))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from([each for each in self.known if not each.waits]))
        self.policy.preempt(each.call, self.now_s)
        each.waits = True

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.known))
        self.policy.leave(each.call)
        self.known.remove(each)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), step=st.integers(1, 5))
    def rerank(self, data: st.DataObject, step: int) -> None:
        """Some calls, waiting or running, get new ranks at the next decision."""
        self.now_s += step
        moved = data.draw(st.lists(st.sampled_from(self.known), unique=True))
        for number, each in enumerate(moved):
            order = data.draw(st.integers(-1000, 1000)) + (self.now_s * 100 + number) * 1e-6  # unique
            self.policy.queue_change(each.call, Rank(0, order))
        assert self.policy.decide(self.now_s) == [each.call for each in moved]

    @invariant()
    def the_queue_reads_in_rank_order(self) -> None:
        expected = sorted((each.call for each in self.known if each.waits), key=lambda call: call.rank)
        assert list(self.policy.waiting) == expected
        self.policy.waiting.check_integrity()


TestRerankMachine = RerankMachine.TestCase
TestRerankMachine.__doc__ = "However ranks change, the queue reads as a sorted list."
TestRerankMachine.settings = settings(max_examples=60, stateful_step_count=30)
