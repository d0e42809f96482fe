"""`auto`: where nothing is known of a class its programs are in ATLAS's queues, and otherwise it ranks as `learned`."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest

from weft.core.class_rows import Branch
from weft.core.policies import Auto, Call, Learned, PolicyConfig, ProgramView, StepCosts
from weft.core.policies.gate.gated import Gated
from weft.core.policies.view import KvSize, ProgramEnded
from weft.core.sim import SimSettings, TraceProgram, simulate
from weft.core.trace.workloads import WORKLOADS, generate, poisson

COSTS = StepCosts(fixed_s=0.016, decode_token_s=0.0, prefill_token_s=5e-4, slots=16)


@pytest.fixture
def policy() -> Auto:
    policy = PolicyConfig("auto", gate=False).make()
    assert isinstance(policy, Auto)
    policy.on_event(COSTS)
    return policy


def waiting(policy: Learned, name: str, work: int, number: int) -> Call:
    """A waiting call of a program that has had so much work."""
    program = ProgramView(
        f"{name}{number}", name, fingerprint="no prompt", arrival_s=number * 0.01, arrival_order=number
    )
    first, second = Call("first", program), Call(program.program_id, program)
    policy.arrive(first, program.arrival_s)
    policy.start(first, program.arrival_s)
    for _ in range(work):
        first.output_tokens += 1
        policy.charge(first, 0.01, program.arrival_s)
    policy.leave(first)
    policy.arrive(second, program.arrival_s)
    return second


def end(policy: Learned, name: str, *works: int) -> None:
    """Programs of so much work come and end."""
    for number, work in enumerate(works):
        call = waiting(policy, name, work, number)
        policy.leave(call)
        policy.on_event(ProgramEnded(call.program))
    decide(policy)


def decide(policy: Learned) -> None:
    """Decide until nothing is left to do."""
    policy.decide(1.0)
    while policy.next_change_s() <= 1.0:
        policy.decide(1.0)


def order(policy: Learned) -> list[str]:
    decide(policy)
    return [call.key for call in policy.waiting]


def test_before_any_program_has_ended_they_are_in_the_queues_of_atlas(policy: Auto) -> None:
    """Those that have had less work go first, and inside a queue those that came first."""
    for number, work in enumerate((3000, 600, 900, 100, 200, 0)):
        waiting(policy, f"new{number % 2}-", work, number)
    assert order(policy) == ["new1-3", "new0-4", "new1-5", "new1-1", "new0-2", "new0-0"]


def test_the_first_queues_are_those_of_atlas_in_seconds(policy: Auto) -> None:
    """On an engine whose steps take 0.1 s, a program leaves the first queue after 4 s, which are 40 tokens."""
    policy.on_event(StepCosts(fixed_s=0.1, decode_token_s=0.0, slots=4))
    for number, work in enumerate((3000, 50, 30, 0)):
        waiting(policy, f"new{number % 2}-", work, number)
    assert order(policy) == ["new0-2", "new1-3", "new1-1", "new0-0"]


def test_programs_of_one_name_go_first_come_until_some_have_ended(policy: Auto) -> None:
    """Queues would not tell them apart, and where they are alike all would end late."""
    for number, work in enumerate((3000, 600, 900, 100, 500, 0)):
        waiting(policy, "new", work, number)
    assert order(policy) == [f"new{number}" for number in range(6)]


def test_no_more_programs_of_a_name_are_explored_than_it_takes_to_know_it(policy: Auto) -> None:
    """The fourth program of a new name is ranked by all programs, as three are enough: here it comes after one that
    will end sooner. When one of the three has gone, it takes the place."""
    end(policy, "short", *[100, 110, 120] * 4)
    end(policy, "long", *[5000, 5500, 6000] * 8)
    new = [waiting(policy, "new", 300, number) for number in range(100, 104)]
    waiting(policy, "short", 0, 104)
    assert order(policy) == ["new100", "new101", "new102", "short104", "new103"]
    policy.leave(new[0])
    policy.on_event(ProgramEnded(new[0].program))
    assert order(policy) == ["new101", "new102", "new103", "short104"]


def test_the_queues_follow_the_calls(policy: Auto) -> None:
    """As ATLAS's do: a program of short calls leaves the first queue after a few of them, not after 512 tokens."""
    for number in range(32):
        call = Call(f"c{number}", ProgramView(f"p{number}", f"n{number % 2}", arrival_s=0.0, arrival_order=number))
        policy.arrive(call, 0.0)
        policy.start(call, 0.0)
        call.output_tokens = 10
        policy.leave(call)
        policy.on_event(ProgramEnded(call.program, is_known=False))
    for number, work in enumerate((50, 25, 17, 0)):
        waiting(policy, f"new{number % 2}-", work, number)
    assert order(policy) == ["new1-3", "new0-2", "new1-1", "new0-0"]


