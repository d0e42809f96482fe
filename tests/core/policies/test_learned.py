"""Learned ranks: which branch ranks a class, how a program ages, and what the policy keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from weft.core.policies import Call, Learned, PolicyConfig, ProgramView, StepCosts
from weft.core.policies.learned import BATCHES, BOOST
from weft.core.policies.service.distribution import AGES
from weft.core.policies.view import ProgramEnded

COSTS = StepCosts(fixed_s=0.016, decode_token_s=0.0, prefill_token_s=5e-4, slots=16)  # ω = 0.5, 1 ms a token


class Driver:
    """Drives the policy by hand."""

    def __init__(self) -> None:
        policy = PolicyConfig("learned").make()
        assert isinstance(policy, Learned)
        self.policy = policy
        self.policy.on_event(COSTS)
        self.now_s = 0.0
        self._numbers = itertools.count()

    def call(self, program: ProgramView) -> Call:
        """A call of a program arrives."""
        call = Call(f"c{next(self._numbers)}", program)
        self.policy.arrive(call, self.now_s)
        return call

    def program(self, name: str, tenant: str | None = None) -> ProgramView:
        """A program arrives, a hundredth of a second after the one before."""
        self.now_s += 0.01
        number = next(self._numbers)
        return ProgramView(f"p{number}", name, tenant, arrival_s=self.now_s, arrival_order=number)

    def serve(self, call: Call, output_tokens: int, prompt_tokens: int = 0) -> None:
        """A call starts and does so much work, token by token."""
        if call in self.policy.waiting:
            self.policy.start(call, self.now_s)
        if prompt_tokens:
            call.computed_tokens += prompt_tokens
            self.policy.charge(call, 0.01, self.now_s)
        for _ in range(output_tokens):
            call.output_tokens += 1
            self.policy.charge(call, 0.01, self.now_s)

    def run(self, name: str, *works: int, tenant: str | None = None) -> None:
        """Programs of so much work come and go."""
        for work in works:
            program = self.program(name, tenant)
            call = self.call(program)
            self.serve(call, work)
            self.policy.leave(call)
            self.policy.on_event(ProgramEnded(program))
        self.decide()

    def wait(self, seconds: float) -> bool:
        """Time passes."""
        self.now_s += seconds
        return True

    def decide(self) -> None:
        """Decide until nothing is left to do."""
        self.policy.decide(self.now_s)
        while self.policy.next_change_s() <= self.now_s:
            self.policy.decide(self.now_s)

    def aged(self, name: str, *works: int) -> list[Call]:
        """A waiting call of each of some programs that have had so much work."""
        calls = []
        for work in works:
            program = self.program(name)
            first = self.call(program)
            self.serve(first, work)
            self.policy.leave(first)
            calls.append(self.call(program))
        self.decide()
        return calls

    def order(self, calls: Sequence[Call]) -> list[int]:
        """The positions of calls in the order in which they would run."""
        waiting = [call for call in self.policy.waiting if call in calls]
        return [calls.index(call) for call in waiting]


@pytest.fixture
def driver() -> Driver:
    return Driver()


ALIKE = [900, 1000, 1100] * 6
VARIED = [20, 100, 500, 2500, 12_500, 60_000] * 3


def test_programs_that_are_alike_go_first_come(driver: Driver) -> None:
    """Programs of a class of like work keep the order of their arrival, whatever work they have had: that moves them by
    less than the time between them."""
    driver.run("alike", *ALIKE)
    calls = [driver.aged("alike", work)[0] for work in (500, 30, 900, 0) if driver.wait(10)]
    assert driver.order(calls) == [0, 1, 2, 3]


def test_at_one_time_the_younger_of_programs_that_are_alike_is_first(driver: Driver) -> None:
    """Between programs that came together, the one that has had less goes first: it may be a short one."""
    driver.run("alike", *ALIKE)
    driver.aged("alike", *[0] * 8)  # with more work left, the boost is larger
    assert driver.order(driver.aged("alike", 900, 30)) == [1, 0]


def test_nobody_is_overtaken_from_further_than_the_boost(driver: Driver) -> None:
    """The longest program goes before the shortest one that comes later by more than `BOOST` times the backlog."""
    driver.run("short", *[20] * 12)
    driver.run("long", *[2000] * 12)
    (long,) = driver.aged("long", 1000)
    driver.wait(BOOST * 4)  # 2 s of work are left, at 1 ms a token, and some more for safety
    (short,) = driver.aged("short", 0)
    assert driver.order([long, short]) == [0, 1]


def test_the_boost_does_not_grow_with_a_backlog_of_more_than_some_full_batches(driver: Driver) -> None:
    """Behind however many others, a long program goes before one that comes later by what `BATCHES` full batches
    allow. Else it would wait as long as programs arrive."""
    driver.run("short", *[20] * 12)
    driver.run("long", *[2000] * 12)
    (long,) = driver.aged("long", 1000)
    driver.aged("long", *[0] * 1000)  # some 2000 s of work
    driver.wait(BOOST * BATCHES * 16 * 1.2)  # a program has 1 s of work in the mean, and a batch has 16 of them
    (short,) = driver.aged("short", 0)
    assert driver.order([long, short]) == [0, 1]


def test_programs_that_are_alike_do_not_preempt_each_other(driver: Driver) -> None:
    """A call of an earlier program waits for a slot. A program of a class of shorter ones takes it."""
    driver.run("alike", *ALIKE)
    driver.run("short", *[20] * 12)
    early, late = driver.program("alike"), driver.program("alike")
    running = driver.call(late)
    driver.serve(running, 10)
    waiting = driver.call(early)
    driver.decide()
    assert waiting.rank < running.rank
    assert driver.policy.victims([running], 0) == []
    driver.policy.leave(waiting)
    driver.call(driver.program("short"))
    driver.decide()
    assert driver.policy.victims([running], 0) == [running]


def test_programs_that_vary_go_by_attained_service(driver: Driver) -> None:
    """Where sizes differ by orders of magnitude, the program that has had the least work is first."""
    driver.run("varied", *VARIED)
    calls = driver.aged("varied", 500, 30, 5000, 0)
    assert driver.order(calls) == [3, 1, 0, 2]


def test_short_names_overtake_long_ones(driver: Driver) -> None:
    """A program of a class of short ones goes before programs of a class of long ones that came earlier."""
    driver.run("short", *[100] * 12)
    driver.run("long", *[20_000] * 12)
    long = driver.aged("long", 0, 0)
    short = driver.aged("short", 0)
    assert driver.order([*long, *short]) == [2, 0, 1]


def test_tenants_do_not_share_a_name(driver: Driver) -> None:
    """One tenant's programs say nothing of another tenant's programs of the same name."""
    driver.run("work", *[100] * 12, tenant="a")
    driver.run("work", *[20_000] * 12, tenant="b")
    theirs, ours = driver.program("work", "b"), driver.program("work", "a")
    calls = [driver.call(theirs), driver.call(ours)]
    driver.decide()
    assert driver.order(calls) == [1, 0]


def test_a_name_that_is_new_is_ranked_like_all_programs(driver: Driver) -> None:
    """After two ends a name is ranked like one that was never seen, by arrival, and after three by its own."""
    driver.run("known", *[10_000] * 12)
    driver.run("new", 100, 100)
    calls = [*driver.aged("unseen", 0), *driver.aged("new", 0)]
    assert driver.order(calls) == [0, 1]
    driver.run("new", 100)
    assert driver.order(calls) == [1, 0]


def test_a_live_program_says_that_its_new_class_is_long(driver: Driver) -> None:
    """No program of the class has ended, but one has had more work than most programs need. The next one of its name is
    then known to be long."""
    driver.run("known", *[1000] * 12)
    driver.aged("endless", 40_000)
    calls = [*driver.aged("endless", 0), *driver.aged("known", 0)]
    driver.now_s += 31  # the next refit
    driver.decide()
    assert driver.order(calls) == [1, 0]


def test_a_prompt_token_counts_less(driver: Driver) -> None:
    """At ω = 0.5, 400 tokens of prompt and 100 of output are work of 300. A prompt that was found in the cache is
    free."""
    driver.run("varied", *VARIED)
    program = driver.program("varied")
    call = driver.call(program)
    driver.serve(call, 100, prompt_tokens=400)
    driver.policy.leave(call)
    (known,) = [live for live in driver.policy.book.programs.values() if live.view is program]
    assert known.age == 300


def test_calls_of_a_program_share_their_rank(driver: Driver) -> None:
    """The order of programs is not mixed: all calls of the first go before all of the second, in their own order."""
    first, second = driver.program("a"), driver.program("a")
    calls = [driver.call(first), driver.call(second), driver.call(first), driver.call(second)]
    assert driver.order(calls) == [0, 2, 1, 3]
    assert calls[0].rank.order == calls[2].rank.order
    assert len({call.rank for call in calls}) == 4


def test_programs_that_arrive_together_keep_their_order(driver: Driver) -> None:
    """Ties go to the program that arrived first, also for its later calls."""
    first, second = (ProgramView(f"p{n}", "a", arrival_s=0.0, arrival_order=n) for n in range(2))
    calls = [driver.call(second), driver.call(first), driver.call(second)]
    assert driver.order(calls) == [1, 0, 2]


def test_a_rank_changes_only_with_the_bucket(driver: Driver) -> None:
    """Tokens inside a bucket of ages change nothing; the one that enters the next bucket re-ranks all calls."""
    driver.run("varied", *VARIED)
    program = driver.program("varied")
    running, waiting = driver.call(program), driver.call(program)
    driver.decide()
    driver.serve(running, int(AGES[1]) - 1)
    assert driver.policy.decide(driver.now_s) == []
    driver.serve(running, 8)  # charges come at least 8 tokens apart
    assert driver.policy.decide(driver.now_s) == [running, waiting]
    driver.policy.waiting.check_integrity()


def test_a_preempted_call_has_aged(driver: Driver) -> None:
    """What a call has done counts when it leaves the batch, although its charge was not due yet."""
    program = driver.program("a")
    call = driver.call(program)
    driver.serve(call, 5)
    driver.policy.preempt(call, driver.now_s)
    (known,) = driver.policy.book.programs.values()
    assert known.age == 5


def test_refits_follow_the_clock(driver: Driver) -> None:
    """After 30 s without an end, live programs are older, and the distributions are estimated again."""
    driver.aged("a", 100)
    due_s = driver.policy.next_change_s()
    assert due_s == pytest.approx(driver.now_s + 30, abs=0.1)
    driver.now_s = due_s
    driver.decide()
    assert driver.policy.next_change_s() == due_s + 30


def test_nothing_is_kept_of_ended_programs(driver: Driver) -> None:
    """When all programs have ended, also with calls that are being aborted, only the bounded table is left."""
    driver.run("a", *ALIKE)
    program = driver.program("a")
    call = driver.call(program)
    driver.serve(call, 3)
    driver.policy.on_event(ProgramEnded(program))
    driver.serve(call, 20)
    driver.policy.leave(call)
    driver.decide()
    assert list(driver.policy.book.programs.values()) == []
    assert driver.policy.next_change_s() == float("inf")
    assert len(driver.policy.waiting) == 0


def test_a_forgotten_program_is_no_end(driver: Driver) -> None:
    """Programs that were forgotten had at least the work that was seen, so a class with many of them is expected to
    need more than one whose programs ended there."""
    for name in ("ends", "stays"):
        driver.run(name, *ALIKE)
    driver.run("ends", *[1200] * 40)
    for call in driver.aged("stays", *[1200] * 40):
        driver.policy.leave(call)
        driver.policy.on_event(ProgramEnded(call.program, is_known=False))
    driver.now_s += 60  # the next refit
    driver.aged("ends", 0)
    driver.aged("stays", 0)
    ends, stays = (program.ranked_by for program in driver.policy.book.programs.values())
    assert (ends.ended, stays.ended) == (58, 18)
    assert stays.remaining[0] > 1.5 * ends.remaining[0]
