"""A live program under `learned` and `auto`: its age, the work of its calls that the age holds, and its classes."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.policies.service.classes import LEAST_ENDED, Aged, ServiceClass
from weft.core.policies.view import Call, ProgramView


@dataclass(eq=False, slots=True)
class Counted:
    """The part of a call's work that the age of its program holds already."""

    number: int  # the call's position among all calls of the engine, by arrival
    computed_tokens: int = 0
    output_tokens: int = 0
    is_running: bool = False

    def count(self, call: Call, prompt_weight: float) -> float:
        """Count the work that the call has done since it was last counted. Returns that work in tokens."""
        work: float = call.output_tokens - self.output_tokens
        work += prompt_weight * (call.computed_tokens - self.computed_tokens)
        self.output_tokens, self.computed_tokens = call.output_tokens, call.computed_tokens
        return work


@dataclass(eq=False, slots=True, kw_only=True)
class OpenProgramWork(Aged):
    """A program that has not ended."""

    view: ProgramView
    named_class: ServiceClass  # the class of its tenant and name
    ranked_by: ServiceClass  # the class that ranks it, as of its latest key
    # The parts of its class, and those of all names together, whose programs have shown the same shape; finer last.
    parts_of_name: list[ServiceClass] = field(default_factory=list)
    parts_of_all: list[ServiceClass] = field(default_factory=list)
    arrival_s: float
    left_tokens: float = 0.0  # the work that it is expected to have left, by its tenant and name
    key: float = 0.0  # in seconds; the least goes first
    standing: float = 0.0  # its key at the gate
    running: int = 0  # its calls in the batch
    is_wide: bool = False  # two of its calls were in progress at once
    calls: dict[Call, Counted] = field(default_factory=dict)

    def find_class(self) -> ServiceClass:
        """The class that ranks it: the finest one that has a distribution and at least `LEAST_ENDED` programs.

        If there is none, it is the finest one that has a distribution, and without any the class of its name.
        """
        finest = None
        for each in (*reversed(self.parts_of_name), self.named_class, *reversed(self.parts_of_all)):
            if each.ranks:
                if each.ended + len(each.live) >= LEAST_ENDED:
                    return each
                finest = finest or each
        return finest or self.named_class

    @property
    def classes(self) -> list[ServiceClass]:
        """All classes that it counts in, from coarse to fine. Its name says more than what it has shown."""
        return [*self.parts_of_all, self.named_class, *self.parts_of_name]