def test_a_new_class_comes_before_a_known_one_of_long_programs(policy: Auto) -> None:
    """If it were ranked by the long programs it would wait for them, and nobody would learn that it is short. Their
    first calls look the same."""
    end(policy, "long", *[20_000, 22_000, 24_000] * 4)
    waiting(policy, "long", 100, 100)
    waiting(policy, "new", 100, 101)
    assert order(policy) == ["new101", "long100"]


def test_a_new_class_loses_that_rank_with_the_work_of_most_programs(policy: Auto) -> None:
    """A program of it that has had more work than half of all programs need comes after those that will end soon."""
    end(policy, "short", *[100, 110, 120] * 4)
    waiting(policy, "new", 300, 100)
    waiting(policy, "short", 0, 101)
    assert order(policy) == ["short101", "new100"]


def test_known_classes_rank_as_under_learned() -> None:
    """Once all classes have ended often enough, both policies have one order."""
    orders = []
    for name in ("auto", "learned"):
        policy = PolicyConfig(name, gate=False).make()
        assert isinstance(policy, Learned)
        policy.on_event(COSTS)
        end(policy, "short", *[100, 110, 120] * 4)
        end(policy, "long", *[5000, 5500, 6000] * 4)
        end(policy, "varied", *[20, 400, 8000] * 4)
        for number, each in enumerate(("long", "varied", "short") * 3):
            waiting(policy, each, 40 * number, 100 + number)
        orders.append(order(policy))
    assert orders[0] == orders[1]


def test_it_has_the_gate_unless_the_user_says_otherwise() -> None:
    """`auto` means gated, in a configuration that came as JSON as well."""
    assert isinstance(PolicyConfig("auto").make(), Gated)
    assert PolicyConfig("auto") == PolicyConfig("auto", gate=True) != PolicyConfig("auto", gate=False)
    for gate in (True, False):
        assert PolicyConfig.from_dict(PolicyConfig("auto", gate=gate).to_dict()).gate is gate
    assert not PolicyConfig("learned").gate


def chats_behind_searches(rng: random.Random) -> list[TraceProgram]:
    searches = generate("search", 10, poisson(rng, 10.0), rng)
    return searches + [replace(WORKLOADS["chat"](rng, f"c{number}"), arrival_s=5.0 + number) for number in range(40)]


COLD_STARTS = {
    "mixed": lambda rng: generate("mixed", 40, poisson(rng, 0.5), rng),
    "tools": lambda rng: generate("tools", 40, poisson(rng, 2.0), rng),
    "chats behind searches": chats_behind_searches,
}


@pytest.mark.parametrize("case", COLD_STARTS)
def test_a_cold_start_is_no_worse_than_atlas(case: str) -> None:
    """From the first program on, also where the first ones are long: there `learned` took half as long again."""

    def mean_s(policy: str, programs: list[TraceProgram]) -> float:
        settings = SimSettings(policy=PolicyConfig(policy), batch_size=16)
        return statistics.fmean(row.latency for row in simulate(programs, settings).programs.values())

    drawn = [COLD_STARTS[case](random.Random(seed)) for seed in range(5)]
    assert statistics.geometric_mean(mean_s("auto", each) / mean_s("atlas", each) for each in drawn) <= 1.02


