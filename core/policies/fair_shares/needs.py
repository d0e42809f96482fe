"""Agent Fair Share: what each tenant needs to meet its deadlines, and what it gets (SAGA §6, eqs. 8-9).

The paper divides capacity in proportion to each tenant's sum of remaining work over time left. That rewards a tenant
for sending more, and a task whose deadline has passed takes everything. Here the time left has a lower bound, and no
tenant gets more than its weight's part while others need theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from weft.core.policies.service.classes import ServiceClass, ServiceTable
from weft.core.policies.view import ProgramView

_LEAST_ENDED: Final = 3  # with fewer ends, a name counts as all programs together
_REFIT_ENDS: Final = 8  # ends after which a name is estimated again
LEAST_SLACK_S: Final = 0.1  # the least time left that counts: an epoch
_LEAST_SLACK: Final = 0.05  # the same, as a part of the time that the program is expected to take
_FLOOR: Final = 0.25  # the part of its weight's part that a tenant gets whatever it seems to need


class Task(NamedTuple):
    """A program that is not done."""

    work_s: float  # left, in seconds of the engine; nan: unknown
    deadline_s: float  # inf: none
    expected_s: float  # from its arrival to its end, if it were alone


class Tenant(NamedTuple):
    """What is known of a tenant: its weight, and the part of the engine that it needs to be in time."""

    weight: float
    demand: float  # may be inf


def demand(tasks: Iterable[Task], now_s: float) -> float:
    """The part of the engine that a tenant needs: the sum over its programs of work left divided by time left. It is
    inf if the work of a task is unknown, or the sum exceeds the whole engine."""
    needed = 0.0
    for task in tasks:
        if math.isnan(task.work_s):
            return math.inf
        slack_s = max(task.deadline_s - now_s, LEAST_SLACK_S, _LEAST_SLACK * task.expected_s)
        needed += task.work_s / slack_s
        if needed > 1:
            return math.inf
    return needed


def shares(tenants: Sequence[Tenant]) -> list[float]:
    """Divide the engine by weighted max-min fairness: the share of each tenant, all above 0, with the sum 1.

    Each tenant gets what it needs, up to its weight's part of what the others leave. What nobody needs is divided by
    weight.
    """
    given = [0.0] * len(tenants)
    left, open_weight = 1.0, math.fsum(tenant.weight for tenant in tenants)
    total_weight = open_weight
    # By demand for each unit of weight. All tenants after the first that gets less than it needs get less, too.
    for index in sorted(range(len(tenants)), key=lambda index: tenants[index].demand / tenants[index].weight):
        weight, needed = tenants[index]
        given[index] = min(needed, left * weight / open_weight)
        left, open_weight = max(0.0, left - given[index]), open_weight - weight
    return [
        _FLOOR * each.weight / total_weight + (1 - _FLOOR) * (part + left * each.weight / total_weight)
        for part, each in zip(given, tenants, strict=True)
    ]


class LearnedRemaining:
    """Predicts the work that programs have left: the mean of those of the same tenant and name at the same work.

    A name of which fewer than three programs have ended counts as all programs together. A name is estimated again
    after at most eight ends.
    """

    def __init__(self) -> None:
        self._table = ServiceTable()
        self._all = ServiceClass()
        self._ages: tuple[float, ...] = ()
        self._due: dict[ServiceClass, None] = {}  # classes to estimate again

    def ended(self, program: ProgramView, done_tokens: float) -> None:
        """A program has ended after so much work, in output tokens."""
        if done_tokens <= 0:
            return
        for each in (self._all, self._table.get(program.tenant, program.name)):
            each.end(done_tokens)
            if each.ended >= _LEAST_ENDED and (not each.remaining or each.new_ends >= _REFIT_ENDS):
                self._due[each] = None

    def refresh(self) -> None:
        """An epoch begins. Take one name whose programs have ended into account, in well under a millisecond."""
        if not self._due:
            return
        from weft.core.policies.service.distribution import AGES, estimate

        each = next(iter(self._due))
        del self._due[each]
        each.new_ends = 0
        self._ages = tuple(map(float, AGES))
        distribution = estimate(each.finished, ())
        each.remaining = tuple(map(float, distribution.mean_remaining())) if distribution is not None else ()

    def remaining_tokens(self, program: ProgramView, done_tokens: float) -> float:
        """The expected work that a program has left after so much work, in output tokens; nan if nothing is known."""
        remaining = self._table.get(program.tenant, program.name).remaining or self._all.remaining
        return remaining[max(0, bisect_right(self._ages, done_tokens) - 1)] if remaining else math.nan
