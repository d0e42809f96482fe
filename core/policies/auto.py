"""Learned ranks with a beginning: new names go through ATLAS's queues, behind the gate.

`learned` ranks a class of which too few programs have ended by all programs together. Where these are long, that keeps
a new class of short programs behind them, and so it never ends and is never learned. Under ATLAS a newcomer comes
first, and what it needs is soon known. It takes a few programs of the name to learn that, so only these are explored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from weft.core.class_rows import Branch
from weft.core.policies.history import ModelHistory
from weft.core.policies.learned import ANY_NAME, Learned
from weft.core.policies.multilevel import DEFAULT_BOUNDS_S
from weft.core.policies.queues.calibration import BoundsCalibration
from weft.core.policies.registry import register
from weft.core.policies.service.boost import UNKNOWN_TOKENS
from weft.core.policies.service.classes import LEAST_ENDED, ServiceClass
from weft.core.policies.service.live_program import LiveProgram
from weft.core.policies.steps.costs import StepCosts
from weft.core.policies.view import Call, ProgramView


@register("auto", "ATLAS's queues for new names, learned ranks for known ones, behind the gate")
class Auto(Learned):
    """`learned`, except for classes without a distribution of their own, where programs have several names.

    Of each such name the first `LEAST_ENDED` live programs are in ATLAS's queues by the work that they have had, until
    they have had more than half of all programs need. In a queue they go by arrival. That many have to end before the
    name is known; to explore more would delay programs of which something is known. The others are ranked by all
    programs together, and go last while no program at all has ended.

    Programs of one name only go first come, first served until some have ended. Queues would not tell them apart.
    """

    branch_of_new = Branch.QUEUES

    def __init__(self) -> None:
        super().__init__()
        self._new: tuple[float, ...] = ()  # the ranks of classes without a distribution, by bucket
        self._new_alike: dict[ServiceClass, tuple[float, ...]] = {}  # those of names whose programs show the same
        self._first: ServiceClass | None = None
        self._has_several = False  # names
        self._calibration = BoundsCalibration(len(DEFAULT_BOUNDS_S) + 1)
        self._is_calibrated = False  # until then the bounds are those of ATLAS in seconds
        self._queues: tuple[float, ...] = ()  # by bucket of ages
        self._set_queues(self._first_bounds())

    @classmethod
    def is_gated(cls, parameters: Any) -> bool:
        return True

    def learn(self, past: ModelHistory) -> None:
        self._has_several |= len(past) > 0
        super().learn(past)

    def leave(self, call: Call) -> None:
        super().leave(call)
        bounds = self._calibration.observe(call.output_tokens + self.costs.prompt_weight * call.computed_tokens)
        if bounds is not None:
            self._is_calibrated = True
            self._set_queues(bounds)

    def use_costs(self, costs: StepCosts) -> None:
        super().use_costs(costs)
        if not self._is_calibrated:
            self._set_queues(self._first_bounds())

    def _open(self, view: ProgramView, now_s: float) -> LiveProgram:
        program = super()._open(view, now_s)
        self._first = self._first or program.named
        if not self._has_several and program.named is not self._first:
            self._has_several = True
            self._renew()
        if self._has_several and not self._all.ranks:
            self._follow(len(self._programs) * UNKNOWN_TOKENS, UNKNOWN_TOKENS)
            self._set_key(program)
        return program

    def _ranks_of(self, program: LiveProgram) -> tuple[float, ...]:
        of = program.of
        if of.ranks and not of.shape.startswith(ANY_NAME):
            return of.ranks
        if self._has_several and program not in itertools.islice(program.named.live, LEAST_ENDED):
            return of.ranks or self._all.ranks or (max(self._queues),) * len(self._ages)  # none has ended: go last
        if not of.ranks:
            return self._new
        found = self._new_alike.get(of)
        if found is None:
            found = self._new_alike[of] = self._explored(of.ranks)
        return found

    def _by_all(self) -> Iterable[LiveProgram]:
        is_any = (each for each in self._programs.values() if each.of.shape.startswith(ANY_NAME))
        return itertools.chain(super()._by_all(), is_any)

    def _fit(self, each: ServiceClass) -> None:
        super()._fit(each)
        self._new_alike.pop(each, None)
        if each is self._all:
            self._renew()

    def _renew(self) -> None:
        """What new names are ranked by has changed."""
        self._new = self._explored(self._all.ranks)
        self._new_alike.clear()
        self._pending |= dict.fromkeys(self._by_all())

    def _explored(self, ranks: tuple[float, ...]) -> tuple[float, ...]:
        """The ranks of other programs, as they are for a new name: newcomers come first, as in ATLAS's queues."""
        if not self._has_several:
            return ranks
        if not self._all.ranks:
            return ranks or self._queues
        return tuple(
            min(queue, rank) if age < self._all.median_tokens else rank
            for age, queue, rank in zip(self._ages, self._queues, ranks, strict=True)
        )

    def _first_bounds(self) -> list[float]:
        """ATLAS's inner bounds in tokens: a call gets one of them with each step of a full batch."""
        return [bound_s / (self.costs.slots * self.costs.token_s) for bound_s in DEFAULT_BOUNDS_S]

    def _set_queues(self, bounds: Sequence[float]) -> None:
        """By bucket, the lower bound of the queue that holds its age, in tokens."""
        first = self._ages[1] / 2
        queues = tuple(max((bound for bound in bounds if bound <= age), default=first) for age in self._ages)
        if queues != self._queues:
            self._queues = queues
            if self._has_several:
                self._renew()
