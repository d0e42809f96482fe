"""What a simulated engine's policy is told of the costs of steps, and when."""

from __future__ import annotations

import math

from weft.core.policies import StepCosts
from weft.core.policies.orders import Fcfs
from weft.core.policies.policy import PolicyEvent
from weft.core.policies.steps import FIT_STEPS
from weft.core.sim import StepTime
from weft.core.sim.executions import KnownCosts


class _Told(Fcfs):
    def __init__(self) -> None:
        super().__init__()
        self.costs: list[StepCosts] = []

    def on_event(self, event: PolicyEvent) -> None:
        if isinstance(event, StepCosts):
            self.costs.append(event)


def test_a_policy_is_told_as_often_as_on_an_engine() -> None:
    """After 64 steps it knows the costs and the most calls that have decoded together. It is told again when they
    were more, after another 64, and never once the batch was full."""
    policy = _Told()
    known = KnownCosts(policy, StepTime(0.5, 0.25, 0.125, 0.0), batch_size=4)
    most = [2] * (2 * FIT_STEPS) + [4] * (2 * FIT_STEPS)
    left = []
    for step, decoding in enumerate(most):
        left.append(known.steps_to_next(step))
        known.step_begins(step, decoding)
    assert policy.costs == [StepCosts(0.5, 0.25, 0.125, 2), StepCosts(0.5, 0.25, 0.125, 4)]
    assert left[:2] == [FIT_STEPS - 1, FIT_STEPS - 2]
    assert left[FIT_STEPS - 1] == 1
    assert left[-1] == math.inf
