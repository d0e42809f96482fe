"""The time of a baseline's engine: engine steps, and seconds in which the engine worked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

# The length of a step on the clock of steps, about 8 ms. A power of two makes times of whole steps exact.
STEP_S: Final = 1 / 128


def engine_timer(*, on_cpu: bool) -> Callable[[], float]:
    """The clock of engines in this process: its processor seconds if they compute in one thread on a CPU, so that other
    work on the machine hardly counts, and otherwise seconds.
    """
    return time.process_time if on_cpu and os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter


class Clock:
    """Steps and seconds of one engine. Several engines step alternately, and only this engine's own steps count.

    Either steps or seconds decide when calls arrive. An engine without work jumps to the next arrival. Such a jump is
    converted to the other unit with the mean length of the steps so far.

    Args:
        counts_steps: True: calls arrive by steps of `STEP_S`. False: calls arrive by seconds.
        timer: a monotonic clock, in seconds; see `engine_timer`.
    """

    def __init__(self, *, counts_steps: bool, timer: Callable[[], float]) -> None:
        self.counts_steps = counts_steps
        self.timer = timer
        self.reset()

    def reset(self) -> None:
        """Set the clock to 0."""
        self.steps = 0
        self.busy_steps = 0  # without the steps that were jumped over
        self.busy_s = 0.0
        self._idle_s = 0.0
        self._step_began_s: float | None = None  # None: no step is under way
        self._scheduled = False  # whether the step under way has been scheduled

    @property
    def seconds(self) -> float:
        """Seconds in which the engine worked, and those that it jumped over."""
        under_way_s = 0.0 if self._step_began_s is None else self.timer() - self._step_began_s
        return self.busy_s + self._idle_s + under_way_s

    @property
    def now_s(self) -> float:
        """The time by which calls arrive. Weft's scheduler uses the same time."""
        return (self.steps + self._scheduled) * STEP_S if self.counts_steps else self.seconds

    def begin_step(self) -> None:
        self._step_began_s = self.timer()

    def note_scheduled(self) -> None:
        """The step under way has been scheduled. Everything after that happens at the step's end."""
        self._scheduled = True

    def end_step(self) -> float:
        """The step under way ends; returns its length in seconds."""
        length_s = self.timer() - (self._step_began_s or 0.0)
        self._step_began_s, self._scheduled = None, False
        self.busy_s += length_s
        self.steps += 1
        self.busy_steps += 1
        return length_s

    def skip_to(self, due_s: float) -> None:
        """Jump to `due_s`, since there is no work before then."""
        mean_s = self.busy_s / self.busy_steps if self.busy_steps else STEP_S
        idle_s = max(0.0, due_s - self.now_s)
        if self.counts_steps:
            steps = round(idle_s / STEP_S)
            self.steps += steps
            self._idle_s += steps * mean_s
        else:
            self._idle_s += idle_s
            self.steps += round(idle_s / mean_s)
