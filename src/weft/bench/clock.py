"""Where a baseline's engine is in time: engine steps, and seconds that it was at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# What a step counts as on the clock of steps, about 8 ms. A power of two, so that times are whole steps to the digit.
STEP_S: Final = 1 / 128


class Clock:
    """Steps and seconds of one engine, which runs in turns with others: only its own turns count.

    One of the two decides when calls arrive. An engine without work jumps to the next arrival; on the other clock, the
    jump counts as steps of the mean length so far.

    Args:
        counts_steps: arrivals go by steps of `STEP_S`, else by seconds.
        timer: seconds of a monotonic clock.
    """

    def __init__(self, *, counts_steps: bool, timer: Callable[[], float]) -> None:
        self.counts_steps = counts_steps
        self._timer = timer
        self.reset()

    def reset(self) -> None:
        """Begin at 0."""
        self.steps = 0
        self.steps_at_work = 0
        self.work_s = 0.0
        self._idle_s = 0.0
        self._began_s: float | None = None  # of the step under way
        self._scheduled = False  # the step under way is past its scheduling

    @property
    def seconds(self) -> float:
        """Seconds at work, and those that jumps count as."""
        under_way_s = 0.0 if self._began_s is None else self._timer() - self._began_s
        return self.work_s + self._idle_s + under_way_s

    @property
    def now_s(self) -> float:
        """The time by which calls arrive, which is also that of Weft's scheduler."""
        return (self.steps + self._scheduled) * STEP_S if self.counts_steps else self.seconds

    def begin_step(self) -> None:
        """A step begins."""
        self._began_s = self._timer()

    def note_scheduled(self) -> None:
        """The step under way is scheduled; what comes after that happens at its end."""
        self._scheduled = True

    def end_step(self) -> float:
        """The step ends; returns its seconds."""
        lasted_s = self._timer() - (self._began_s or 0.0)
        self._began_s, self._scheduled = None, False
        self.work_s += lasted_s
        self.steps += 1
        self.steps_at_work += 1
        return lasted_s

    def skip_to(self, due_s: float) -> None:
        """There is nothing to do until `due_s`."""
        mean_s = self.work_s / self.steps_at_work if self.steps_at_work else STEP_S
        idle_s = max(0.0, due_s - self.now_s)
        if self.counts_steps:
            steps = round(idle_s / STEP_S)
            self.steps += steps
            self._idle_s += steps * mean_s
        else:
            self._idle_s += idle_s
            self.steps += round(idle_s / mean_s)
