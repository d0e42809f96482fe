"""The distribution of a class of programs' work, as far as it is known, and its Gittins index."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# A program is ranked again when its age, which is the work that it has had, enters the next bucket. `AGES` has the
# shape (AGE_BUCKETS,), in tokens.
AGE_BUCKETS: Final = 45
_FIRST: Final = 16.0  # tokens
_RATIO: Final = 1.25
AGES: Final[Array] = np.concatenate(([0.0], _FIRST * _RATIO ** np.arange(AGE_BUCKETS - 1)))  # lower bounds of buckets

# The cells of sizes are finer: four to a bucket. They reach beyond the last bucket, because a program may outlive it.
_CELLS: Final = 4 * (AGE_BUCKETS + 7)  # `SIZES` has the shape (_CELLS,), and `EDGES` one more, both in tokens
EDGES: Final[Array] = np.concatenate(([0.0], _FIRST * _RATIO ** (np.arange(_CELLS) / 4)))
SIZES: Final[Array] = np.concatenate(([_FIRST / 2], np.sqrt(EDGES[1:-1] * EDGES[2:])))  # the middle of each cell
_LOG_SIZES: Final[Array] = np.log(SIZES)
_CELL_LOG: Final = math.log(_RATIO) / 4  # width of a cell on the logarithmic axis

_TAIL_RATIO: Final = 3.0  # the tail reaches from the largest work that was seen to this multiple of it
_LEAST_BANDWIDTH: Final = 0.08  # of the smoothing, on the logarithmic axis
_MOST_BANDWIDTH: Final = 0.5


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of the work of a program, as the mass in each cell between two `EDGES`.

    Args:
        mass: The probability of each cell, of the shape of `SIZES`. The sum is 1.
        log_variance: The variance of the logarithm of the work. A single large program does not decide it, which
            matters because the largest programs are censored.
    """

    mass: Array
    log_variance: float

    @property
    def survival(self) -> Array:
        """P(S > x) at each edge x, of the shape of `EDGES`."""
        return np.maximum(0.0, 1.0 - np.concatenate(([0.0], np.cumsum(self.mass))))

    def quantile(self, part: float) -> float:
        """The work that a part of the programs does not exceed, in tokens.

        Args:
            part: From 0 to 1.
        """
        return float(SIZES[min(int(np.searchsorted(np.cumsum(self.mass), part)), len(SIZES) - 1)])

    def mean_remaining(self) -> Array:
        """E[S - a | S > a] for the lower bound a of each bucket, in tokens, of the shape of `AGES`.

        A program that has outlived the distribution is expected to need as much work again.
        """
        survival = self.survival
        beyond = integral(survival)
        left, alive = beyond[-1] - np.interp(AGES, EDGES, beyond), np.interp(AGES, EDGES, survival)
        return np.where(alive > 1e-9, left / np.maximum(alive, 1e-9), np.maximum(AGES, _FIRST))

    def share_beyond(self) -> Array:
        """E[(S - x)+] / E[S] at each edge x: the share of all work beyond the first x tokens of programs.

        It has the shape of `EDGES`.
        """
        before = integral(self.survival)
        left: Array = 1.0 - before / before[-1]
        return left


def integral(survival: Array) -> Array:
    """The integral of the survival function from 0 to each edge. Inside a cell, survival falls in a straight line."""
    return np.concatenate(([0.0], np.cumsum((survival[1:] + survival[:-1]) / 2 * np.diff(EDGES))))


def kaplan_meier(finished: Array, censored: Array) -> tuple[Array, float]:
    """The product-limit estimate (Kaplan and Meier 1958).

    A live program has shown only that its work exceeds its age. If it were left out, long programs would look rare,
    because they end last.

    Args:
        finished: The work of the n programs that have ended, in tokens, in ascending order, of shape (n,).
        censored: The ages of the m live programs, in tokens, of shape (m,).

    Returns the mass of each finished program, of shape (n,), and the mass beyond all of them.
    """
    later = len(censored) - np.searchsorted(np.sort(censored), finished, side="left")
    at_risk = np.arange(len(finished), 0, -1) + later
    survival = np.cumprod(1.0 - 1.0 / at_risk)
    before = np.concatenate(([1.0], survival[:-1]))
    return before - survival, float(survival[-1]) if len(finished) else 1.0


