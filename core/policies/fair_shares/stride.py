"""Stride scheduling of tenants: whose call goes next (Waldspurger and Weihl 1995, with tags as in start-time fair
queueing).

Each tenant has a virtual time, which grows by the work of its calls divided by its share. The tenant with the least
virtual time goes next. The work of a call is known when the call has left, so from its start until then an estimate
counts. A tenant that has asked for less than its share keeps credit for a few calls. A tenant with short programs then
need not wait for its turn with each call.

Several engines that serve the same tenants exchange what each tenant had, so that the order on each of them follows
what tenants had on all (`ByTenant.exchange`, `OverEngines`). docs/results/fair-share.md has a bound and its proof.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from weft.core.ids import EngineId
from weft.core.policies.queues import RankQueue, WaitingCalls
from weft.core.policies.view import Call, ProgramView, Rank

MOST_IDLE: Final = 4096  # tenants without a program that are remembered
_PRIOR_TOKENS: Final = 256.0  # the work of a call that counts as one more in the mean
CREDIT_CALLS: Final = 4  # mean calls for which a tenant may keep credit
MOST_AHEAD_CALLS: Final = 256  # mean calls for which a tenant waits, at most, because of what it had on other engines
_WINDOW: Final = 128  # the number of calls at which the sums of the mean are halved


class Reserved(NamedTuple):
    """The estimate that counts for a call from its start until it leaves."""

    tokens: float
    virtual_time: float  # by which the tenant's virtual time has grown
    done_tokens: float  # its work before it started


@dataclass(eq=False, slots=True)
class TenantQueue:
    """A tenant: its calls that wait, and what it has been served."""

    name: str
    number: int  # in the order of arrival
    waiting: WaitingCalls
    weight: float = 1.0
    share: float = 1.0  # its weight, until an epoch gives it more or less
    virtual_time: float = 0.0  # the work that it has had, divided by its share
    reserved_time: float = 0.0  # the part of its virtual time that is an estimate, for its running calls
    calls: dict[Call, None] = field(default_factory=dict)  # calls that wait or run
    running: dict[Call, None] = field(default_factory=dict)
    programs: dict[ProgramView, None] = field(default_factory=dict)  # programs that have not ended
    served_at_s: float = -math.inf  # when one of its calls last started, or when it began to wait
    is_overdue: bool = False  # it has waited for so long that it may preempt
    work_tokens: float = 0.0  # sum over its latest calls that have left
    left_calls: float = 0.0  # the number of these calls
    untold_tokens: float = 0.0  # its work since the last exchange, with the same estimates as its virtual time

    @property
    def rank(self) -> Rank:
        return Rank(0, self.virtual_time, self.number)

    @property
    def mean_tokens(self) -> float:
        """The expected work of a call."""
        return (self.work_tokens + _PRIOR_TOKENS) / (self.left_calls + 1)


class ByTenant(WaitingCalls):
    """The waiting calls: the tenant with the least virtual time first, and its calls in the order of its own queue.

    Args:
        work_of: Returns the work of a call so far, in output tokens.

    Attributes:
        entered: The tenant of each call that waits or runs. It may differ from the call's own, because a program's
            tenant is that of its first call.
        changes: Counts everything that may change who may displace whom.
    """

    def __init__(
        self, make: Callable[[], WaitingCalls], weight_of: Callable[[str], float], work_of: Callable[[Call], float]
    ) -> None:
        super().__init__()
        self.tenants: dict[str, TenantQueue] = {}
        self._make, self._weight_of, self._work_of = make, weight_of, work_of
        self._ready: RankQueue[TenantQueue] = RankQueue()  # tenants with waiting calls
        self._reserved: dict[Call, Reserved] = {}
        self.entered: dict[Call, TenantQueue] = {}
        self._tenant_of_program: dict[ProgramView, TenantQueue] = {}
        self._count = 0
        self._numbers = itertools.count()
        self.changes = 0
        self._system_time = 0.0  # the greatest virtual time, without estimates, of a tenant whose call has started

    def tenant_of(self, call: Call) -> TenantQueue:
        """The tenant of a call that has entered and not left."""
        return self.entered[call]

    def _get_tenant(self, name: str) -> TenantQueue:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantQueue(name, next(self._numbers), self._make(), self._weight_of(name))
            found.share = found.weight
            found.virtual_time = self._full_credit_time(found)
        return found

    def _full_credit_time(self, tenant: TenantQueue) -> float:
        """The least virtual time that a tenant may have: it then has all the credit that it may keep."""
        return self._system_time - CREDIT_CALLS * tenant.mean_tokens / tenant.share

    def has_credit(self, tenant: TenantQueue) -> bool:
        """Whether a tenant will still have had less than its share after one more call."""
        return tenant.virtual_time + tenant.mean_tokens / tenant.share <= self._system_time

    # -- calls come and go

    def enter(self, call: Call, now_s: float) -> None:
        """A call arrives."""
        if call in self.entered:  # the next input of a streaming session
            self.settle(call)
            return
        tenant = self._tenant_of_program.get(call.program) or self._get_tenant(call.program.tenant or "")
        self.entered[call] = self._tenant_of_program[call.program] = tenant
        if not tenant.waiting:
            tenant.served_at_s = now_s
        tenant.calls[call] = tenant.programs[call.program] = None

    def reserve(self, call: Call) -> None:
        """A call starts. Count the mean work of its tenant's calls as an estimate."""
        if call in self._reserved:
            return
        tenant = self.tenant_of(call)
        self._system_time = max(self._system_time, tenant.virtual_time - tenant.reserved_time)
        tokens, estimate = tenant.mean_tokens, tenant.mean_tokens / tenant.share
        tenant.reserved_time += estimate
        self._reserved[call] = Reserved(tokens, estimate, self._work_of(call))
        self._charge(tenant, tokens, estimate)

    def settle(self, call: Call) -> None:
        """A call leaves the batch. Count what it has done instead of the estimate."""
        reserved = self._release(call)
        if reserved is not None:
            tenant, tokens = self.tenant_of(call), self._work_of(call) - reserved.done_tokens
            self._charge(tenant, tokens, tokens / tenant.share)

    def _release(self, call: Call) -> Reserved | None:
        reserved = self._reserved.pop(call, None)
        if reserved is not None:
            tenant = self.tenant_of(call)
            tenant.reserved_time -= reserved.virtual_time
            self._charge(tenant, -reserved.tokens, -reserved.virtual_time)
        return reserved

    def _charge(self, tenant: TenantQueue, tokens: float, virtual_time: float) -> None:
        tenant.untold_tokens += tokens
        self._set_virtual_time(tenant, tenant.virtual_time + virtual_time)

    def virtual_time_without(self, call: Call) -> float:
        """The virtual time of a running call's tenant as if the call had not started.

        It leaves the call's estimate out, because what the call has really done is not known in each step.
        """
        reserved = self._reserved.get(call)
        return self.tenant_of(call).virtual_time - (reserved.virtual_time if reserved is not None else 0.0)

    def exit(self, call: Call) -> None:
        """A call leaves the engine."""
        if call not in self.entered:
            return
        self.settle(call)
        tenant = self.entered.pop(call)
        tenant.running.pop(call, None)
        del tenant.calls[call]
        tenant.work_tokens += self._work_of(call)
        tenant.left_calls += 1
        if tenant.left_calls >= _WINDOW:
            tenant.work_tokens, tenant.left_calls = tenant.work_tokens / 2, tenant.left_calls / 2

    def end(self, program: ProgramView) -> None:
        """A program has ended. It may still have calls here, which are being aborted."""
        tenant = self._tenant_of_program.pop(program, None)
        if tenant is not None:
            del tenant.programs[program]

    def forget_idle(self) -> None:
        """Forget idle tenants that would return with full credit, and the oldest of very many idle tenants."""
        idle = [each for each in self.tenants.values() if not (each.calls or each.programs)]
        for number, tenant in enumerate(idle):
            if tenant.virtual_time <= self._full_credit_time(tenant) or len(idle) - number > MOST_IDLE:
                del self.tenants[tenant.name]

    def exchange(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        """Hear what tenants had on other engines since the last exchange, and tell what they had here, in tokens.

        Only a tenant with calls here is charged: an absent one has no credit but the usual when it comes. Nobody is
        charged so much that it would wait until the others have had more than `MOST_AHEAD_CALLS` of its calls.
        """
        present = [tenant for tenant in self.tenants.values() if tenant.calls]
        charged = {each: each.virtual_time + elsewhere.get(each.name, 0.0) / each.share for each in present}
        least = min((time - tenant.reserved_time for tenant, time in charged.items()), default=-math.inf)
        self._system_time = max(self._system_time, least)
        for tenant, time in charged.items():
            most = self._system_time + MOST_AHEAD_CALLS * tenant.mean_tokens / tenant.share
            self._set_virtual_time(tenant, max(min(time, most), min(time, tenant.virtual_time)))
        told = {tenant.name: tenant.untold_tokens for tenant in self.tenants.values() if tenant.untold_tokens}
        for name in told:
            self.tenants[name].untold_tokens = 0.0
        return told

    def _set_virtual_time(self, tenant: TenantQueue, virtual_time: float) -> None:
        tenant.virtual_time = virtual_time
        self.changes += 1
        self._ready.update(tenant)

    # -- the queue

    def push(self, member: Call) -> None:
        tenant = self.tenant_of(member)
        self._release(member)  # `pop` may have taken it out without its start
        if not tenant.waiting:  # it has asked for nothing lately, so its credit is limited
            self._set_virtual_time(tenant, max(tenant.virtual_time, self._full_credit_time(tenant)))
        self._follow_clock(tenant)
        tenant.waiting.push(member)
        self._count += 1
        self.changes += 1
        if tenant not in self._ready:
            self._ready.push(tenant)

    def update(self, member: Call) -> None:
        if member in self:
            self.tenant_of(member).waiting.update(member)
            self.changes += 1

    def discard(self, member: Call) -> None:
        if member not in self:
            return
        tenant = self.tenant_of(member)
        tenant.waiting.discard(member)
        self._count -= 1
        self.changes += 1
        if not tenant.waiting:
            self._ready.discard(tenant)

    def peek(self) -> Call:
        tenant = self._ready.peek()
        self._follow_clock(tenant)
        return tenant.waiting.peek()

    def pop(self) -> Call:
        member = self.peek()
        self.discard(member)
        self.reserve(member)
        return member

    def heads(self) -> Iterator[Call]:
        """The first call of each tenant that has one."""
        for tenant in self._ready:
            self._follow_clock(tenant)
            yield tenant.waiting.peek()

    def _follow_clock(self, tenant: TenantQueue) -> None:
        tenant.waiting.now_s = self.now_s

    def check_integrity(self) -> None:
        self._ready.check_integrity()
        for tenant in self.tenants.values():
            tenant.waiting.check_integrity()
            if (tenant in self._ready) != (len(tenant.waiting) > 0):
                raise AssertionError(f"tenant {tenant.name!r} is misplaced")
        counted = sum(len(tenant.waiting) for tenant in self.tenants.values())
        if counted != self._count:
            raise AssertionError(f"{self._count} calls wait, and {counted} are in tenants' queues")

    def __contains__(self, member: object) -> bool:
        tenant = self.entered.get(member) if isinstance(member, Call) else None
        return tenant is not None and member in tenant.waiting

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Call]:
        """Iterate in the order in which the calls would start if all of them could."""
        turns: list[tuple[Rank, TenantQueue, Iterator[Call]]] = []
        in_order = iter(self._ready)
        later_one = next(in_order, None)
        while turns or later_one is not None:
            while later_one is not None and (not turns or later_one.rank < turns[0][0]):
                self._follow_clock(later_one)
                heapq.heappush(turns, (later_one.rank, later_one, iter(later_one.waiting)))
                later_one = next(in_order, None)
            rank, tenant, calls = turns[0]
            call = next(calls, None)
            if call is None:
                heapq.heappop(turns)
                continue
            yield call
            later = rank._replace(order=rank.order + tenant.mean_tokens / tenant.share)
            heapq.heapreplace(turns, (later, tenant, calls))


