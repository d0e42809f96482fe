"""Fair shares of tenants over any policy: Agent Fair Share of SAGA (§6), by stride scheduling.

docs/reference/policies.md#fair-shares says how Weft reads the paper where it leaves something open, or would give a
tenant more because it sends more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from weft.core.errors import PolicyError
from weft.core.policies.config import DEFAULT_POLICY
from weft.core.policies.fair_shares.stride import ByTenant, TenantQueue
from weft.core.policies.policy import Policy, PolicyAround, PolicyEvent, register, registration
from weft.core.policies.service.classes import ServiceClass, ServiceTable
from weft.core.policies.steps import StepCosts
from weft.core.policies.view import Call, ProgramEnded, ProgramView, Rank
from weft.core.registries import check_number

EPOCH_S: Final = 0.1  # shares are computed again so often
PATIENCE_S: Final = 0.5  # a tenant whose calls have waited this long may preempt
_MOST_TASKS: Final = 32  # programs of a tenant whose demand counts: those that arrived first, as there may be many


@dataclass(eq=False, slots=True)
class _Progress:
    """What is known of a program that has not ended."""

    done_tokens: float = 0.0  # the work that it has had
    calls: int = 0  # calls that wait or run
    away_s: float = 0.0  # the time without a call, in tools or with humans
    away_since_s: float = math.nan  # when its last call left


@dataclass(frozen=True, slots=True)
class FairParameters:
    """The parameters of fair shares.

    Args:
        inner: The name of the policy that orders the calls of a tenant. It has its default parameters. `fair` has the
            gate if this policy has it.
        weights: The weights of tenants, as (tenant, weight) pairs or a mapping. Others have weight 1.
        slo: A program without a deadline should end within this multiple of the time that it takes alone.

    Raises:
        PolicyError: The inner policy is unknown, is for simulation only or is this one, or a number makes no sense.
    """

    inner: str = DEFAULT_POLICY
    weights: tuple[tuple[str, float], ...] = ()
    slo: float = 1.5

    def __post_init__(self) -> None:
        if self.inner == "fair" or registration(self.inner).simulation_only:
            raise PolicyError(f"inner must be a policy that an engine can run, other than fair, not {self.inner!r}.")
        given: Any = self.weights
        pairs = list(given.items()) if isinstance(given, Mapping) else given
        if not isinstance(pairs, Sequence) or isinstance(pairs, str):
            raise PolicyError(f"weights must give each tenant's weight, not {given!r:.60}.")
        checked = []
        for pair in pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
                raise PolicyError(f"each of weights must be a tenant and its weight, not {pair!r:.60}.")
            if not 1e-6 <= check_number(pair[1], "each of weights", PolicyError) <= 1e6:
                raise PolicyError(f"the weight of tenant {pair[0]!r:.40} must be 0.000001 to 1000000, not {pair[1]}.")
            checked.append((pair[0], pair[1]))
        object.__setattr__(self, "weights", tuple(checked))
        if not 1 <= check_number(self.slo, "slo", PolicyError) < math.inf:
            raise PolicyError(f"slo must be a multiple of the time alone, 1 or more, not {self.slo}.")


@register("fair", "fair shares of tenants by weight and deadlines, over another policy", FairParameters)
class Fair(PolicyAround):
    """Serves the tenant that has used its share least, and of that tenant the call that the inner policy ranks first.

    With one tenant it behaves as the inner policy.
    """

    has_shares = True

    def __init__(self, inner: Policy, weights: Mapping[str, float], slo: float) -> None:
        super().__init__(inner)
        self.costs = StepCosts()
        self._slo = slo
        self._remaining = LearnedRemaining()
        make: Callable[[], Any] = type(inner.waiting)
        self.queue = ByTenant(make, lambda tenant: weights.get(tenant, 1.0), self._work)
        self.waiting = inner.waiting = self.queue
        self._programs: dict[ProgramView, _Progress] = {}
        self._now_s = -math.inf  # the latest time that the driver has reported
        self._next_epoch_s = -math.inf
        self._best_head_at = -1, Rank(0, 0.0)
        self._may_displace_at: tuple[int, TenantQueue | None, bool] = (-1, None, False)

    @classmethod
    def from_parameters(cls, parameters: Any) -> Self:
        found = registration(parameters.inner)
        return cls(found.kind.from_parameters(found.parameters()), dict(parameters.weights), parameters.slo)

    @classmethod
    def is_gated(cls, parameters: Any) -> bool:
        inner = registration(parameters.inner)
        return inner.kind.is_gated(inner.parameters())

    @property
    def preempts(self) -> bool:  # type: ignore[override]
        return self.inner.preempts or self._has_several_tenants

    @property
    def _has_several_tenants(self) -> bool:
        return len(self.queue.tenants) > 1

    def _work(self, call: Call) -> float:
        """The work of a call so far, in output tokens."""
        return call.output_tokens + self.costs.prompt_weight * call.computed_tokens

    # -- what happens

    def arrive(self, call: Call, now_s: float) -> None:
        if call not in self.queue.entered:
            program = self._programs.setdefault(call.program, _Progress())
            if program.calls == 0 and not math.isnan(program.away_since_s):
                program.away_s += max(0.0, now_s - program.away_since_s)
            program.calls += 1
        self.queue.enter(call, now_s)
        self.inner.arrive(call, now_s)

    def start(self, call: Call, now_s: float) -> None:
        self.inner.start(call, now_s)
        self.queue.reserve(call)
        tenant = self.queue.tenant_of(call)
        tenant.running[call] = None
        self.queue.changes += 1
        tenant.served_at_s, tenant.is_overdue = now_s, False

    def charge(self, call: Call, model_time_s: float, now_s: float, *, recomputed: bool = False) -> None:
        self._now_s = now_s
        self.inner.charge(call, model_time_s, now_s, recomputed=recomputed)

    def preempt(self, call: Call, now_s: float) -> None:
        self.queue.settle(call)
        self.queue.tenant_of(call).running.pop(call, None)
        self.queue.changes += 1
        self.inner.preempt(call, now_s)

    def leave(self, call: Call) -> None:
        self.inner.leave(call)
        has_entered = call in self.queue.entered
        self.queue.exit(call)
        program = self._programs.get(call.program)
        if program is None or not has_entered:  # the program has ended before
            return
        program.done_tokens += self._work(call)
        program.calls -= 1
        if program.calls == 0:
            program.away_since_s = self._now_s

    def on_event(self, event: PolicyEvent) -> None:
        self.inner.on_event(event)
        match event:
            case StepCosts():
                self.costs = event
            case ProgramEnded(program, is_known):
                progress = self._programs.pop(program, None)
                if progress is not None and is_known:
                    self._remaining.ended(program, progress.done_tokens)
                if progress is not None:
                    self.queue.end(program)

    # -- what goes next

    def decide(self, now_s: float) -> list[Call]:
        self._now_s = now_s
        changed = self.inner.decide(now_s)
        if self._has_several_tenants and now_s >= self._next_epoch_s:
            self._next_epoch_s = now_s + EPOCH_S
            self.queue.forget_idle()
            self.set_shares(now_s)
        return changed

    def exchange(self, elsewhere: Mapping[str, float]) -> Mapping[str, float]:
        return self.queue.exchange(elsewhere)

    def set_shares(self, now_s: float) -> None:
        """An epoch begins: divide the engine among the tenants that have programs, by what they need now."""
        self._remaining.refresh()
        tenants = [tenant for tenant in self.queue.tenants.values() if tenant.programs or tenant.calls]
        oldest = [itertools.islice(tenant.programs, _MOST_TASKS) for tenant in tenants]
        needs = [
            Tenant(each.weight, demand(map(self._task, programs), now_s))
            for each, programs in zip(tenants, oldest, strict=True)
        ]
        self.queue.changes += 1
        weights = math.fsum(tenant.weight for tenant in tenants)  # shares of new tenants are their weights
        for tenant, share in zip(tenants, shares(needs), strict=True):
            tenant.share = max(share * weights, tenant.weight)  # a tenant with a small demand is not charged more
            tenant.is_overdue = len(tenant.waiting) > 0 and now_s >= tenant.served_at_s + PATIENCE_S

    def _task(self, program: ProgramView) -> Task:
        progress = self._programs[program]
        left = self._remaining.remaining_tokens(program, progress.done_tokens)
        served_s = self._remaining.remaining_tokens(program, 0.0) * (self.costs.fixed_s + self.costs.decode_token_s)
        alone_s = served_s + progress.away_s
        deadline_s = min(program.deadline_s, program.arrival_s + self._slo * alone_s)
        return Task(left * self.costs.token_s, deadline_s, alone_s)

    def next_change_s(self) -> float:
        return min(self.inner.next_change_s(), self._next_epoch_s if self._has_several_tenants else math.inf)

    def is_settled(self, worst: Rank) -> bool:
        if not self._has_several_tenants:
            return self.inner.is_settled(worst)
        if self._may_next_displace():
            return False
        return len(self.queue) == 0 or self._best_head() >= worst

    def _best_head(self) -> Rank:
        """The best inner rank among the first calls of the tenants. It is kept, because most steps do not change it."""
        changes, best = self._best_head_at
        if changes != self.queue.changes or self.order_follows_clock:
            best = min(call.rank for call in self.queue.heads())
            self._best_head_at = self.queue.changes, best
        return best

    def _may_next_displace(self) -> bool:
        """Whether the next call may take the place of a call of another tenant."""
        if len(self.queue) == 0:
            return False
        return self._may_displace(self.queue.tenant_of(self.queue.peek()))

    def _may_displace(self, tenant: TenantQueue) -> bool:
        """Whether a tenant's call may take the place of another tenant's. Kept, because most steps do not change it."""
        changes, asked, answer = self._may_displace_at
        if changes != self.queue.changes or asked is not tenant:
            running = (call for each in self.queue.tenants.values() for call in each.running)
            answer = self._displaced(tenant, running) is not None
            self._may_displace_at = self.queue.changes, tenant, answer
        return answer

    def _displaced(self, ours: TenantQueue, running: Iterable[Call]) -> Call | None:
        """The call that a tenant displaces if it has credit, or has waited too long; None if there is no such call."""
        if not (ours.is_overdue or self.queue.has_credit(ours)):
            return None
        others = [call for call in running if self.queue.tenant_of(call) is not ours]
        if not others:
            return None
        worst = max(others, key=lambda call: (self.queue.tenant_of(call).virtual_time, call.rank))
        after = ours.virtual_time + ours.mean_tokens / ours.share
        return worst if after <= self.queue.virtual_time_without(worst) else None

    def outranks(self, call: Call, running: Call) -> bool:
        if not self._has_several_tenants:
            return self.inner.outranks(call, running)
        tenant = self.queue.tenant_of(call)
        if self._may_displace(tenant):
            return True
        return self.inner.preempts and any(self.inner.outranks(call, own) for own in tenant.running)

    victims = Policy.victims  # by the rule below, and not by that of the inner policy

    def victim_of(self, candidate: Call, left: dict[Call, None]) -> Call | None:
        """The call of the same tenant that the inner policy chooses, or else one of another tenant.

        A call of another tenant is displaced if the candidate's tenant has credit or has waited for `PATIENCE_S`, and
        would still have had less than the other tenant.
        """
        if not self._has_several_tenants:
            return self.inner.victim_of(candidate, left)
        ours = self.queue.tenant_of(candidate)
        if self.inner.preempts:
            own = next((call for call in reversed(list(left)) if self.queue.tenant_of(call) is ours), None)
            if own is not None and self.inner.outranks(candidate, own):
                return own
        return self._displaced(ours, left)


# -- what each tenant needs to meet its deadlines, and what it gets (SAGA §6, eqs. 8-9)
#
# The paper divides capacity in proportion to each tenant's sum of remaining work over time left. That rewards a tenant
# for sending more, and a task whose deadline has passed takes everything. Here the time left has a lower bound, and no
# tenant gets more than its weight's part while others need theirs.


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
