"""The latest samples of one quantity, and what they say about the next one.

A quantile is one of the next sample: the next sample does not exceed `quantile_s(0.95)` in 95 % of all cases, whatever
the coefficient of variation. SAGA (§4.2) takes the quantile from a moving average, which has none. Its share of covered
cases falls to 71 %.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate
from statistics import NormalDist
from typing import Final

from weft.core.prediction.estimate import TimeEstimate
from weft.core.prediction.student import student_quantile

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
