"""`auto`, the default policy: learned ranks, and ATLAS's queues for names that are new, behind the gate.

`learned` ranks a class of which too few programs have ended by all programs together. If those are long, a new class of
short programs waits behind them. Its programs do not end, so the policy never learns that they are short. Under ATLAS
new programs come first, and it is soon known what they need. A few programs of a name are enough to learn that, so only
the first few are explored in this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from weft.core.class_rows import Branch
from weft.core.policies.history import ModelHistory
from weft.core.policies.learned import UNKNOWN_TOKENS, Learned
from weft.core.policies.policy import register
from weft.core.policies.queues import DEFAULT_BOUNDS_S, BoundsCalibration
from weft.core.policies.service.classes import ANY_NAME, LEAST_ENDED, OpenProgramWork, ServiceClass
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramView


@register("auto", "ATLAS's queues for new names, learned ranks for known ones, behind the gate")
class Auto(Learned):
    """`learned`, except for names of which too few programs have ended.

    The first `LEAST_ENDED` live programs of such a name are in ATLAS's queues by the work that they have had, until
    they have had more work than half of all programs need. In a queue they go in order of arrival. `LEAST_ENDED`
    programs have to end before the name is known. Exploring more of them would delay programs of known names. The other
    programs of the name are ranked by all programs together, and go last while no program at all has ended.

    If all programs have the same name, they go first come, first served until some have ended, because queues would not
    tell them apart.
    """

    branch_of_new = Branch.QUEUES

    def __init__(self) -> None:
        super().__init__()
        self._new_ranks: tuple[float, ...] = ()  # by bucket of ages: the ranks of explored names
        self._new_shape_ranks: dict[ServiceClass, tuple[float, ...]] = {}  # those of parts of such names
        self._first_class: ServiceClass | None = None
        self._has_several_names = False
        self._calibration = BoundsCalibration(len(DEFAULT_BOUNDS_S) + 1)
        self._is_calibrated = False  # until then ATLAS's bounds in seconds are converted
        self._queue_ranks: tuple[float, ...] = ()  # by bucket of ages: the lower bound of its queue, in tokens
        self._set_queues(self._first_bounds())

    @classmethod
    def is_gated(cls, parameters: Any) -> bool:
        return True

    def _use_costs(self, costs: StepCosts) -> None:
        super()._use_costs(costs)
        if not self._is_calibrated:
            self._set_queues(self._first_bounds())

    def _learn(self, past: ModelHistory) -> None:
        self._has_several_names |= len(past) > 0
        super()._learn(past)

    def leave(self, call: Call) -> None:
        super().leave(call)
        bounds = self._calibration.observe(call.output_tokens + self.costs.prompt_weight * call.computed_tokens)
        if bounds is not None:
            self._is_calibrated = True
            self._set_queues(bounds)

    def _add_program(self, view: ProgramView, now_s: float) -> OpenProgramWork:
        program = super()._add_program(view, now_s)
        self._first_class = self._first_class or program.named_class
        if not self._has_several_names and program.named_class is not self._first_class:
            self._has_several_names = True
            self._renew()
        if self._has_several_names and not self.book.all.ranks:
            self._update_boost(len(self.book.programs) * UNKNOWN_TOKENS, UNKNOWN_TOKENS)
            self._set_key(program)
        return program

    def _ranks_of(self, program: OpenProgramWork) -> tuple[float, ...]:
        ranked_by = program.ranked_by
        if ranked_by.ranks and not ranked_by.shape.startswith(ANY_NAME):
            return ranked_by.ranks
        if self._has_several_names and program not in itertools.islice(program.named_class.live, LEAST_ENDED):
            go_last = (max(self._queue_ranks),) * len(self.book.ages)  # while no program at all has ended
            return ranked_by.ranks or self.book.all.ranks or go_last
        if not ranked_by.ranks:
            return self._new_ranks
        found = self._new_shape_ranks.get(ranked_by)
        if found is None:
            found = self._new_shape_ranks[ranked_by] = self._explored(ranked_by.ranks)
        return found

    def _ranked_by_all(self) -> Iterable[OpenProgramWork]:
        is_any = (each for each in self.book.programs.values() if each.ranked_by.shape.startswith(ANY_NAME))
        return itertools.chain(super()._ranked_by_all(), is_any)

    def _fit(self, service_class: ServiceClass) -> None:
        super()._fit(service_class)
        self._new_shape_ranks.pop(service_class, None)
        if service_class is self.book.all:
            self._renew()

    def _renew(self) -> None:
        """The ranks of new names have changed: rank their programs again."""
        self._new_ranks = self._explored(self.book.all.ranks)
        self._new_shape_ranks.clear()
        self._pending |= dict.fromkeys(self._ranked_by_all())

    def _explored(self, ranks: tuple[float, ...]) -> tuple[float, ...]:
        """The ranks of a new name, made from the ranks of other programs: the better of that rank and of the queue.

        Args:
            ranks: By bucket of ages, the ranks of all programs, or of programs that have shown the same.
        """
        if not self._has_several_names:
            return ranks
        if not self.book.all.ranks:
            return ranks or self._queue_ranks
        return tuple(
            min(queue, rank) if age < self.book.all.median_tokens else rank
            for age, queue, rank in zip(self.book.ages, self._queue_ranks, ranks, strict=True)
        )

    def _first_bounds(self) -> list[float]:
        """ATLAS's inner bounds, converted to the tokens that a call gets in that time in a full batch."""
        return [bound_s / (self.costs.slots * self.costs.token_s) for bound_s in DEFAULT_BOUNDS_S]

    def _set_queues(self, bounds: Sequence[float]) -> None:
        """Use these inner bounds, in tokens. A bucket's rank is the lower bound of the queue that holds its age."""
        first = self.book.ages[1] / 2
        queues = tuple(max((bound for bound in bounds if bound <= age), default=first) for age in self.book.ages)
        if queues != self._queue_ranks:
            self._queue_ranks = queues
            if self._has_several_names:
                self._renew()