def estimate(finished: Iterable[float], censored: Iterable[float]) -> Distribution | None:
    """Estimate a distribution from programs that have ended and programs that live.

    Each mass of the Kaplan-Meier estimate is spread by a Gaussian on the logarithmic axis. The remaining mass lies
    beyond the largest program that was seen. It is at least 1 / (n + 1) for n programs that have ended.

    Args:
        finished: The work of programs that have ended, in tokens.
        censored: The ages of programs that live, in tokens.

    Returns:
        None if there are no programs.
    """
    ends = np.sort(np.fromiter(finished, float))
    ages = np.fromiter(censored, float)
    ages = ages[ages > 0]
    if not len(ends) and not len(ages):
        return None
    masses, left = kaplan_meier(ends, ages)
    tail = max(left, 1.0 / (len(ends) + 1.0))
    rest = 1.0 - left
    cells = np.zeros(len(SIZES))
    if len(ends):
        np.add.at(cells, _cell(ends), masses * ((1.0 - tail) / rest if rest > 0 else 0.0))
    beyond = np.zeros(len(SIZES))
    first = int(_cell(np.array([max(ends.max(initial=0.0), ages.max(initial=0.0))]))[0])
    beyond[first : first + max(1, round(math.log(_TAIL_RATIO) / _CELL_LOG))] = 1.0
    beyond *= tail / beyond.sum()
    total = cells + beyond
    total /= total.sum()
    mean = float(total @ _LOG_SIZES)
    log_variance = float(total @ (_LOG_SIZES - mean) ** 2)
    smooth = _spread(cells, math.sqrt(log_variance), len(ends)) + beyond
    return Distribution(smooth / smooth.sum(), log_variance)


def _cell(work: Array) -> npt.NDArray[np.intp]:
    return np.clip(np.searchsorted(EDGES, work, side="right") - 1, 0, len(SIZES) - 1)


def _spread(cells: Array, deviation: float, count: int) -> Array:
    """Convolve with a Gaussian of Silverman's bandwidth. Mass that would leave the grid stays in its last cells."""
    bandwidth = min(max(1.06 * deviation * max(count, 1) ** -0.2, _LEAST_BANDWIDTH), _MOST_BANDWIDTH) / _CELL_LOG
    reach = math.ceil(3 * bandwidth)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / bandwidth) ** 2)
    wide = np.convolve(cells, kernel / kernel.sum())
    inside = wide[reach:-reach].copy()
    inside[0] += wide[:reach].sum()
    inside[-1] += wide[-reach:].sum()
    return inside


def gittins_index(distribution: Distribution) -> Array:
    """The running maximum of the index, in tokens, at the lower bound of each bucket of ages. The least goes first.

    Returns the ranks, of the shape of `AGES`.
    """
    survival = distribution.survival
    costs = integral(survival)
    ended = np.concatenate(([0.0], np.cumsum(distribution.mass)))  # the distribution function at each edge
    at_age = np.interp(AGES, EDGES, costs), np.interp(AGES, EDGES, ended)
    cost = costs[None, :] - at_age[0][:, None]
    chance = ended[None, :] - at_age[1][:, None]
    is_later = (EDGES[None, :] > AGES[:, None] * (1 + 1e-9)) & (chance > 1e-9)
    index = np.where(is_later, cost / np.where(is_later, chance, 1.0), np.inf).min(axis=1)
    finite = np.where(np.isfinite(index), index, 0.0)  # no program of this age was seen: the rank stays
    return np.maximum.accumulate(finite)