class OverEngines:
    """Sums the work of tenants over several engines, and tells each engine what the others did since it last heard."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}  # by tenant, in tokens
        self._heard: dict[EngineId, dict[str, float]] = {}  # the part of it that an engine did or was told
        self._new: set[EngineId] = set()  # engines that have not told anything since they take part

    def keep(self, engine_ids: Collection[EngineId]) -> None:
        """These engines take part. For one that joins, what was before does not count, here and there."""
        self._new = {each for each in engine_ids if each in self._new or each not in self._heard}
        self._heard = {each: self._heard.get(each, self._total).copy() for each in engine_ids}
        for name, total in list(self._total.items()):
            if all(each.get(name) == total for each in self._heard.values()):  # nobody needs it any more
                for sums in (self._total, *self._heard.values()):
                    del sums[name]

    def take(self, engine_id: EngineId) -> dict[str, float]:
        """What tenants had on the others since the last time. Tell the engine."""
        heard = self._heard[engine_id]
        self._heard[engine_id] = self._total.copy()
        return {name: total - heard.get(name, 0.0) for name, total in self._total.items() if total != heard.get(name)}

    def add(self, engine_id: EngineId, served: Mapping[str, float]) -> None:
        """What tenants had on an engine since it told last."""
        if engine_id in self._new:
            self._new.remove(engine_id)
            return
        for sums in (self._total, self._heard.get(engine_id, {})):
            for name, tokens in served.items():
                sums[name] = sums.get(name, 0.0) + tokens
