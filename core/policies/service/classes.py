"""What a policy that learns knows of the programs of one class, and a bounded table of classes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from weft.core.class_rows import Branch, ClassRow
from weft.core.policies.history import ModelHistory, ProgramEnd
from weft.core.policies.view import Call, ProgramView

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


# -- the book of classes of `learned` and `auto`: what programs of a class needed, and what its live ones have shown


_MOST_ENDS: Final = 4096  # ended programs that wait until `take_ends` is called
_REFIT_S: Final = 30.0  # classes that have changed without an end are fitted again so often
# A shape is what programs of a class have shown: a fingerprint, or the following. No fingerprint has a tab.
_WIDE: Final = "\twide"  # two calls side by side
ANY_NAME: Final = "\tany\t"  # begins the shapes of programs of all names


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


class ClassBook:
    """Keeps the programs that have not ended in their classes, and says which classes to fit again.

    Attributes:
        ages: The lower bounds of the buckets of ages, in tokens.
        backlog_tokens: The work that all live programs are expected to have left.
        due: Classes to fit again.
        refit_s: When those are due, too, that have changed without an end.
    """

    def __init__(self) -> None:
        from weft.core.policies.service.distribution import AGES

        self.ages: tuple[float, ...] = tuple(map(float, AGES))
        self.all = ServiceClass()
        self.programs: dict[ProgramView, OpenProgramWork] = {}
        self.backlog_tokens = 0.0
        self._table = ServiceTable()
        self._classes: dict[ServiceClass, None] = {}  # classes with live programs
        self._ends: deque[ProgramEnd] = deque(maxlen=_MOST_ENDS)  # until `take_ends` is called
        self.due: dict[ServiceClass, None] = {}
        self.refit_s = -math.inf

    # -- programs

    def open(self, view: ProgramView, now_s: float) -> OpenProgramWork:
        """A program makes its first call."""
        arrival_s = now_s if math.isnan(view.arrival_s) else view.arrival_s
        named_class = self._table.get(view.tenant, view.name)
        program = self.programs[view] = OpenProgramWork(
            view=view, named_class=named_class, ranked_by=named_class, arrival_s=arrival_s
        )
        self.all.live[program] = None
        self._join(program, named_class)
        if view.fingerprint:
            self._show_shape(program, view.fingerprint)
        self.expect(program)
        return program

    def widen(self, program: OpenProgramWork) -> None:
        """Two calls of a program are in progress at once."""
        program.is_wide = True
        self._show_shape(program, _WIDE)
        if program.view.fingerprint:
            self._show_shape(program, program.view.fingerprint + _WIDE)

    def _show_shape(self, program: OpenProgramWork, shape: str) -> None:
        """A program has shown a shape. It joins the programs of its name, and of all names, that have shown it, too."""
        tenant, name = program.view.tenant, program.view.name
        program.parts_of_all.append(self._table.get(tenant, "", ANY_NAME + shape))
        program.parts_of_name.append(self._table.get(tenant, name, shape))
        for each in (program.parts_of_all[-1], program.parts_of_name[-1]):
            self._join(program, each)

    def _join(self, program: OpenProgramWork, service_class: ServiceClass) -> None:
        # It changed while none of its programs lived.
        if service_class.ranks and service_class.has_changed and service_class not in self._classes:
            self.due[service_class] = None
        self._classes[service_class] = None
        service_class.live[program] = None
        service_class.has_changed |= service_class.is_exceeded(program.age, self.all)

    def add_work(self, program: OpenProgramWork, work: float) -> bool:
        """A program has had more work, in tokens. Returns whether its age is in another bucket now."""
        program.age += work
        bucket = bisect_right(self.ages, program.age) - 1
        if bucket == program.bucket:
            return False
        program.bucket = bucket
        for each in (*program.classes, self.all):
            each.has_changed |= each.is_exceeded(program.age, self.all)
        self.expect(program)
        return True

    def expect(self, program: OpenProgramWork) -> None:
        """Set the work that a program is expected to have left, which follows from its age and its class."""
        before, remaining = program.left_tokens, program.named_class.remaining or self.all.remaining
        program.left_tokens = remaining[program.bucket] if remaining else 0.0
        self.backlog_tokens += program.left_tokens - before

    def close(self, program: OpenProgramWork, *, is_known: bool) -> None:
        """A program is gone.

        Args:
            is_known: Whether its end was reported. If not, its work is at least what it has had: it counts as censored.
        """
        view = program.view
        del self.programs[view]
        self.backlog_tokens = self.backlog_tokens - program.left_tokens if self.programs else 0.0
        for each in (*program.classes, self.all):
            del each.live[program]
            if not each.live:
                self._classes.pop(each, None)
        if program.age <= 0:
            return
        self._ends.append(ProgramEnd(view.tenant, view.name, math.ceil(program.age), is_known))
        for each in (*program.classes, self.all):
            if not is_known:
                each.forgotten.append(program.age)
                each.has_changed = True
                continue
            each.end(program.age)
            if each.is_due:
                self.due[each] = None

    def take_ends(self) -> list[ProgramEnd]:
        """The programs that have ended since the previous call."""
        taken = list(self._ends)
        self._ends.clear()
        return taken

    # -- classes

    def precede(self, past: ModelHistory) -> list[ServiceClass]:
        """Begin with the work of programs of earlier runs. Returns the classes to fit, that of all programs first."""
        found = [self.all]
        self.all.precede(past.all.finished, past.all.forgotten, past.all.ended)
        for (tenant, name), each in past.items():
            found.append(self._table.get(tenant, name))
            found[-1].precede(each.finished, each.forgotten, each.ended)
        return found

    def next_due(self, now_s: float) -> ServiceClass | None:
        """A class to fit again now; None if there is none."""
        if now_s >= self.refit_s and self.programs:
            self.refit_s = now_s + _REFIT_S
            self.due |= dict.fromkeys(each for each in (self.all, *self._classes) if each.has_changed)
        if not self.due:
            return None
        due = next(iter(self.due))
        del self.due[due]
        return due

    def next_due_s(self) -> float:
        """When a class is to be fitted again though nothing happens; -inf: now."""
        if self.due:
            return -math.inf
        return self.refit_s if self.programs else math.inf

    def fit(self, service_class: ServiceClass) -> Distribution | None:
        """Estimate the distribution of a class again."""
        distribution = service_class.estimate(self.all)
        service_class.fit(distribution, self.ages, is_all=service_class is self.all)
        return distribution

    def live(self, service_class: ServiceClass) -> list[OpenProgramWork]:
        return cast("list[OpenProgramWork]", list(service_class.live))

    def rows(self, branch_of_new: Branch) -> Iterator[ClassRow]:
        """The classes as rows for people; `branch_of_new` says how those are ranked of which too little is known."""
        return (each.row(branch_of_new) for each in self._table if not each.shape)
