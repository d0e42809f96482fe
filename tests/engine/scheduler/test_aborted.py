"""Accounts of aborted calls: the scheduler holds them until the front end asks, and never many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.accounts import Account
from weft.core.ids import CallId, ProgramId
from weft.engine.wire.control import AbortedCalls, CallKey, ProgramsEnded, encode_control
from weft.engine.wire.reports import encode_account, read_aborted

aborted = pytest.importorskip("weft.engine.scheduler.ledger", reason="its package imports vLLM")

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
PROGRAMS = [ProgramId(f"p{n}") for n in range(3)]
CALLS = [(program, CallId(f"c{n}")) for program in PROGRAMS for n in range(4)]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a harness whose scheduler serves Weft's own front end."""
    from scheduler_harness import SchedulerHarness

    def harness(**options: Any) -> SchedulerHarness:
        h = SchedulerHarness(tmp_path, {"name": "fcfs"}, **options)
        h.scheduler._has_own_client = True
        return h

    return harness


def asked(h: Any, *calls: str) -> dict[CallId, Account]:
    """The scheduler's answer to a question for the accounts of calls, each of which is of one program here."""
    keys = tuple((ProgramId(program), CallId(call)) for program in ("p", "over", "open") for call in calls)
    return {call: account for (_program, call), account in read_aborted(question(h, *keys)).items()}


def question(h: Any, *calls: CallKey) -> Any:
    return h.scheduler(encode_control(AbortedCalls(calls)))


def test_two_programs_may_choose_one_call_id(make: Make) -> None:
    """Each program gets the account of its own call."""
    h = make(slots=1)
    for number, program in enumerate(("p", "q")):
        h.add(f"r{number}", program_id=program, call_id="c", max_tokens=30)
    for _ in range(3):
        h.step()
    h.abort("r0")
    h.abort("r1")
    h.run()
    keys = ((ProgramId("p"), CallId("c")), (ProgramId("q"), CallId("c")))
    assert read_aborted(question(h, *keys)) == {keys[0]: Account(service_s=3.0), keys[1]: Account(wait_s=3.0)}
    assert len(h.scheduler._aborted) == 0


def test_the_front_end_gets_the_account_of_an_aborted_call_once(make: Make) -> None:
    """No output carries it, and no call has to end after it."""
    h = make(slots=1)
    h.add("a", program_id="p", call_id="a", max_tokens=30)
    h.add("b", program_id="p", call_id="b", max_tokens=30)
    for _ in range(3):
        h.step()
    h.abort("a")
    h.abort("b")
    h.run()
    assert asked(h, "a", "b", "unknown") == {"a": Account(service_s=3.0), "b": Account(wait_s=3.0)}
    assert asked(h, "a", "b") == {}
    assert len(h.scheduler._aborted) == 0


@pytest.mark.parametrize("first", ["the call", "the program"])
def test_nothing_is_held_for_a_program_that_has_ended(make: Make, first: str) -> None:
    """The end of a program may overtake the aborts of its calls. Its row has left the process table by then."""
    h = make(slots=2)
    h.add("a", program_id="over", call_id="a", max_tokens=30)
    h.add("b", program_id="open", call_id="b", max_tokens=30)
    h.step()
    end = encode_control(ProgramsEnded((ProgramId("over"),)))
    if first == "the program":
        h.scheduler(end)
    h.abort("a")
    h.abort("b")
    if first == "the call":
        h.scheduler(end)
    h.run()
    assert asked(h, "a", "b") == {"b": Account(service_s=1.0)}


def test_a_front_end_that_never_asks_costs_a_bounded_memory(make: Make) -> None:
    """Without a question the latest accounts are held and the others are counted, whether or not calls end."""
    h = make(slots=4)
    h.scheduler._aborted._most = 50
    for number in range(200):
        h.add(f"r{number}", program_id="p", call_id=f"c{number}", max_tokens=30)
        h.step()
        h.abort(f"r{number}")
    h.run()
    assert (len(h.scheduler._aborted), h.scheduler._aborted.dropped) == (50, 150)
    assert set(asked(h, *(f"c{number}" for number in range(200)))) == {f"c{number}" for number in range(150, 200)}


def test_calls_of_other_clients_are_not_held(make: Make) -> None:
    """Behind a server nobody asks."""
    h = make()
    h.scheduler._has_own_client = False
    h.add("a", program_id="p", call_id="a", max_tokens=30)
    h.step()
    h.abort("a")
    h.run()
    assert asked(h, "a") == {}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(CALLS), st.integers(0, 9)),
            st.tuples(st.just("take"), st.lists(st.sampled_from(CALLS))),
            st.tuples(st.just("forget"), st.lists(st.sampled_from(PROGRAMS))),
        )
    )
)
def test_the_accounts_agree_with_a_naive_list(steps: list[Any]) -> None:
    """After any sequence of aborts, questions and ends, no account is given twice or kept beyond its bound."""
    held, naive, dropped = aborted.AbortedAccounts(most=4), list[tuple[CallKey, Any]](), 0
    for what, *arguments in steps:
        if what == "add":
            call, seconds = arguments
            if call in {each[0] for each in naive}:  # a program uses an id once
                continue
            account = encode_account(Account(float(seconds)))
            held.add(call, account)
            naive.append((call, account))
            dropped += len(naive) > 4
            naive = naive[-4:]
        elif what == "take":
            assert held.take(arguments[0]) == {call: account for call, account in naive if call in arguments[0]}
            naive = [each for each in naive if each[0] not in arguments[0]]
        else:
            held.forget(arguments[0])
            naive = [each for each in naive if each[0][0] not in arguments[0]]
        assert (len(held), held.dropped) == (len(naive), dropped)
