"""Whether the end of a context is continued by a later call, by the program's name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from weft.core.prediction.tool_times import MOST_LETTERS

_MOST_NAMES: Final = 256
_AGES: Final = 12  # classes of ages, by powers of two
_FORGET: Final = 0.998  # a context counts this much less with each later one


@dataclass(slots=True)
class _Ages:
    reached: list[float] = field(default_factory=lambda: [0.0] * _AGES)  # contexts that lived so long
    continued: list[float] = field(default_factory=lambda: [0.0] * _AGES)  # of these, continued at this age


class Reuse:
    """The chance that a context is continued, given its age: the calls that its program has started since.

    A loop continues each context at once, up to the last. A tree search continues one branch of a round, and hardly
    ever one of an earlier round. SAGA's P_reuse (eq. 4) asks for the chances of the successors in a graph of the
    program; this asks only for what can be counted without one.
    """

    def __init__(self) -> None:
        self._all = _Ages()
        self._names: OrderedDict[str, _Ages] = OrderedDict()  # the latest used last

    def observe(self, name: str, age: int, *, continued: bool) -> None:
        """A context was continued at this age, or it was given up, because its program has ended."""
        name = name[:MOST_LETTERS]
        ages = self._names.setdefault(name, _Ages())
        self._names.move_to_end(name)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)
        last = _age_class(age)
        for each in (ages, self._all):
            each.reached = [_FORGET * value + (place <= last) for place, value in enumerate(each.reached)]
            each.continued = [_FORGET * value for value in each.continued]
            each.continued[last] += continued

    def chance(self, name: str, age: int) -> float:
        """The chance that a context of this age is continued yet. One half in two more cases is assumed."""
        ages = self._names.get(name[:MOST_LETTERS], self._all)
        first = _age_class(age)
        return (sum(ages.continued[first:]) + 1.0) / (ages.reached[first] + 2.0)


def _age_class(age: int) -> int:
    return min(max(0, age).bit_length(), _AGES - 1)
