"""Astraea: the queue of a program, ageing, and the response ratio inside a queue."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import PolicyError
from weft.core.ids import ProgramId
from weft.core.policies import Astraea, Call, PolicyConfig, ProgramView, Rank, StepCosts
from weft.core.policies.papers.astraea import ByResponseRatio
from weft.core.policies.view import ProgramEnded

COSTS = StepCosts(fixed_s=1.0, decode_token_s=0.0, prefill_token_s=0.0)


def make(**parameters: Any) -> Astraea:
    """A policy of its own, whose steps take a second."""
    policy = PolicyConfig("astraea", **parameters).make()
    assert isinstance(policy, Astraea)
    policy.on_event(COSTS)
    return policy


def view(name: str = "p") -> ProgramView:
    """A program without calls."""
    return ProgramView(ProgramId(name), name)


def serve(policy: Astraea, program: ProgramView, tokens: int, *, computed: int = 0, now_s: float = 0.0) -> int:
    """Run a call at once, and return the queue that it was in."""
    program.calls += 1
    call = Call(f"c{program.calls}", program)
    policy.arrive(call, now_s)
    level = call.rank.level
    policy.start(call, now_s)
    call.output_tokens, call.computed_tokens = tokens, computed
    policy.leave(call)
    return level


def waits(policy: Astraea, program: ProgramView, now_s: float, key: str = "waits") -> Call:
    """A call of the program that waits."""
    program.calls += 1
    call = Call(key, program)
    policy.arrive(call, now_s)
    return call


def test_a_program_of_long_calls_reaches_the_last_queue_after_five() -> None:
    """Each call that computes more than its queue's threshold moves the program one queue down, and the last queue
    keeps it."""
    policy, program = make(), view()
    assert [serve(policy, program, 700) for _ in range(8)] == [0, 1, 2, 3, 4, 5, 5, 5]


def test_a_short_call_moves_its_program_one_queue_up() -> None:
    """A call that yields before its quota moves the program up, out of the last queue by the last threshold too."""
    policy, program = make(), view()
    levels = [serve(policy, program, tokens) for tokens in (700, 700, 700, 700, 700, 640, 641, 10, 10, 10, 10, 10, 10)]
    assert levels == [0, 1, 2, 3, 4, 5, 4, 5, 4, 3, 2, 1, 0]


def test_calls_between_two_thresholds_oscillate() -> None:
    """No call leaves its program where it is. 200 tokens are too many for the first queue and few for the second."""
    policy, program = make(), view()
    assert [serve(policy, program, 200) for _ in range(6)] == [0, 1, 0, 1, 0, 1]


def test_only_tokens_that_are_computed_count() -> None:
    """A long prompt from the prefix cache costs nothing; one that is computed does."""
    policy, program = make(), view()
    assert [serve(policy, program, 20, computed=100), serve(policy, program, 20, computed=109)] == [0, 0]
    assert serve(policy, program, 20) == 1


def test_a_call_that_never_ran_says_nothing_of_its_program() -> None:
    """A call that is aborted in the queue, or taken back for another engine, is no short call."""
    policy, program = make(), view()
    serve(policy, program, 700)
    policy.leave(waits(policy, program, 0.0))
    assert serve(policy, program, 700) == 1


def test_programs_that_end_are_forgotten() -> None:
    """Nothing stays of a program, nor of a call that leaves after its program ended."""
    policy, program = make(), view()
    call = waits(policy, program, 0.0)
    policy.on_event(ProgramEnded(program))
    policy.leave(call)
    assert policy._programs == {}
    assert len(policy.waiting) == 0


def test_a_call_that_waits_too_long_moves_to_the_first_queue() -> None:
    """With a predicted service of 64 * exp(1.5²/2) s = 197 s, four times that is too long."""
    policy, program = make(thresholds_tokens=(1,)), view()
    serve(policy, program, 5)
    call = waits(policy, program, 0.0)
    assert call.rank.level == 1
    due_s = 4 * call.predicted_service_s
    assert policy.next_change_s() == due_s
    assert policy.decide(due_s - 0.1) == []
    assert policy.decide(due_s) == [call]
    assert (call.rank.level, policy.level_of(program)) == (0, 0)
    policy.waiting.check_integrity()


def test_the_clock_of_ageing_starts_again_at_a_promotion() -> None:
    """The wait before a promotion does not age the program again; it still counts for the response ratio."""
    policy, program = make(thresholds_tokens=(1,)), view()
    serve(policy, program, 5)
    call = waits(policy, program, 0.0)
    policy.decide(10_000.0)
    policy.start(call, 10_000.0)
    program.attained.wait_s = 10_000.0
    call.output_tokens = 5
    policy.leave(call)
    again = waits(policy, program, 10_001.0)
    assert again.rank == Rank(1, 1.0, 2)
    assert policy.next_change_s() == 10_001.0 + 4 * again.predicted_service_s


@pytest.mark.parametrize("preempt", [False, True])
def test_a_running_call_is_preempted_only_on_demand(preempt: bool) -> None:
    """The paper does not preempt. With `preempt` a call of a better queue does, and one of the same queue does not."""
    policy = make(thresholds_tokens=(1,), preempt=preempt)
    low, same, high = view("low"), view("same"), view("high")
    serve(policy, low, 5)
    serve(policy, same, 5)
    running = waits(policy, low, 0.0)
    policy.start(running, 0.0)
    waits(policy, same, 0.0)
    assert policy.victims([running], 0) == []
    waits(policy, high, 0.0)
    assert policy.victims([running], 0) == ([running] if preempt else [])


@pytest.mark.parametrize(("wait", "since_s"), [("call", 103.0), ("program", 96.0)])
def test_time_that_a_call_ran_is_no_wait_after_a_preemption(wait: str, since_s: float) -> None:
    """A call waits 2 s, runs 100 s and stalls for 3 s of them, and waits again from 108 s on. It has waited for 5 s,
    and its program for 7 s before it. So at 108 s its response ratio has not grown by the time that it ran."""
    policy, program = make(wait=wait), view()
    program.attained.wait_s = 7.0
    call = waits(policy, program, 6.0)
    policy.start(call, 8.0)
    policy.stall(call, 50.0)
    policy.go_on(call, 53.0)
    policy.preempt(call, 108.0)
    assert call.rank.order == since_s
    fresh = waits(policy, view("fresh"), 100.0, "fresh")  # it has waited for 8 s at 108 s
    call.predicted_service_s = fresh.predicted_service_s
    policy.waiting.now_s = 108.0
    assert [each.key for each in policy.waiting] == (["fresh", "waits"] if wait == "call" else ["waits", "fresh"])


def call_of(service_s: float, since_s: float, number: int, level: int = 0) -> Call:
    """A waiting call of known service."""
    return Call(str(number), view(), predicted_service_s=service_s, rank=Rank(level, since_s, number))


def test_the_order_changes_while_calls_wait() -> None:
    """The short call arrives later and overtakes once its ratio has grown faster."""
    queue = ByResponseRatio()
    for each in (call_of(100.0, 0.0, 0), call_of(10.0, 5.0, 1)):
        queue.push(each)
    queue.now_s = 5.5
    assert [call.key for call in queue] == ["0", "1"]
    queue.now_s = 6.0
    assert [call.key for call in queue] == ["1", "0"]


CALLS = st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0, 100), st.integers(0, 2)), min_size=1, max_size=40)


@given(CALLS, st.floats(100, 1e5), st.integers(0, 2**16))
def test_the_ratio_is_off_by_a_tenth_at_most(calls: list[tuple[float, float, int]], now_s: float, seed: int) -> None:
    """Whatever comes and goes: an earlier queue goes first, and inside a queue a call's ratio is at most 10 % above
    that of a call before it. Iterating and popping agree."""
    queue, rng = ByResponseRatio(), random.Random(seed)
    left = [call_of(service_s, since_s, n, level) for n, (service_s, since_s, level) in enumerate(calls)]
    for call in left:
        queue.push(call)
    for call in rng.sample(left, len(left) // 3):
        queue.discard(call)
        left.remove(call)
    queue.now_s = now_s
    queue.check_integrity()
    order = list(queue)
    assert set(order) == set(left)
    for before, after in itertools.pairwise(order):
        assert before.rank.level <= after.rank.level
        if before.rank.level == after.rank.level:
            ratios = [(now_s - call.rank.order) / call.predicted_service_s for call in (before, after)]
            assert ratios[1] <= 1.1 * ratios[0] + 1e-9
    assert [queue.pop() for _ in order] == order
    assert len(queue) == 0


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20, unique=True))
def test_calls_of_one_service_go_by_their_wait(since_s: list[float]) -> None:
    """With like predictions the response ratio is first come, first served by the programs' waits."""
    queue = ByResponseRatio()
    for number, each in enumerate(since_s):
        queue.push(call_of(3.0, each, number))
    queue.now_s = 101.0
    assert [call.rank.order for call in queue] == sorted(since_s)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"thresholds_tokens": (5, 5)}, "positive and increasing"),
        ({"thresholds_tokens": ()}, "at least one"),
        ({"thresholds_tokens": 5}, "a list of tokens"),
        ({"tau": 1}, "tau must be above 1"),
        ({"preempt": 1}, "preempt must be true or false"),
        ({"wait": "all"}, 'wait must be "program" or "call"'),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], said: str) -> None:
    """The error names the parameter."""
    with pytest.raises(PolicyError, match=said):
        PolicyConfig("astraea", **parameters)
