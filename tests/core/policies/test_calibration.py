"""Queue bounds that are found from the calls that are served."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.policies import DEFAULT_BOUNDS_S, Atlas, Call, PolicyConfig, ProgramView
from weft.core.policies.calibration import BoundsCalibration
from weft.core.process_table import Attained


def observed(services_s: Sequence[float], queues: int = 4) -> Sequence[float] | None:
    """The latest bounds after these calls."""
    calibration = BoundsCalibration(queues)
    latest = None
    for service_s in services_s:
        latest = calibration.observe(service_s) or latest
    return latest


def serve(policy: Atlas, services_s: Sequence[float]) -> None:
    """Calls that run one after the other, each of a new program."""
    for service_s in services_s:
        call = Call("c", ProgramView("p"))
        policy.arrive(call, 0.0)
        policy.start(call, 0.0)
        policy.charge(call, service_s, service_s)
        policy.leave(call)


def test_nothing_is_said_before_enough_calls() -> None:
    """Thirty-one calls are not yet a distribution."""
    assert observed([1.0] * 31) is None
    assert observed([1.0] * 32) == [1.0, 2.0, 4.0]


def test_the_first_queue_holds_nine_calls_in_ten() -> None:
    """A hundred-odd short calls and a few long ones: the long ones do not widen the first queue."""
    assert observed([0.5] * 90 + [50.0] * 6) == [0.5, 1.0, 2.0]


def test_calls_that_never_ran_do_not_count() -> None:
    """A call aborted in the queue says nothing about service."""
    assert observed([0.0] * 100) is None


def test_old_calls_are_forgotten() -> None:
    """When the load changes, the bounds follow."""
    assert observed([10.0] * 512 + [1.0] * 512) == [1.0, 2.0, 4.0]


@given(st.lists(st.floats(1e-6, 1e4), min_size=32, max_size=200), st.integers(2, 8))
def test_bounds_are_always_valid(services_s: list[float], queues: int) -> None:
    """Positive, increasing, one fewer than queues, whatever the calls."""
    bounds = observed(services_s, queues)
    assert bounds is not None
    assert len(bounds) == queues - 1
    assert bounds[0] > 0
    assert all(a < b for a, b in itertools.pairwise(bounds))


def test_the_policy_takes_the_bounds_over() -> None:
    """It starts with the defaults, and later arrivals go by what was found; quanta follow."""
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


def test_bounds_stay_where_they_were_put() -> None:
    """Without "auto" nothing moves."""
    policy = PolicyConfig("atlas", bounds_s=(1.0, 2.0)).make()
    assert isinstance(policy, Atlas)
    serve(policy, [0.1] * 100)
    assert policy.bounds_s == (1.0, 2.0)


def test_quanta_that_were_given_stay() -> None:
    """Only the bounds are found; a quantum for each queue was said."""
    policy = PolicyConfig("atlas", bounds_s="auto", quanta_s=(1.0,) * 5).make()
    assert isinstance(policy, Atlas)
    serve(policy, [0.1] * 100)
    assert policy.quanta_s == (1.0,) * 5
