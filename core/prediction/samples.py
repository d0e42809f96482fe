"""What was seen of a quantity, lately and by name, and the quantiles that it supports."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist
from typing import ClassVar, Final


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
        return self.duration_s

    def remaining_s(self, elapsed_s: float) -> float:
        return max(0.0, self.duration_s - elapsed_s)


class KnownPause(KnownTime):
    """An oracle that knows when the next call arrives, and not how long it then waits in the queue."""

    is_oracle: ClassVar[bool] = False  # the wait is still to be added


@lru_cache(maxsize=4096)
def student_quantile(part: float, degrees: int) -> float:
    """The value that a t-distributed variable does not exceed in a part of all cases.

    Exact for 1 and 2 degrees of freedom; otherwise the expansion of Hill (1970, Algorithm 396), whose error is below
    0.1 %.

    Args:
        part: Above 0 and below 1.
        degrees: Degrees of freedom, at least 1.
    """
    if part < 0.5:
        return -student_quantile(1.0 - part, degrees)
    two_sided = 2.0 * (1.0 - part)
    if degrees == 1:
        return 1.0 / math.tan(math.pi * two_sided / 2)
    if degrees == 2:
        return math.sqrt(2.0 / (two_sided * (2.0 - two_sided)) - 2.0)
    a = 1.0 / (degrees - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2) * degrees
    x = d * two_sided
    y = x ** (2.0 / degrees)
    if y > 0.05 + a:  # near the middle: an expansion about the normal distribution
        x = NormalDist().inv_cdf(two_sided / 2)
        y = x * x
        if degrees < 5:
            c += 0.3 * (degrees - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (
                1.0 / (((degrees + 6.0) / (degrees * y) - 0.089 * d - 0.822) * (degrees + 2.0) * 3.0)
                + 0.5 / (degrees + 4.0)
            )
            * y
            - 1.0
        ) * (degrees + 1.0) / (degrees + 2.0) + 1.0 / y
    return math.sqrt(degrees * y)


WINDOW: Final = 256  # the latest samples, which are kept
EMPIRICAL_FROM: Final = 20  # samples: the largest of 19 is the 0.95 quantile of the next one
_FITTED_FROM: Final = 3  # samples from which on a distribution is fitted to them
_LEAST: Final = 1e-6  # the least and the largest value of a sample
_MOST: Final = 1e9

# Before anything is known, half of the tools take less than a second, and 95 % of them less than 12 seconds.
_PRIOR_LOG_DEVIATION: Final = 1.5


class Samples(TimeEstimate):
    """A window of samples: times in seconds, or numbers of tokens. For tokens, use `mean`.

    Args:
        prior: What to assume with fewer than three samples, such as the samples of all tools together. Without one, a
            log-normal distribution whose logarithm has the deviation 1.5.
        median: The median of that distribution.
    """

    def __init__(self, prior: Samples | None = None, *, median: float = 1.0) -> None:
        self._prior = prior
        self._prior_log_mean = math.log(median)
        self._assumed_mean = math.exp(self._prior_log_mean + _PRIOR_LOG_DEVIATION**2 / 2)
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums: list[float] | None = None  # running sums of `_sorted`; None until they are needed
        self._sum = self._log_sum = self._log_squares = 0.0

    def __len__(self) -> int:
        return len(self._latest)

    def observe(self, value: float) -> None:
        """Add a sample. One that is not finite says nothing and is left out; others are taken as 1e-6 to 1e9."""
        if not math.isfinite(value):
            return
        value = min(max(value, _LEAST), _MOST)
        self._sums = None
        self._latest.append(value)
        insort(self._sorted, value)
        self._count(value, 1)
        if len(self._latest) > WINDOW:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._count(oldest, -1)

    def _count(self, value: float, sign: int) -> None:
        log = math.log(value)
        self._sum += sign * value
        self._log_sum += sign * log
        self._log_squares += sign * log * log

    @property
    def mean_s(self) -> float:
        """The mean of times. See `mean`."""
        return self.mean

    @property
    def mean(self) -> float:
        """The mean in the unit of the samples. While there are fewer than 20, the prior's mean is one more sample."""
        count = len(self._sorted)
        if count >= EMPIRICAL_FROM:
            return self._sum / count
        return (self._sum + self._prior_mean()) / (count + 1)

    def quantile_s(self, part: float) -> float:
        """The quantile of the next sample.

        From 20 samples on it lies between two of them: the k-th of n samples is the k / (n + 1) quantile of the next
        one. With 3 to 19 samples, and beyond the largest sample, a log-normal distribution is fitted, with Student's t
        because few samples leave its parameters uncertain. With fewer samples the prior's quantile counts.

        Raises:
            ValueError: `part` is not above 0 and below 1.
        """
        if not 0 < part < 1:
            raise ValueError(f"a quantile's part must be above 0 and below 1, not {part}")
        count = len(self)
        position = part * (count + 1)
        if count < EMPIRICAL_FROM or position < 1:
            return self._fitted(part)
        if position > count:
            return max(self._sorted[-1], self._fitted(part))
        low = math.floor(position)
        below, above = self._sorted[low - 1], self._sorted[min(low, count - 1)]
        return below * math.pow(above / below, position - low)  # a straight line in the logarithm

    def remaining_s(self, elapsed_s: float) -> float:
        """E[T - e | T > e] from the samples beyond e. One more sample is assumed, which takes as long again.

        Astraea predicts only once, when a tool starts (§4.4). But the longer a tool with a heavy tail has run, the
        longer it is expected to run.
        """
        elapsed_s = max(0.0, elapsed_s)
        first = bisect_right(self._sorted, elapsed_s)
        beyond = len(self._sorted) - first
        rest = self._sum
        if first:
            if self._sums is None:
                self._sums = list(accumulate(self._sorted))
            rest = self._sums[-1] - self._sums[first - 1]
        return (rest - beyond * elapsed_s + max(self.mean_s, elapsed_s)) / (beyond + 1)

    def _prior_mean(self) -> float:
        if self._prior is not None and len(self._prior) >= _FITTED_FROM:
            return self._prior.mean_s
        return self._assumed_mean

    def _fitted(self, part: float) -> float:
        count = len(self)
        if count < _FITTED_FROM:
            if self._prior is not None and len(self._prior) >= _FITTED_FROM:
                return self._prior.quantile_s(part)
            return math.exp(self._prior_log_mean + _PRIOR_LOG_DEVIATION * NormalDist().inv_cdf(part))
        mean = self._log_sum / count
        variance = max(0.0, self._log_squares - count * mean * mean) / (count - 1)
        reach = student_quantile(part, count - 1) * math.sqrt(variance * (1 + 1 / count))
        return math.exp(min(max(mean + reach, math.log(_LEAST)), math.log(_MOST)))


