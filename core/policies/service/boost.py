"""The boost: by how much earlier a program counts as having arrived, because of its rank.

    boost(r) = B * E[(X - r)+] / E[X]        B = BOOST * min(backlog, BATCHES * slots * E[X]) * seconds per token

X is the work of any program, r a rank in tokens, and the backlog the work that all programs have left. A program is
therefore never overtaken by one that arrives more than B later. With a larger B, the largest programs would wait until
no others arrive any more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from weft.core.policies.steps import StepCosts

BOOST: Final = 8.0  # the largest boost, in units of the backlog
BATCHES: Final = 3.5  # the most that the backlog counts, in full batches of programs of mean work
UNKNOWN_TOKENS: Final = 1000.0  # the assumed mean work of a program while none has ended
_LEAST_CHANGE: Final = 0.1  # B follows the backlog once it is off by this part


class Boost:
    """The boost. It changes for all programs at once, because keys under different boosts do not compare.

    Attributes:
        most_s: B, the largest boost, in seconds.
    """

    def __init__(self) -> None:
        from weft.core.policies.service.distribution import EDGES

        self.most_s = 0.0
        self._edges: tuple[float, ...] = tuple(map(float, EDGES))
        self._latest: tuple[float, ...] | None = None
        self._beyond: tuple[float, ...] | None = None  # E[(X - x)+] / E[X] at each edge x; None until a fit counts

    def use(self, share_beyond: Iterable[float]) -> None:
        """Take over a new fit: E[(X - x)+] / E[X] at each edge x. It counts from the next change of B on."""
        self._latest = tuple(map(float, share_beyond))

    def follow(self, left_tokens: float, mean_tokens: float, costs: StepCosts) -> bool:
        """Set B by the backlog, if B is off by more than a tenth.

        Args:
            left_tokens: The work that all programs have left.
            mean_tokens: E[X].

        Returns whether the boost has changed.
        """
        most_s = BOOST * min(left_tokens, BATCHES * costs.slots * mean_tokens) * costs.token_s
        if most_s <= 0 or 1 - _LEAST_CHANGE < self.most_s / most_s < 1 + _LEAST_CHANGE:
            return False
        self.most_s, self._beyond = most_s, self._latest
        return True

    def of(self, rank_tokens: float) -> float:
        """The boost of a rank, in seconds."""
        return self.most_s * self._share_beyond(rank_tokens)

    def _share_beyond(self, rank: float) -> float:
        """The share of all work that lies beyond the first `rank` tokens of each program: 1 for a rank of 0."""
        if self._beyond is None:
            return math.exp(-rank / UNKNOWN_TOKENS)
        last = len(self._edges) - 1
        cell = min(bisect_right(self._edges, rank), last) - 1
        part = min(1.0, (rank - self._edges[cell]) / (self._edges[cell + 1] - self._edges[cell]))
        return self._beyond[cell] + part * (self._beyond[cell + 1] - self._beyond[cell])
