"""Tells the policy of a simulated engine what steps cost, when a real engine would."""

from __future__ import annotations

import math

from weft.core.policies import Policy, StepCosts
from weft.core.policies.steps.costs import FIT_STEPS
from weft.core.sim.step_time import StepTime


class KnownCosts:
    """Tells a policy what steps cost, as often as an engine does.

    An engine fits the costs to its steps. The simulator knows them, except for the number of calls that share a step:
    both take the most calls that have decoded in one step so far.

    Args:
        policy: The policy.
        timing: The costs.
        batch_size: The most calls that run at once.
    """

    def __init__(self, policy: Policy, timing: StepTime, batch_size: int) -> None:
        self._policy = policy
        self._timing = timing
        self._batch_size = batch_size
        self._slots = 1
        self._told_slots = 0

    def steps_to_next(self, steps: int) -> float:
        """The number of steps before the step with which the policy is told; inf if it is not told any more.

        Args:
            steps: The number of steps made so far.
        """
        if self._told_slots == self._batch_size:
            return math.inf
        return max(1, FIT_STEPS - 1 - steps % FIT_STEPS)

    def step_begins(self, steps: int, decoding: int) -> None:
        """A step, or a jump, begins.

        The policy is told now and not at the end of the step. An engine takes in the calls that have arrived during a
        step only after the step, so they are ranked by the new costs.

        Args:
            steps: The number of steps made so far.
            decoding: The number of calls that decode in the step.
        """
        self._slots = max(self._slots, decoding)
        if (steps + 1) % FIT_STEPS == 0 and self._slots > self._told_slots:
            self._told_slots, of = self._slots, self._timing
            self._policy.use_costs(StepCosts(of.fixed_s, of.decode_token_s, of.prefill_token_s, self._slots))
