"""A program that a learned policy ranks: its age, what its calls count in it, and the classes that it is in."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.core.policies.service.classes import LEAST_ENDED, Aged, ServiceClass
from weft.core.policies.view import Call, ProgramView


@dataclass(eq=False, slots=True)
class Counted:
    """What of a call's work its program's age holds."""

    number: int  # among all calls of the engine, by arrival
    computed_tokens: int = 0
    output_tokens: int = 0
    is_running: bool = False

    def count(self, call: Call, prompt_weight: float) -> float:
        """Count what the call has done since it was counted, and return that work in tokens."""
        work: float = call.output_tokens - self.output_tokens
        work += prompt_weight * (call.computed_tokens - self.computed_tokens)
        self.output_tokens, self.computed_tokens = call.output_tokens, call.computed_tokens
        return work


@dataclass(eq=False, slots=True, kw_only=True)
class LiveProgram(Aged):
    """A program that has not ended."""

    view: ProgramView
    named: ServiceClass  # of its tenant and name
    of: ServiceClass  # that ranks it, as of its latest key
    parts: list[ServiceClass] = field(default_factory=list)  # those of its name that have shown the same; finer last
    others: list[ServiceClass] = field(default_factory=list)  # those of any name that have shown the same; finer last
    arrival_s: float
    left: float = 0.0  # the work that it has left, in tokens, as its tenant and name let expect
    key: float = 0.0
    standing: float = 0.0  # its key at the gate
    running: int = 0  # calls in the batch
    is_wide: bool = False  # two of its calls were in progress at once
    calls: dict[Call, Counted] = field(default_factory=dict)

    def find_class(self) -> ServiceClass:
        """The class that ranks it: the finest one with a distribution of its own that several programs make up."""
        finest = None
        for each in (*reversed(self.parts), self.named, *reversed(self.others)):
            if each.ranks:
                if each.ended + len(each.live) >= LEAST_ENDED:
                    return each
                finest = finest or each
        return finest or self.named

    @property
    def classes(self) -> list[ServiceClass]:
        """All that it counts in, finer and finer. Its name says more than what it has shown."""
        return [*self.others, self.named, *self.parts]
