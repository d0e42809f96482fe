"""What is expected of a program's next call, by name: that it continues a context, how much of it, and its output."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from weft.core.prediction.samples import Samples, SamplesByName
from weft.core.prediction.times import MOST_LETTERS

_MOST_NAMES: Final = 256
_AGES: Final = 12  # classes of ages, by powers of two
_FORGET: Final = 0.998  # the weight of all earlier contexts with each new one
_LATEST_PARTS: Final = 64  # parts of a name that are kept
_KNOWN_FROM: Final = 8  # parts from which on their quantile counts


@dataclass(slots=True)
class _Ages:
    """By class of ages, as far as contexts have come."""

    reached: list[float] = field(default_factory=list)  # contexts that have reached this age
    continued: list[float] = field(default_factory=list)  # of these, continued at this age


class Reuse:
    """The chance that a context is continued, given its age: the calls that its program has started since.

    A loop continues each context at once, except the last one. A tree search continues one branch of a round, and
    hardly ever one of an earlier round. SAGA's P_reuse (eq. 4) needs the chances of the successors in a graph of the
    program. This chance is counted without a graph, which gains nothing (docs/results/forecast.md).
    """

    def __init__(self) -> None:
        self._all = _Ages()
        self._names: OrderedDict[str, _Ages] = OrderedDict()  # the latest used last

    def observe(self, name: str, age: int, *, continued: bool) -> None:
        """A context was continued at this age, or it was given up because its program has ended."""
        name = name[:MOST_LETTERS]
        ages = self._names.setdefault(name, _Ages())
        self._names.move_to_end(name)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)
        last = _age_class(age)
        for each in (ages, self._all):
            new = [0.0] * (last + 1 - len(each.reached))
            each.reached = [_FORGET * value + (place <= last) for place, value in enumerate(each.reached + new)]
            each.continued = [_FORGET * value for value in each.continued + new]
            each.continued[last] += continued

    def chance(self, name: str, age: int) -> float:
        """The chance that a context of this age will be continued. Two more cases count, of which one was continued."""
        ages = self._names.get(name[:MOST_LETTERS], self._all)
        first = _age_class(age)
        return (sum(ages.continued[first:]) + 1.0) / (sum(ages.reached[first : first + 1]) + 2.0)


def _age_class(age: int) -> int:
    return min(max(0, age).bit_length(), _AGES - 1)


class ReusedPart:
    """The part of a context that the program's next call finds in the KV cache, by name.

    A loop that appends to its context uses all of it again. If each prompt has a new page, the next call uses only what
    comes before the page. A call may also find less because its context was evicted, which says nothing about use. So
    the 0.95 quantile of the latest parts counts. Until eight parts are known, all of the context counts.
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
        """The part that the next call is expected to find if nothing is evicted, 0 to 1."""
        latest = self._names.get(name, ())
        if len(latest) < _KNOWN_FROM:
            return 1.0
        return sorted(latest)[len(latest) * 19 // 20]


_PRIOR_TOKENS: Final = 64.0
_TRUST: Final = 4.0  # samples that the estimate of the coarser class is worth


class OutputLengths:
    """Output lengths of calls that have ended.

    The estimate of a class with few calls is weighed against that of the next coarser class. From fine to coarse, a
    class is a name, label and number of earlier calls; a name and label; a name; or all calls. Numbers of calls between
    two powers of two are one class.
    """

    def __init__(self) -> None:
        self._all = Samples(median=_PRIOR_TOKENS)
        self._classes = SamplesByName(self._all)

    def observe(self, name: str, label: str | None, calls_before: int, output_tokens: int) -> None:
        """A call has ended.

        Args:
            calls_before: Calls of the program that ended before.
        """
        self._all.observe(output_tokens)
        for key in _keys(name, label, calls_before):
            self._classes.observe(key, output_tokens)

    def mean_tokens(self, name: str, label: str | None, calls_before: int) -> float:
        """The expected output of a call in tokens. Each class counts by its number of samples."""
        mean = self._all.mean
        for key in _keys(name, label, calls_before):
            samples = self._classes.get(key)
            if samples is not None:
                weight = len(samples) / (len(samples) + _TRUST)
                mean += weight * (samples.mean - mean)
        return mean


def _keys(name: str, label: str | None, calls_before: int) -> Iterator[tuple[object, ...]]:
    """The classes of a call, the coarsest first."""
    name = name[:MOST_LETTERS]
    yield (name,)
    label = (label or "")[:MOST_LETTERS]
    yield name, label
    yield name, label, max(0, calls_before).bit_length()
