"""Calls that the scheduler gives back for another engine: exactly those that it has not begun."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core.ids import CallId, ProgramId
from weft.engine.wire.control import TakeBack, encode_control

pytestmark = pytest.mark.engine  # the modules under test import vLLM

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness whose scheduler serves Weft's own front end."""
    from scheduler_harness import SchedulerHarness

    def harness(policy: str = "fcfs", **options: Any) -> SchedulerHarness:
        h = SchedulerHarness(tmp_path, {"name": policy}, **options)
        h.scheduler._has_own_client = True
        return h

    return harness


def add(h: Any, *names: str, **options: Any) -> None:
    """Add a call for each name, of a program of the same name."""
    for name in names:
        h.add(name, program_id=name, call_id=name, **options)


def take_back(h: Any, *names: str, most: int = 99, most_cached: int = 10**6) -> tuple[list[str], int]:
    """The calls that are given back of those that may be, and the length of the queue then."""
    message = TakeBack(tuple((ProgramId(name), CallId(name)) for name in names), most, most_cached)
    answer = h.scheduler(encode_control(message))
    h.scheduler.check_integrity()
    return [call_id for _, call_id in answer["taken"]], answer["waiting"]


def test_a_call_stays_where_most_of_its_prompt_is_cached(make: Make) -> None:
    """Elsewhere it would have to be computed again. The next ones in the order leave in its place."""
    h = make(slots=1, prefix_caching=True, batched_tokens=256)
    context = list(range(100, 180))
    add(h, "first", prompt=context, max_tokens=1)
    h.run()
    add(h, "runs", max_tokens=50)
    h.step()
    add(h, "same", prompt=[*context, 1, 2, 3])
    add(h, "half", prompt=[*context[:32], *range(500, 540)])
    add(h, "other", "another", prompt=list(range(300, 380)))
    names = ("same", "half", "other", "another")
    assert take_back(h, *names, most=1, most_cached=31) == (["other"], 3)
    assert take_back(h, *names, most_cached=32) == (["half", "another"], 1)
    assert take_back(h, *names, most_cached=80) == (["same"], 0)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_only_calls_that_have_not_begun_are_given_back(make: Make, in_flight: int) -> None:
    """A call that runs stays, also while its first step is in flight. The others end as if nothing had happened."""
    from scheduler_harness import expected_output

    h = make(slots=1, in_flight=in_flight)
    add(h, "a", "b", "c", "d")
    h.step()
    assert take_back(h, "a", "b", "d", "unknown") == (["b", "d"], 1)
    h.run()
    assert sorted(h.finished) == ["a", "c"]
    assert h.tokens["a"] == h.tokens["c"] == expected_output([7, 8, 9], 4)
    assert h.tokens["b"] == h.tokens["d"] == []


def test_calls_are_given_back_in_the_order_that_is_asked_for(make: Make) -> None:
    """No more than so many; none asks for the length of the queue only."""
    h = make(slots=1)
    add(h, "a", "b", "c", "d")
    h.step()
    assert take_back(h, "c", "b", "d", most=0) == ([], 3)
    assert take_back(h, "c", "b", "d", most=2) == (["c", "b"], 1)


def test_a_preempted_call_stays(make: Make) -> None:
    """It has output already, which must not be computed twice."""
    h = make("plas", slots=2, blocks=9, batched_tokens=64)
    add(h, "a", "b", prompt=list(range(48)), max_tokens=60)
    while not any(request.num_preemptions for request in h.scheduler.requests.values()):
        h.step()
    (preempted,) = [each.request_id for each in h.scheduler.requests.values() if each.num_preemptions]
    assert take_back(h, "a", "b") == ([], 1)
    h.run()
    assert preempted in h.finished


def test_a_call_with_several_sequences_stays(make: Make) -> None:
    """One of them may run already, and they are counted together."""
    h = make(slots=1)
    add(h, "a")
    h.step()
    for sequence in ("0_b", "1_b"):
        h.add(sequence, program_id="b", call_id="b")
    assert take_back(h, "b") == ([], 2)


def test_two_programs_may_use_one_call_id(make: Make) -> None:
    """Clients choose call ids, so a call is named with its program."""
    h = make(slots=1)
    add(h, "a")
    h.step()
    for program in ("p", "q"):
        h.add(program, program_id=program, call_id="same")
    answer = h.scheduler(encode_control(TakeBack(((ProgramId("q"), CallId("same")),), 9, 99)))
    assert answer == {"taken": [["q", "same"]], "waiting": 1}
    assert set(h.scheduler.requests) == {"a", "p"}


def test_nothing_of_a_call_is_left_when_it_has_gone(make: Make) -> None:
    """Its account is not held for the front end, because the other engine reports it."""
    h = make(slots=1)
    add(h, "a", "b")
    h.step()
    assert take_back(h, "b") == (["b"], 0)
    assert len(h.scheduler._aborted) == 0
    h.run()
    assert set(h.scheduler.requests) == set()


@pytest.mark.parametrize("policy", ["fcfs", "atlas", "astraea", "auto", "fair"])
def test_random_calls_are_given_back_while_others_run(make: Make, policy: str) -> None:
    """Under policies that hold calls back and keep notes of them, every call that stays ends with the right output."""
    from scheduler_harness import expected_output

    rng = random.Random(policy)
    h = make(policy, slots=2, blocks=40)
    gone: list[str] = []
    expected: dict[str, list[int]] = {}
    for number in range(40):
        prompt, max_tokens = list(range(rng.randrange(1, 60))), rng.randrange(1, 12)
        expected[f"c{number}"] = expected_output(prompt, max_tokens)
        add(h, f"c{number}", prompt=prompt, max_tokens=max_tokens)
        if rng.random() < 0.5:
            begun = {each.request_id for each in h.scheduler.requests.values() if each.num_computed_tokens}
            taken, _ = take_back(h, *(f"c{n}" for n in range(number + 1)), most=rng.randrange(3))
            assert not begun & set(taken)
            gone += taken
        if rng.random() < 0.7:
            h.step()
    h.run()
    assert gone
    assert len(gone) == len(set(gone))
    assert sorted([*gone, *h.finished]) == sorted(expected)
    assert h.tokens == expected | {name: [] for name in gone}
