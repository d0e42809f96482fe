"""The tokens of a step, divided in rank order among running and waiting prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.policies import Atlas, Call, Mlfq, ProgramView, Rank, StepTokens
from weft.core.policies.view import ProgramChanged


def prompt(order: int) -> Call:
    return Call(f"c{order}", ProgramView(f"p{order}"), rank=Rank(0, order))


@given(tokens=st.integers(0, 60), wanted=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=8))
def test_the_tokens_go_to_the_calls_of_best_rank(tokens: int, wanted: list[tuple[bool, int]]) -> None:
    """For running and waiting calls in any order of rank, each gets the least of what it wants and what better ones
    leave."""
    calls = [(prompt(order), runs, count) for order, (runs, count) in enumerate(wanted)]
    expected, left = {}, tokens
    for call, _, count in calls:
        expected[call] = min(count, left)
        left -= expected[call]
    step = StepTokens(tokens, [(call, count) for call, runs, count in calls if runs])
    for call, runs, count in calls:
        if not runs:
            assert step.left_for(call) >= expected[call]
            assert step.take(count) == expected[call]
    assert step.divide() == {call: expected[call] for call, runs, _ in calls if runs}


def test_a_preempted_prompt_takes_no_tokens_unless_it_stays() -> None:
    """The tokens of a prompt that would be preempted go to others. If it stays after all, it has its place again."""
    running = [prompt(order) for order in range(4)]
    for stays in (False, True):
        step = StepTokens(30, [(call, 12) for call in running])
        step.preempt(running[3])
        step.preempt(running[2])
        step.keep(running[2])
        if stays:
            step.keep(running[3])
        expected = dict(zip(running, (12, 12, 6, 0), strict=True))
        assert step.divide() == {call: expected[call] for call in running[: 4 if stays else 3]}


def test_the_token_of_a_decoding_call_comes_free_with_it() -> None:
    """A call that decodes has one token of the step, which others may use once the call is preempted."""
    step, decoding = StepTokens(0, []), prompt(0)
    step.preempt(decoding)
    assert step.left_for(None) == 1
    step.keep(decoding)
    assert step.left_for(None) == 0


# -- calls without tokens, in the policy


def stalled(service_s: float, *, beta: float) -> tuple[Mlfq, Call]:
    """A running call of the second queue, which gets no tokens from second 4 on."""
    policy, call = Mlfq((1.0, 3.0), beta), Call("c", ProgramView("p"))
    policy.arrive(call, 0.0)
    policy.start(call, 0.0)
    policy.charge(call, service_s, 4.0)
    policy.stall(call, 4.0)
    return policy, call


def test_a_call_without_tokens_starves_in_the_batch() -> None:
    """It is promoted after beta times its service, and does not enter the waiting queue."""
    policy, call = stalled(1.5, beta=2.0)
    assert call.rank.level == 1
    assert policy.next_change_s() == 7.0
    assert policy.promote(6.999) == []
    assert policy.promote(7.0) == [call]
    assert call.rank.level == 0
    assert len(policy.waiting) == 0


@pytest.mark.parametrize("then", ["preempt", "leave"])
def test_the_time_without_tokens_counts_as_wait(then: str) -> None:
    """A call that goes on keeps its wait; it has no timer while it runs, and waits on after a preemption."""
    policy, call = stalled(1.5, beta=2.0)
    policy.go_on(call, 6.0)
    assert call.wait_s == 2.0
    assert policy.promote(99.0) == []
    if then == "leave":
        policy.stall(call, 6.0)
        policy.leave(call)
        assert policy.promote(99.0) == []
    else:
        policy.preempt(call, 6.0)
        assert policy.promote(6.999) == []
        assert policy.promote(7.0) == [call], "2 + 1 = 2 * 1.5"
        assert list(policy.waiting) == [call]


def test_service_that_is_reported_late_delays_the_promotion() -> None:
    """Steps overlap: a call may be charged for its last step after it has stalled."""
    policy, call = stalled(1.5, beta=2.0)
    policy.charge(call, 0.5, 5.0)
    assert policy.promote(7.999) == []
    assert policy.promote(8.0) == [call]
    assert call not in policy.waiting


def test_a_siblings_service_delays_the_promotion_of_a_call_without_tokens() -> None:
    """The timer of a running call without tokens follows its program, as that of a waiting call does."""
    policy, call = Atlas((1.0, 3.0), 2.0), Call("c", ProgramView("p"))
    call.program.attained.service_s = 2.0
    policy.arrive(call, 0.0)
    policy.start(call, 0.0)
    policy.stall(call, 0.0)
    call.program.attained.service_s = 5.0
    policy.on_event(ProgramChanged(call.program))
    assert policy.promote(9.999) == []
    assert policy.promote(10.0) == [call]
