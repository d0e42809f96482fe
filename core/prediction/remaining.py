"""What a program or a thread has left, as means and standard deviations."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and a standard deviation."""

    mean: float
    spread: float  # the standard deviation

    def plus(self, other: Estimate) -> Estimate:
        """The sum of two quantities. Their deviations add up, as if the quantities were fully correlated."""
        return Estimate(self.mean + other.mean, self.spread + other.spread)

    def toward(self, other: Estimate, weight: float) -> Estimate:
        """This estimate, moved towards another one; weight 1: the other one."""
        mean = self.mean + weight * (other.mean - self.mean)
        return Estimate(mean, self.spread + weight * (other.spread - self.spread))


class Remaining(NamedTuple):
    """What is left of a program, or of a thread of it."""

    calls: Estimate
    service_s: Estimate  # seconds on the model executor
    output_tokens: Estimate
    prefill_tokens: Estimate  # prompt tokens to compute

    def plus(self, other: Remaining) -> Remaining:
        """The sum over two threads."""
        return Remaining(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))

    def toward(self, other: Remaining, weight: float) -> Remaining:
        """Each estimate, moved towards another one."""
        return Remaining(*(mine.toward(theirs, weight) for mine, theirs in zip(self, other, strict=True)))


class Left(NamedTuple):
    """What is left of a thread at a node."""

    after: Remaining  # after a call of the node
    with_call: Remaining  # with that call included
