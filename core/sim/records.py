"""What a simulated replica does and has done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.sim.step_time import StepTime


class Execution(NamedTuple):
    """A call was in the batch from start to end."""

    program: str
    call_id: str
    replica: int
    start_s: float
    end_s: float


class Batch(NamedTuple):
    """Steps of a replica with one batch, one after the other."""

    replica: int
    began_s: float
    steps: int
    decode_tokens: int  # a step: of each call that decodes, one
    prefill_tokens: int
    context_tokens: int  # attended to in the first step; `decode_tokens` more with each further one

    def took_s(self, step_time: StepTime) -> float:
        """What all of its steps take."""
        first_s = step_time.step_s(self.decode_tokens, self.prefill_tokens, self.context_tokens)
        growth_s = step_time.context_token_s * self.decode_tokens
        return Jump(self.began_s, first_s, growth_s, self.steps).lasts_s(self.steps)


@dataclass(slots=True)
class Counts:
    """What replicas have done, in tokens but for the preemptions."""

    prompt: int = 0  # of calls when they started first
    prefix_hits: int = 0  # of these, found in the prefix cache
    recomputed: int = 0  # computed again after a preemption
    swapped: int = 0  # copied to host memory
    preemptions: int = 0


@dataclass(slots=True)
class Jump:
    """Steps with one batch. Step number n, from 0, takes first_s + n * growth_s seconds."""

    began_s: float
    first_s: float
    growth_s: float
    steps: int

    def lasts_s(self, steps: int) -> float:
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_until(self, time_s: float) -> int:
        """The fewest steps, at least one, that last `time_s` seconds."""
        if time_s <= self.first_s:
            return 1
        if self.growth_s == 0:
            steps = math.ceil(time_s / self.first_s)
        else:
            linear = self.first_s - self.growth_s / 2
            root = math.sqrt(linear * linear + 2 * self.growth_s * time_s)
            steps = math.ceil((root - linear) / self.growth_s)
        while self.lasts_s(steps) < time_s:
            steps += 1
        while steps > 1 and self.lasts_s(steps - 1) >= time_s:
            steps -= 1
        return steps
