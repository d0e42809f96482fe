"""Learned ranks with a beginning: classes that nothing is known of go through ATLAS's queues, behind the gate.

`learned` ranks a class of which too few programs have ended by all programs together. Where these are long, that keeps
a new class of short programs behind them, and so it never ends and is never learned. Under ATLAS a newcomer comes
first, and what it needs is soon known.
"""

from __future__ import annotations

from typing import Final

from weft.core.class_rows import Branch
from weft.core.policies.learned import ANY_NAME, BOOST, UNKNOWN_TOKENS, Learned, LiveProgram
from weft.core.policies.registry import register
from weft.core.policies.service_class import ServiceClass
from weft.core.policies.view import ProgramView

# The inner bounds of ATLAS's queues (`weft.core.policies.multilevel.DEFAULT_BOUNDS_S`), at some 8 ms a token.
_BOUNDS: Final = (512.0, 1024.0, 2048.0, 4096.0)


@register("auto", "ATLAS's queues for new names, learned ranks for known ones, behind the gate")
class Auto(Learned):
    """`learned`, except for classes without a distribution of their own.

    Their programs are in ATLAS's queues by the work that they have had, until they have had more than half of all
    programs need. Then they are ranked by all programs together. While no program at all has ended, they stay in the
    queues. In a queue they go by arrival.
    """

    is_gated = True
    branch_of_new = Branch.QUEUES

    def __init__(self) -> None:
        super().__init__()
        self._queues = tuple(_queue_rank(age, self._ages[1] / 2) for age in self._ages)
        self._new = self._queues  # the ranks of classes without a distribution, by bucket

    def _open(self, view: ProgramView, now_s: float) -> LiveProgram:
        if not self._all.ranks:
            self._follow(BOOST * (1 + len(self._programs)) * UNKNOWN_TOKENS * self.costs.token_s)
        return super()._open(view, now_s)

    def _ranks_of(self, of: ServiceClass) -> tuple[float, ...]:
        return of.ranks or self._new

    def _fit(self, each: ServiceClass) -> None:
        super()._fit(each)
        if each is self._all and each.ranks:
            self._new = self._first_in_queues(each.ranks)
        elif each.shape.startswith(ANY_NAME) and each.ranks and self._all.ranks:
            each.ranks = self._first_in_queues(each.ranks)

    def _first_in_queues(self, ranks: tuple[float, ...]) -> tuple[float, ...]:
        """The ranks of programs of other names, for programs of a new one."""
        return tuple(
            min(queue, rank) if age < self._all.median_tokens else rank
            for age, queue, rank in zip(self._ages, self._queues, ranks, strict=True)
        )


def _queue_rank(age: float, first: float) -> float:
    """The lower bound of the queue that holds an age, in tokens; of the first queue, `first`."""
    return max((bound for bound in _BOUNDS if bound <= age), default=first)
