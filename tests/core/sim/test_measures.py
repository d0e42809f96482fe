"""SLO attainment, fairness, throughput and capacity of simulated engines."""

from __future__ import annotations

import pytest
from sim_measures import attainment, fairness

from weft.core.policies import PolicyConfig
from weft.core.sim import SimResult, SimSettings, TraceCall, TraceProgram, capacity, simulate
from weft.core.sim.result import Counts, ProgramResult

ALONE = {"a": 10.0, "b": 10.0, "c": 2.0, "d": 2.0}
TENANTS = {"a": "slow", "b": "slow", "c": "quick", "d": "quick"}


def result(**ends: float) -> SimResult:
    """A result in which each program arrived at 0 and ended then."""
    rows = {name: ProgramResult(arrival=0.0, finish=end, wait=0.0, service=end, calls=1) for name, end in ends.items()}
    return SimResult("fcfs", rows, Counts())


def test_a_program_is_in_time_up_to_a_multiple_of_its_time_alone() -> None:
    """15 s are 1.5 times the 10 s alone, and in time. The multiple and the programs can be chosen."""
    found = result(a=15.0, b=15.1, c=2.0, d=10.0)
    assert attainment(found, ALONE) == 0.5
    assert attainment(found, ALONE, 5.0) == 1.0
    assert attainment(found, ALONE, 1.5, ["c"]) == 1.0
    assert attainment(found, ALONE, 1.0, ["a", "d"]) == 0.0


def test_jains_index_is_1_if_tenants_are_slowed_alike() -> None:
    """Twice as slow is as fair for a tenant of long programs as for one of short ones; a tenant alone in it is not."""
    assert fairness(result(a=20.0, b=20.0, c=4.0, d=4.0), ALONE, TENANTS) == pytest.approx(1.0)
    assert fairness(result(a=10.0, b=10.0, c=2000.0, d=2000.0), ALONE, TENANTS) == pytest.approx(0.5, abs=0.01)


def test_the_capacity_is_what_full_slots_serve() -> None:
    """An engine with two slots ends a program of 4 tokens every two units of time, if there are enough of them."""
    programs = [TraceProgram(f"p{n}", (TraceCall("c", (), 4),), 100.0 * n) for n in range(8)]
    settings = SimSettings(policy=PolicyConfig("fair"), batch_size=2, unit_steps=True)
    assert capacity(programs, settings) == pytest.approx(0.5)
    assert simulate(programs, settings).throughput == pytest.approx(8 / 704)
