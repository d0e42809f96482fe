"""Whether a later call continues the end of a context, and how much of it the next one uses, by the program's name."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from weft.core.prediction.tool_times import MOST_LETTERS

_MOST_NAMES: Final = 256
_AGES: Final = 12  # classes of ages, by powers of two
_FORGET: Final = 0.998  # a context counts this much less with each later one
_LATEST_PARTS: Final = 64
_KNOWN_FROM: Final = 8  # parts


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


class ReusedPart:
    """The part of a context that the program's next call finds in the KV cache, by name.

    A loop that appends to its context uses all of it again. If each prompt has a new page, the next call uses only what
    comes before the page. A call also finds less if others have evicted its context. So the 0.95 quantile of the latest
    parts counts, and all of the context until eight parts are known.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[Hashable, deque[float]] = OrderedDict()  # the latest used last

    def __len__(self) -> int:
        return len(self._names)

    def observe(self, name: Hashable, part: float) -> None:
        """A call has found this part of its program's context, 0 to 1."""
        latest = self._names.setdefault(name, deque(maxlen=_LATEST_PARTS))
        self._names.move_to_end(name)
        latest.append(part)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)

    def part(self, name: Hashable) -> float:
        """The part, 0 to 1."""
        latest = self._names.get(name, ())
        if len(latest) < _KNOWN_FROM:
            return 1.0
        return sorted(latest)[len(latest) * 19 // 20]
