"""What a policy that learns knows of the programs of one class, and a bounded table of classes."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from weft.core.class_rows import Branch, ClassRow

if TYPE_CHECKING:
    from weft.core.policies.service.distribution import Distribution

WINDOW: Final = 400  # the latest programs of a class that are remembered
MOST_CLASSES: Final = 4096  # in a table; a program is in up to seven classes
LEAST_ENDED: Final = 3  # with fewer ends, a class is ranked by the distribution of all programs
_REFIT_ENDS: Final = 8  # a class is fitted again after at most so many ends
# Programs of a class are alike if the variance of the logarithm of work is below this.
ALIKE_BELOW: Final = math.log(2.3)
_VARIED_POWER: Final = 1.5
_PRIOR_ENDS: Final = 8  # programs of equal work that count as ended in each class, in addition to the known ones


@dataclass(eq=False, slots=True, kw_only=True)
class Aged:
    """What a live program has shown of its work."""

    age: float = 0.0  # the work that it has had, in tokens
    bucket: int = 0  # the bucket of its age


@dataclass(eq=False, slots=True)
class ServiceClass:
    """The programs of one tenant and name: the work of ended programs, the live programs, and the latest fit."""

    tenant: str | None = None
    name: str = ""
    shape: str = ""  # what the programs of this part of a class have shown; "": the whole class
    finished: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # work in tokens
    ended: int = 0  # programs that have ended, also those that `finished` no longer holds
    new_ends: int = 0  # programs that have ended since the latest fit
    has_changed: bool = False  # since the latest fit, live or forgotten programs have shown something new
    # Work of programs without a reported end.
    forgotten: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    live: dict[Aged, None] = field(default_factory=dict)
    ranks: tuple[float, ...] = ()  # by bucket of ages, in tokens; empty: it has no distribution of its own
    remaining: tuple[float, ...] = ()  # the expected work left, by bucket of ages, in tokens; empty: the same
    is_alike: bool = False  # its programs need about the same work, and go first come, first served
    branch: Branch | None = None  # how the latest fit ranks; None: it has no distribution of its own
    median_tokens: float = math.nan
    p95_tokens: float = math.nan

    def precede(self, finished: Iterable[float], forgotten: Iterable[float], ended: int) -> None:
        """Add programs of an earlier run, before those that are known.

        Args:
            finished: The work of programs that had ended, in tokens, the latest last.
            forgotten: The work of programs without a reported end.
            ended: How many programs had ended.
        """
        self.finished = deque([*finished, *self.finished], maxlen=WINDOW)
        self.forgotten = deque([*forgotten, *self.forgotten], maxlen=WINDOW)
        self.ended += ended

    def end(self, work_tokens: float) -> None:
        """A program of the class has ended after so much work."""
        self.finished.append(work_tokens)
        self.ended += 1
        self.new_ends += 1

    @property
    def is_due(self) -> bool:
        """Whether enough of its programs have ended since the latest fit."""
        return self.new_ends >= min(_REFIT_ENDS, 1 + self.ended // 4)

    def is_exceeded(self, age: float, of_all: ServiceClass) -> bool:
        """Whether a program of this age has had more work than the class lets expect.

        `of_all` is the class of all programs, which counts if this class has no distribution of its own.
        """
        return age > (self.p95_tokens if self.ranks else of_all.median_tokens)

    def estimate(self, of_all: ServiceClass) -> Distribution | None:
        """Estimate the distribution of the work of its programs from all that they have shown until now. None if too
        few of them have ended, unless a live one has had more work than half of all programs need."""
        from weft.core.policies.service.distribution import estimate

        self.new_ends, self.has_changed = 0, False
        ages = [*(program.age for program in self.live), *self.forgotten]
        is_long = self is not of_all and bool(of_all.remaining) and max(ages, default=0.0) > of_all.median_tokens
        return estimate(self.finished, ages) if self.ended >= LEAST_ENDED or is_long else None

    def fit(self, distribution: Distribution | None, ages: Sequence[float], *, is_all: bool) -> None:
        """Rank the programs of the class by the distribution of their work (`weft.core.policies.learned`).

        A few ends make the variance too large, because the estimate has a tail and is smoothed. Eight programs of equal
        work are therefore counted in addition.

        Args:
            distribution: The distribution. None: too little is known, so all programs together rank the class.
            ages: The lower bounds of the buckets of ages, in tokens.
            is_all: Whether this is the class of all programs, which the Gittins index alone ranks.
        """
        if distribution is None:
            self.ranks, self.remaining, self.is_alike, self.branch = (), (), False, None
            self.median_tokens = self.p95_tokens = math.nan
            return
        from weft.core.policies.service.distribution import gittins_index

        self.remaining = tuple(map(float, distribution.mean_remaining()))
        self.median_tokens, self.p95_tokens = distribution.quantile(0.5), distribution.quantile(0.95)
        ends = len(self.finished)
        log_variance = distribution.log_variance * ends / (ends + _PRIOR_ENDS)
        varied = 0.0 if is_all else min(1.0, log_variance) ** _VARIED_POWER
        self.is_alike = log_variance < ALIKE_BELOW
        index = map(float, gittins_index(distribution))
        self.ranks = tuple(varied * age + (1 - varied) * rank for age, rank in zip(ages, index, strict=True))
        self.branch = Branch.ALIKE if self.is_alike else Branch.VARIED if varied == 1 else Branch.INDEX

    def row(self, branch_of_new: Branch) -> ClassRow:
        """The class as a row for people.

        `branch_of_new` says how its programs are ranked while it has no distribution of its own.
        """
        branch = self.branch or branch_of_new
        return ClassRow(self.tenant, self.name, self.ended, len(self.live), self.median_tokens, self.p95_tokens, branch)


class ServiceTable:
    """The classes. If there are too many, the one that was used longest ago is forgotten."""

    def __init__(self, most: int = MOST_CLASSES) -> None:
        self._most = most
        self._classes: OrderedDict[tuple[str | None, str, str], ServiceClass] = OrderedDict()

    def get(self, tenant: str | None, name: str, shape: str = "") -> ServiceClass:
        """The class of a tenant and name, or its part with this shape. It is made if it is not known."""
        key = tenant, name, shape
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = ServiceClass(tenant, name, shape)
            if len(self._classes) > self._most:
                self._classes.popitem(last=False)
        self._classes.move_to_end(key)
        return found

    def __iter__(self) -> Iterator[ServiceClass]:
        return iter(self._classes.values())

    def __len__(self) -> int:
        return len(self._classes)