def test_the_classes_say_what_is_known_and_what_ranks_them(policy: Auto) -> None:
    """One row for each class: how many ended and live, the distribution of the work, and the branch."""
    end(policy, "alike", *[1000, 1100, 1200] * 4)
    end(policy, "varied", *[20, 400, 8000] * 4)
    end(policy, "few", *[70, 500, 4000])
    waiting(policy, "new", 10, 100)
    rows = {row.name: row for row in policy.classes()}
    assert {name: row.branch for name, row in rows.items()} == {
        "alike": Branch.ALIKE,
        "varied": Branch.VARIED,
        "few": Branch.INDEX,
        "new": Branch.QUEUES,
    }
    assert (rows["alike"].ended, rows["alike"].live) == (12, 0)
    assert (rows["new"].ended, rows["new"].live) == (0, 1)
    assert rows["alike"].median_tokens == pytest.approx(1100, rel=0.1)
    assert 8000 < rows["varied"].p95_tokens < 24_000
    assert math.isnan(rows["new"].median_tokens)


def test_a_class_counts_the_programs_that_the_gate_holds_back() -> None:
    """Two calls of a program that is shut out are one program."""
    policy = PolicyConfig("auto").make()
    policy.on_event(COSTS)
    policy.on_event(KvSize(1000))
    programs = [ProgramView(f"p{number}", "agent", arrival_s=0.0, arrival_order=number) for number in range(3)]
    for number, program in enumerate([*programs, programs[2]]):
        policy.arrive(Call(f"c{number}", program, prompt_tokens=400), 0.0)
    assert [(row.live, row.held) for row in policy.classes()] == [(3, 1)]


@pytest.mark.parametrize("names", ["one", "unique"])
def test_names_that_say_nothing_are_made_up_for_by_what_programs_show(names: str) -> None:
    """By the fingerprint of the first call, and by calls side by side: long programs come after short ones, although
    all have one name, or each has its own. (Under `auto` new names are in ATLAS's queues at first.)"""
    policy = PolicyConfig("learned").make()
    assert isinstance(policy, Learned)
    policy.on_event(COSTS)
    unique = itertools.count()

    def name() -> str:
        return "LangGraph" if names == "one" else f"user {next(unique)}"

    for number in range(8):
        for fingerprint, work, width in (("a", 100, 1), ("b", 5000, 1), ("a", 20_000, 2)):
            program = ProgramView(f"{fingerprint}{number}", name(), None, None, fingerprint, arrival_s=0.0)
            calls = [Call(f"c{each}", program) for each in range(width)]
            for call in calls:
                policy.arrive(call, 0.0)
                policy.start(call, 0.0)
                call.output_tokens = work // width
            for call in calls:
                policy.leave(call)
            policy.on_event(ProgramEnded(program))
    decide(policy)

    def arrive(key: str, fingerprint: str, number: int, width: int) -> None:
        program = ProgramView(key, name(), None, None, fingerprint, arrival_s=1.0, arrival_order=number)
        for each in range(width):
            policy.arrive(Call(f"{key}{each}", program), 1.0)

    arrive("wide", "a", 1, width=2)
    arrive("long", "b", 2, width=1)
    arrive("short", "a", 3, width=1)
    assert order(policy) == ["short0", "long0", "wide0", "wide1"]
    rows = policy.classes()
    assert (sum(row.ended for row in rows), sum(row.live for row in rows)) == (24, 3)
    assert len(rows) == (1 if names == "one" else 27)


def test_a_fingerprint_that_comes_once_changes_nothing(policy: Auto) -> None:
    """Where each system prompt has a date or a user in it, the name ranks the programs."""
    for number, work in enumerate([100, 110, 120] * 4):
        program = ProgramView(f"p{number}", "short", None, None, f"print {number}", arrival_s=0.0)
        call = Call("c", program)
        policy.arrive(call, 0.0)
        policy.start(call, 0.0)
        call.output_tokens = work
        policy.leave(call)
        policy.on_event(ProgramEnded(program))
    end(policy, "long", *[5000, 5500, 6000] * 4)
    waiting(policy, "long", 0, 100)
    policy.arrive(
        Call("new", ProgramView("new", "short", None, None, "print new", arrival_s=1.0, arrival_order=101)), 1.0
    )
    assert order(policy) == ["new", "long100"]
