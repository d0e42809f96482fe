"""How much work programs have left, from which `fair` computes the demand of a tenant."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from weft.core.policies.service.classes import ServiceClass, ServiceTable
from weft.core.policies.view import ProgramView

_LEAST_ENDED: Final = 3  # with fewer ends, a name counts as all programs together
_REFIT_ENDS: Final = 8  # ends after which a name is estimated again


class LearnedRemaining:
    """Predicts the work that programs have left: the mean of those of the same tenant and name at the same work.

    A name of which fewer than three programs have ended counts as all programs together. A name is estimated again
    after at most eight ends.
    """

    def __init__(self) -> None:
        self._table = ServiceTable()
        self._all = ServiceClass()
        self._ages: tuple[float, ...] = ()
        self._due: dict[ServiceClass, None] = {}  # classes to estimate again

    def ended(self, program: ProgramView, done_tokens: float) -> None:
        """A program has ended after so much work, in output tokens."""
        if done_tokens <= 0:
            return
        for each in (self._all, self._table.get(program.tenant, program.name)):
            each.end(done_tokens)
            if each.ended >= _LEAST_ENDED and (not each.remaining or each.new_ends >= _REFIT_ENDS):
                self._due[each] = None

    def refresh(self) -> None:
        """An epoch begins. Take one name whose programs have ended into account, in well under a millisecond."""
        if not self._due:
            return
        from weft.core.policies.service.distribution import AGES, estimate

        each = next(iter(self._due))
        del self._due[each]
        each.new_ends = 0
        self._ages = tuple(map(float, AGES))
        distribution = estimate(each.finished, ())
        each.remaining = tuple(map(float, distribution.mean_remaining())) if distribution is not None else ()

    def remaining_tokens(self, program: ProgramView, done_tokens: float) -> float:
        """The expected work that a program has left after so much work, in output tokens; nan if nothing is known."""
        remaining = self._table.get(program.tenant, program.name).remaining or self._all.remaining
        return remaining[max(0, bisect_right(self._ages, done_tokens) - 1)] if remaining else math.nan
