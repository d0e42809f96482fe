"""An estimate of a time that has not passed yet; an oracle knows the time itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


class TimeEstimate(ABC):
    """An estimate of how long something takes. All times are in seconds."""

    is_oracle: ClassVar[bool] = False  # it knows the future; for simulation and benchmarks, always labelled

    @property
    @abstractmethod
    def mean_s(self) -> float:
        """The expected duration."""

    @abstractmethod
    def quantile_s(self, part: float) -> float:
        """The duration that a part of all cases does not exceed.

        Args:
            part: Above 0 and below 1.
        """

    @abstractmethod
    def remaining_s(self, elapsed_s: float) -> float:
        """The expected remaining time, given that `elapsed_s` have passed already: E[T - e | T > e]."""


@dataclass(frozen=True, slots=True)
class KnownTime(TimeEstimate):
    """An oracle, which knows the duration. For simulation and benchmarks only."""

    is_oracle: ClassVar[bool] = True

    duration_s: float

    @property
    def mean_s(self) -> float:
        return self.duration_s

    def quantile_s(self, part: float) -> float:
        del part
        return self.duration_s

    def remaining_s(self, elapsed_s: float) -> float:
        return max(0.0, self.duration_s - elapsed_s)


class KnownPause(KnownTime):
    """An oracle that knows when the next call arrives, and not how long it then waits in the queue."""

    is_oracle: ClassVar[bool] = False  # the wait is still to be added
