"""A jump: many steps of a simulated replica at once, which saves simulating each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Jump:
    """Steps with the same batch. Step number n, from 0, takes first_s + n * growth_s seconds."""

    began_s: float
    first_s: float
    growth_s: float
    steps: int

    @property
    def end_s(self) -> float:
        """The time at which the last step ends."""
        return self.began_s + self.duration_s(self.steps)

    def duration_s(self, steps: int) -> float:
        """Seconds that the first `steps` steps take together."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_until(self, duration_s: float) -> int:
        """The fewest steps, at least one, that take `duration_s` seconds or more."""
        if duration_s <= self.first_s:
            return 1
        if self.growth_s == 0:
            steps = math.ceil(duration_s / self.first_s)
        else:
            linear = self.first_s - self.growth_s / 2
            root = math.sqrt(linear * linear + 2 * self.growth_s * duration_s)
            steps = math.ceil((root - linear) / self.growth_s)
        # The estimate may be a step off, because floats are rounded.
        while self.duration_s(steps) < duration_s:
            steps += 1
        while steps > 1 and self.duration_s(steps - 1) >= duration_s:
            steps -= 1
        return steps
