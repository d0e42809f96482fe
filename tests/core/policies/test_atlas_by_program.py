"""ATLAS with queues in the order of programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_programs import chain

from weft.core.policies import PolicyConfig
from weft.core.sim import SimSettings, simulate

UNIT = SimSettings(batch_size=1, unit_steps=True)


@pytest.mark.parametrize(("policy", "order"), [("atlas", ["a1", "b1", "a2"]), ("atlas_by_program", ["a1", "a2", "b1"])])
def test_a_queue_goes_by_program(policy: str, order: list[str]) -> None:
    """In one queue the later call of an earlier program goes before a call that has waited longer; under ATLAS not."""
    trace = [chain("A", (1, 1)), chain("B", (2,))]
    result = simulate(trace, replace(UNIT, policy=PolicyConfig(policy, (100.0,))), runs=True)
    assert [execution.call_id for execution in result.runs] == order


def test_queues_are_those_of_atlas() -> None:
    """A program in a later queue goes after one that arrived later and has had less service."""
    trace = [chain("A", (3, 3)), chain("B", (1,), 1.0)]
    policy = PolicyConfig("atlas_by_program", (2.0,))
    result = simulate(trace, replace(UNIT, policy=policy), runs=True)
    assert result.programs["B"].finish < result.programs["A"].finish
