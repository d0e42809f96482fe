"""What a simulated engine's policy knows of the costs of its steps."""

from __future__ import annotations

import math

from weft.core.policies import Policy, StepCosts
from weft.core.policies.steps.costs import FIT_STEPS
from weft.core.sim.step_time import StepTime


class KnownCosts:
    """Tells a policy what steps cost, as often as an engine does.

    An engine fits the costs to its steps. This one knows them, except for the calls that share a step: both count the
    most that have decoded in one.

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
        """The steps that can be made before the one with which the policy is told; inf: it knows all.

        Args:
            steps: Those made so far.
        """
        if self._told_slots == self._batch_size:
            return math.inf
        return max(1, FIT_STEPS - 1 - steps % FIT_STEPS)

    def step_begins(self, steps: int, decoding: int) -> None:
        """A step begins, or several at once. The policy is told then, because an engine reads the calls that arrive
        during a step when it has ended.

        Args:
            steps: Those made so far.
            decoding: The calls that decode in it.
        """
        self._slots = max(self._slots, decoding)
        if (steps + 1) % FIT_STEPS == 0 and self._slots > self._told_slots:
            self._told_slots, of = self._slots, self._timing
            self._policy.use_costs(StepCosts(of.fixed_s, of.decode_token_s, of.prefill_token_s, self._slots))
