"""Back-pressure and deadlines, on a clock that stands still."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import DeadlineError, InvalidRequestError, OverloadedError, ReplicaError
from weft.core.routing.admission import Admission, check_max_calls, check_timeout, deadline


def refused(admission: Admission, now_s: float) -> float:
    """Return the `retry_after_s` of a call that is refused."""
    with pytest.raises(OverloadedError) as caught:
        admission.enter(now_s)
    return caught.value.retry_after_s


def test_no_more_calls_than_the_limit_are_admitted() -> None:
    """For each call that leaves, one more is admitted."""
    admission = Admission(lambda: 2)
    admission.enter(0.0)
    admission.enter(0.0)
    with pytest.raises(
        OverloadedError, match=r"2 calls are in flight, at most 2 are admitted\. Send the call again in 1 s"
    ):
        admission.enter(0.0)
    admission.leave(1.0)
    admission.enter(1.0)
    assert admission.calls == 2
    refused(admission, 1.0)


def test_the_limit_may_change() -> None:
    """When the limit falls, no call is ended, and none is admitted until enough calls have left."""
    limit = 3
    admission = Admission(lambda: limit)
    for _ in range(3):
        admission.enter(0.0)
    limit = 1
    for left in (2, 1):
        admission.leave(0.0)
        assert admission.calls == left
        refused(admission, 0.0)
    admission.leave(0.0)
    admission.enter(0.0)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "many", None])
def test_a_bound_that_admits_no_call_is_refused(value: object) -> None:
    """An engine would refuse every call; the error names the value."""
    with pytest.raises(ReplicaError, match=re.escape(f"max_calls is {value!r}; each vLLM engine must be allowed 1")):
        check_max_calls(value)


def test_retry_after_is_the_time_between_departures() -> None:
    """Calls leave every half second: the first refused call retries after half a second, the next ones later."""
    admission = Admission(lambda: 10)
    for _ in range(20):
        if admission.calls < 10:
            admission.enter(0.0)
    for n in range(10):
        admission.leave(n * 0.5)
        admission.enter(n * 0.5)
    assert [refused(admission, 5.0) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    admission.leave(5.0)
    admission.enter(5.0)
    assert refused(admission, 5.5) == pytest.approx(0.5 * 3)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1000)), max_size=200))
def test_retry_after_is_always_between_0_and_a_minute(steps: list[tuple[bool, float]]) -> None:
    """This holds after any sequence of events, and the number of admitted calls is right."""
    admission, inside, now_s = Admission(lambda: 3), 0, 0.0
    for enters, seconds in steps:
        now_s += seconds
        if enters and inside < 3:
            admission.enter(now_s)
            inside += 1
        elif enters:
            assert 0 < refused(admission, now_s) <= 60
        elif inside:
            admission.leave(now_s)
            inside -= 1
        assert admission.calls == inside


def test_the_earlier_deadline_counts() -> None:
    """The result is the call's own deadline or its program's, and its scope says which."""
    assert deadline(10.0, 5.0, 0.0, 100.0) == (15.0, 5.0, "call")
    assert deadline(10.0, 5.0, 0.0, 12.0) == (12.0, 12.0, "program")
    assert deadline(10.0, None, 0.0, 12.0).at_s == 12.0
    assert deadline(10.0, None, 0.0, None).at_s == math.inf


def test_a_program_that_is_out_of_time_begins_no_call() -> None:
    """This holds from the instant of the deadline on."""
    with pytest.raises(DeadlineError, match="the program was not done within 10 s"):
        deadline(10.0, 5.0, 0.0, 10.0)


def test_the_error_of_a_passed_deadline_says_how_much_was_delivered() -> None:
    """The error is a TimeoutError as well."""
    error = deadline(0.0, 2.5, 0.0, None).error(42)
    assert isinstance(error, TimeoutError)
    assert error.delivered_tokens == 42
    assert "the call was not done within 2.5 s" in str(error)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "5", [1]])
def test_an_invalid_timeout_is_refused(value: object) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidRequestError, match="timeout_s must be a number of seconds above 0"):
        check_timeout(value, "timeout_s")


def test_a_timeout_may_be_left_out() -> None:
    """None means no limit, and whole seconds are converted to float."""
    assert check_timeout(None, "timeout_s") is None
    assert check_timeout(3, "timeout_s") == 3.0
    assert check_timeout(0.5, "timeout_s") == 0.5
