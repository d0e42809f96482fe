"""The plan of the GPU benchmark: its cases, its time budget and its percentiles."""

from __future__ import annotations

import pytest
from gpu_cases import BLOCK_KIB, BLOCKS, FEWEST_ROUNDS, ROUNDS, Budget, Case, describe_times, percentile, plan, speedups

from weft.testing import FakeClock


def test_the_plan_has_every_case_that_fits() -> None:
    """Every size, count, kind of memory and direction is there, alone and during compute, unless it is too large."""
    every = [case for group in plan(8 << 30) for case in group]
    assert len(every) == len(set(every)) == len(BLOCK_KIB) * len(BLOCKS) * 2 * 2 * 2
    some = [case for group in plan(1 << 20) for case in group]
    assert set(some) == {case for case in every if case.total_bytes <= 1 << 20}


def test_a_group_shares_its_memory() -> None:
    """The cases of a group have one size of block and one kind of memory, and what engines do comes first."""
    groups = plan(8 << 30)
    for group in groups:
        assert len({(case.block_kib, case.pinned, case.telling) for case in group}) == 1
    order = [(group[0].telling, group[0].pinned) for group in groups]
    assert order == sorted(order, reverse=True)
    for kind in set(order):
        largest = [
            max(case.total_bytes for case in group) for group, each in zip(groups, order, strict=True) if each == kind
        ]
        assert largest == sorted(largest)


def test_a_quick_case_gets_all_its_rounds() -> None:
    """A case that needs less than its share of the time is measured as often as p99 asks for."""
    clock = FakeClock()
    budget = Budget(480, clock)
    for _ in budget.rounds(share=1 / 200):
        clock.advance(0.001)
    assert clock() == pytest.approx(ROUNDS * 0.001)


def test_a_slow_case_ends_with_its_share() -> None:
    """A case takes its share of the time that is left, and one round more at most."""
    clock = FakeClock()
    budget = Budget(100, clock)
    for _ in budget.rounds(share=1 / 10):
        clock.advance(1)
    assert clock() == 10
    assert budget.left_s() == 90


def test_unused_time_goes_to_later_cases() -> None:
    """Shares are made of what is left, so a case after quick ones gets more."""
    clock = FakeClock()
    budget = Budget(100, clock)
    clock.advance(10)
    assert len(list(_timed(clock, budget.rounds(share=1 / 2), each_s=1))) == 45


def test_a_case_that_was_begun_gets_a_few_rounds() -> None:
    """One round longer than the share is no measurement, so a case gets three, unless the whole time is over."""
    clock = FakeClock()
    assert len(list(_timed(clock, Budget(100, clock).rounds(share=1 / 100), each_s=2))) == FEWEST_ROUNDS
    assert len(list(_timed(clock, Budget(3, clock).rounds(share=1 / 100), each_s=2))) == 2


def _timed(clock: FakeClock, rounds: object, each_s: float) -> object:
    for number in rounds:  # type: ignore[attr-defined]
        yield number
        clock.advance(each_s)


def test_percentiles_are_measured_values() -> None:
    """A percentile is the smallest measured value that covers as many values as asked for."""
    values = list(range(100, 0, -1))
    assert [percentile(values, each) for each in (1, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([7.0], 99) == 7


def test_times_are_described() -> None:
    """The speed is that of the median, in 10^9 bytes a second."""
    times = describe_times([1.0, 2.0, 4.0], total_bytes=8 * 10**9)
    assert times["median_s"] == 2
    assert times["gb_per_s"] == 4
    assert times["p99_s"] == 4
    assert times["rounds"] == 3


def test_ratios_are_taken_within_a_round() -> None:
    """What slows a whole round down changes no ratio."""
    assert speedups({"weft": [1.0, 10.0], "batch": [2.0, 20.0]}) == {"batch": 2}


def test_a_large_case_gets_a_larger_share() -> None:
    """A case of 2 GiB copies for long, so equal shares would leave it without a measurement; others get a tenth."""
    small, large, pageable = (
        Case(kib, blocks, pinned=pinned, to_host=True, compute=False)
        for kib, blocks, pinned in ((16, 1, True), (2048, 1024, True), (2048, 1024, False))
    )
    assert 1 < small.weight < 1.001
    assert large.weight == 5
    assert pageable.weight == 0.5


def test_a_case_names_itself() -> None:
    """The line about a case says what was copied, where to, and during what."""
    assert str(Case(16, 4, pinned=True, to_host=False, compute=True)) == "4 x 16 KiB in, pinned, during compute"
