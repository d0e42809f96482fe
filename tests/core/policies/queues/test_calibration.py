"""Queue bounds that are learned from the calls that have been served."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.accounts import Attained
from weft.core.policies import DEFAULT_BOUNDS_S, Atlas, Call, PolicyConfig, ProgramView
from weft.core.policies.queues import BoundsCalibration


def observed(services_s: Sequence[float], queues: int = 4) -> Sequence[float] | None:
    """The latest bounds after calls with these services, in seconds; None if there are none yet."""
    calibration = BoundsCalibration(queues)
    latest = None
    for service_s in services_s:
        latest = calibration.observe(service_s) or latest
    return latest


def serve(policy: Atlas, services_s: Sequence[float]) -> None:
    """Serve calls one after another, each of a new program."""
    for service_s in services_s:
        call = Call("c", ProgramView("p"))
        policy.arrive(call, 0.0)
        policy.start(call, 0.0)
        policy.charge(call, service_s, service_s)
        policy.leave(call)


def test_bounds_are_first_learned_after_32_calls() -> None:
    """Thirty-one calls are too few to learn bounds from."""
    assert observed([1.0] * 31) is None
    assert observed([1.0] * 32) == [1.0, 2.0, 4.0]


def test_the_first_queue_holds_nine_calls_in_ten() -> None:
    """A few long calls among ninety short ones do not widen the first queue."""
    assert observed([0.5] * 90 + [50.0] * 6) == [0.5, 1.0, 2.0]


def test_calls_that_never_ran_do_not_count() -> None:
    """A call that was aborted in the queue had no service to learn from."""
    assert observed([0.0] * 100) is None


def test_old_calls_are_forgotten() -> None:
    """When the workload changes, the bounds follow the latest calls."""
    assert observed([10.0] * 512 + [1.0] * 512) == [1.0, 2.0, 4.0]


@given(st.lists(st.floats(1e-6, 1e4), min_size=32, max_size=200), st.integers(2, 8))
def test_bounds_are_always_valid(services_s: list[float], queues: int) -> None:
    """For any calls, the bounds are positive and increasing, and there is one fewer than queues."""
    bounds = observed(services_s, queues)
    assert bounds is not None
    assert len(bounds) == queues - 1
    assert bounds[0] > 0
    assert all(a < b for a, b in itertools.pairwise(bounds))


def test_the_policy_uses_the_learned_bounds() -> None:
    """The policy starts with the default bounds. Calls that arrive later are ranked by the learned bounds, and the
    quanta follow them."""
    policy = PolicyConfig("atlas", bounds_s="auto").make()
    assert isinstance(policy, Atlas)
    assert policy.bounds_s == DEFAULT_BOUNDS_S
    early = Call("early", ProgramView("p", attained=Attained(service_s=0.3)))
    policy.arrive(early, 0.0)
    serve(policy, [0.1] * 32)
    assert policy.bounds_s == pytest.approx([0.1 * 2**n for n in range(4)])
    assert policy.quanta_s[:3] == pytest.approx([0.1, 0.1, 0.2])
    late = Call("late", ProgramView("p", attained=Attained(service_s=0.3)))
    policy.arrive(late, 0.0)
    assert (early.rank.level, late.rank.level) == (0, 2)


def test_given_bounds_do_not_change() -> None:
    """Bounds that are given as numbers are not learned."""
    policy = PolicyConfig("atlas", bounds_s=(1.0, 2.0)).make()
    assert isinstance(policy, Atlas)
    serve(policy, [0.1] * 100)
    assert policy.bounds_s == (1.0, 2.0)


def test_given_quanta_do_not_change() -> None:
    """If the quanta are given, only the bounds are learned."""
    policy = PolicyConfig("atlas", bounds_s="auto", quanta_s=(1.0,) * 5).make()
    assert isinstance(policy, Atlas)
    serve(policy, [0.1] * 100)
    assert policy.quanta_s == (1.0,) * 5