MOST_NAMES: Final = 1024
_MOST_NEW: Final = MOST_NAMES // 4  # of these, names with few samples
_KNOWN_FROM: Final = 3  # samples from which on a name is not new


class SamplesByName:
    """Samples of each name. The names that were used longest ago are forgotten.

    Names with fewer than three samples have a quarter of the space to themselves, so that a flood of made-up names does
    not drive out those in use. `prior` is what to assume of a new name.
    """

    def __init__(self, prior: Samples) -> None:
        self._prior = prior
        self._new: OrderedDict[Hashable, Samples] = OrderedDict()  # the latest used last
        self._known: OrderedDict[Hashable, Samples] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._known)

    def get(self, name: Hashable) -> Samples | None:
        return self._known.get(name) or self._new.get(name)

    def most_seen(self, count: int) -> list[tuple[Hashable, Samples]]:
        """The names with the most samples, at most `count` of them."""
        every = [*self._known.items(), *self._new.items()]
        return heapq.nlargest(count, every, key=lambda each: len(each[1]))

    def observe(self, name: Hashable, value: float) -> None:
        samples = self._known.get(name)
        if samples is not None:
            self._known.move_to_end(name)
            samples.observe(value)
            return
        samples = self._new.get(name)
        if samples is None:
            samples = self._new[name] = Samples(self._prior)
        samples.observe(value)
        self._new.move_to_end(name)
        if len(samples) >= _KNOWN_FROM:
            self._known[name] = self._new.pop(name)
            if len(self._known) > MOST_NAMES - _MOST_NEW:
                self._known.popitem(last=False)
        elif len(self._new) > _MOST_NEW:
            self._new.popitem(last=False)
