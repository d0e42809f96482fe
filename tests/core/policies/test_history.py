"""Histories: a round trip, their bounds, damaged texts, and a policy that begins with one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.class_rows import Branch
from weft.core.errors import HistoryError
from weft.core.policies import Learned, PolicyConfig, ProgramView
from weft.core.policies.gate.gated import Gated
from weft.core.policies.history import KEPT, MOST_CLASSES, History, ProgramEnd
from weft.core.policies.view import Call, ProgramEnded

NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8)
ENDS = st.builds(ProgramEnd, st.none() | NAMES, NAMES, st.integers(1, 10**9), st.booleans())


def state(history: History) -> dict[str, Any]:
    """All that a history holds."""
    return {
        model: {
            key: (list(past.finished), list(past.forgotten), past.ended)
            for key, past in [*history[model].items(), ("all", history[model].all)]
        }
        for model in history.models
    }


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), ENDS)))
def test_a_history_survives_its_journey(ends: list[tuple[str, ProgramEnd]]) -> None:
    """What was written is read again, class by class and model by model, in the same order."""
    history = History()
    for model, end in ends:
        history[model].add(end)
    again = History.from_json(history.to_json())
    assert state(again) == state(history)
    assert again.to_json() == history.to_json()


def written() -> bytes:
    history = History()
    for number in range(20):
        history["model"].add(ProgramEnd("acme", f"agent {number % 3}", 100 + number, is_known=number % 5 > 0))
    return history.to_json().encode()


@given(st.integers(0, len(written()) - 1), st.binary(max_size=3), st.booleans())
def test_damaged_bytes_are_refused_or_harmless(at: int, other: bytes, is_cut: bool) -> None:
    """Whatever happens to a file, it raises one error, or it holds a history that can be written again."""
    damaged = written()[:at] + other + (b"" if is_cut else written()[at + len(other) :])
    try:
        history = History.from_json(damaged)
    except HistoryError:
        return
    assert state(History.from_json(history.to_json())) == state(history)


ROW = {"tenant": None, "name": "a", "ended": 1, "finished": [5], "forgotten": []}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "it is not a history of Weft"),
        ({"format": "weft-history", "version": 2}, "its version is 2, and this Weft reads 1"),
        ({"models": []}, "it has no lists of classes"),
        ({"models": {"m": [5]}}, "a class is 5"),
        ({"models": {"m": [{**ROW, "name": 5}]}}, "a class has the name 5"),
        ({"models": {"m": [{**ROW, "tenant": "\ud800"}]}}, "a class has the name 'a'"),
        ({"models": {"m": [{**ROW, "finished": [-1]}]}}, "the finished programs of 'a' are not a list of tokens"),
        ({"models": {"m": [{**ROW, "finished": [float("nan")]}]}}, "not a list of tokens"),
        ({"models": {"m": [{**ROW, "forgotten": None}]}}, "the forgotten programs of 'a' are not"),
        ({"models": {"m": [{**ROW, "ended": 0}]}}, "'a' has 0 programs that ended"),
    ],
)
def test_a_damaged_history_says_what_is_wrong(data: Any, message: str) -> None:
    """Each value is checked, because a wrong one would give ranks that make no sense."""
    if isinstance(data, dict):
        data = {"format": "weft-history", "version": 1, **data}
    with pytest.raises(HistoryError, match=message):
        History.from_json(json.dumps(data))


def test_a_history_does_not_grow_without_bound() -> None:
    """Clients choose names, and programs come for years: the latest 8 models, 1024 classes and 100 programs stay."""
    history = History()
    for number in range(20):
        _ = history[f"m{number}"]
    assert History.from_json(history.to_json()).models == [f"m{number}" for number in range(12, 20)]
    history = History()
    for number in range(MOST_CLASSES + KEPT):
        history["m"].add(ProgramEnd(None, f"n{min(number, MOST_CLASSES)}", 1 + number, is_known=True))
    kept = History.from_json(history.to_json())["m"]
    assert len(kept) == MOST_CLASSES
    assert (None, "n0") not in list(kept)
    assert (len(kept.all.finished), kept.all.ended) == (KEPT, MOST_CLASSES + KEPT)


@pytest.fixture
def policy() -> Learned:
    policy = PolicyConfig("auto", gate=False).make()
    assert isinstance(policy, Learned)
    return policy


def run(policy: Learned, name: str, work: int, *, is_known: bool = True) -> None:
    """A program of so much work comes and goes."""
    program = ProgramView("p", name, "acme", arrival_s=0.0)  # type: ignore[arg-type]
    call = Call("c", program)
    policy.arrive(call, 0.0)
    policy.start(call, 0.0)
    call.output_tokens = work
    policy.leave(call)
    policy.on_event(ProgramEnded(program, is_known))


def test_a_policy_reports_each_end_once(policy: Learned) -> None:
    """Those that were forgotten needed so much at least."""
    run(policy, "a", 100)
    run(policy, "b", 7, is_known=False)
    assert policy.take_ends() == [ProgramEnd("acme", "a", 100, True), ProgramEnd("acme", "b", 7, False)]
    assert policy.take_ends() == []


@pytest.mark.parametrize("gate", [False, True])
def test_a_policy_with_a_history_knows_its_classes_at_once(policy: Learned, gate: bool) -> None:
    """What one scheduler has seen, the next one begins with, as if it had seen it itself."""
    history = History()["m"]
    for number in range(12):
        run(policy, "alike", 1000 + 10 * number)
        run(policy, "varied", (20, 400, 8000)[number % 3])
    policy.decide(100.0)
    while policy.next_change_s() <= 100.0:
        policy.decide(100.0)
    for end in policy.take_ends():
        history.add(end)
    later = PolicyConfig("auto", gate=gate).make()
    assert later.learns
    later.on_event(history)
    later.decide(0.0)
    later.decide(0.0)
    assert {row.name: row.branch for row in later.classes()} == {"alike": Branch.ALIKE, "varied": Branch.VARIED}
    assert later.classes() == policy.classes()
    assert later.take_ends() == []
    assert isinstance(later, Gated) is gate
