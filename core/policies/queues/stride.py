"""Stride scheduling of tenants: whose call goes next (Waldspurger and Weihl 1995, with tags as in start-time fair
queueing).

Each tenant has a virtual time, which grows by the work of its calls divided by its share. The tenant with the least
goes next. A call's work is known when it has left, so an estimate counts from its start on. A tenant that asked for
less than its share has credit for a few calls, so that one of short programs need not wait its turn for each call.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from weft.core.policies.queues.waiting import RankHeap, WaitingCalls
from weft.core.policies.view import Call, ProgramView, Rank

MOST_IDLE: Final = 4096  # tenants without a program that are remembered
_PRIOR_TOKENS: Final = 256.0  # of a call, before any has left
CREDIT_CALLS: Final = 4  # of its share that a tenant may keep for later, at most
_WINDOW: Final = 128  # calls that the mean follows


class Reserved(NamedTuple):
    """What a call that has started counts for until it leaves."""

    passed: float  # by which its tenant's virtual time grew
    done_tokens: float  # its work before it started


@dataclass(eq=False, slots=True)
class TenantQueue:
    """A tenant: its calls that wait, and what it has been served."""

    name: str
    number: int  # in the order of arrival
    waiting: WaitingCalls
    weight: float = 1.0
    share: float = 1.0  # its weight, until an epoch gives it more or less
    passed: float = 0.0  # its virtual time
    reserved: float = 0.0  # of it, what its running calls are expected to take
    calls: dict[Call, None] = field(default_factory=dict)  # that wait or run
    running: dict[Call, None] = field(default_factory=dict)
    programs: dict[ProgramView, None] = field(default_factory=dict)  # that have not ended
    served_at_s: float = -math.inf  # when a call of it last started, or when it began to wait
    is_owed: bool = False  # it has been kept waiting for so long that it may preempt
    work_tokens: float = 0.0  # of its latest calls that left
    left: float = 0.0  # and how many they are

    @property
    def rank(self) -> Rank:
        return Rank(0, self.passed, self.number)

    @property
    def mean_tokens(self) -> float:
        """The expected work of a call."""
        return (self.work_tokens + _PRIOR_TOKENS) / (self.left + 1)


class ByTenant(WaitingCalls):
    """The waiting calls: the tenant with the least virtual time first, and of a tenant in the order of its own queue.

    Args:
        make: Makes the queue of a tenant.
        weight_of: The weight of a tenant.
        work_of: The work of a call so far, in tokens.
    """

    def __init__(
        self,
        make: Callable[[], WaitingCalls],
        weight_of: Callable[[str], float],
        work_of: Callable[[Call], float],
    ) -> None:
        super().__init__()
        self.tenants: dict[str, TenantQueue] = {}
        self._make, self._weight_of, self._work_of = make, weight_of, work_of
        self._ready: RankHeap[TenantQueue] = RankHeap()  # those with waiting calls
        self._reserved: dict[Call, Reserved] = {}
        self.entered: dict[Call, TenantQueue] = {}  # a program's tenant may be named after its first call
        self._of_program: dict[ProgramView, TenantQueue] = {}
        self._count = 0
        self._numbers = itertools.count()
        self.changes = 0  # counts what may change who may displace whom
        self._virtual = 0.0  # what the tenants have passed whose calls start, without calls that run; never falls

    def of(self, call: Call) -> TenantQueue:
        """The tenant of a call that has entered and not left."""
        return self.entered[call]

    def _tenant(self, name: str) -> TenantQueue:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantQueue(name, next(self._numbers), self._make(), self._weight_of(name))
            found.share = found.weight
            found.passed = self._with_credit(found)
        return found

    def _with_credit(self, tenant: TenantQueue) -> float:
        """The virtual time of a tenant that had kept all the credit that it may."""
        return self._virtual - CREDIT_CALLS * tenant.mean_tokens / tenant.share

    def has_credit(self, tenant: TenantQueue) -> bool:
        """Whether a tenant will have had less than its share also after a further call."""
        return tenant.passed + tenant.mean_tokens / tenant.share <= self._virtual

    # -- calls come and go

    def enter(self, call: Call, now_s: float) -> None:
        """A call arrives. A tenant that had none keeps little credit for the time in which it asked for nothing."""
        if call in self.entered:  # the next input of a streaming session
            self.settle(call)
            return
        tenant = self._of_program.get(call.program) or self._tenant(call.program.tenant or "")
        self.entered[call] = self._of_program[call.program] = tenant
        if not tenant.calls:
            self._move(tenant, max(tenant.passed, self._with_credit(tenant)))
        if not tenant.waiting:
            tenant.served_at_s = now_s
        tenant.calls[call] = tenant.programs[call.program] = None

    def reserve(self, call: Call) -> None:
        """A call starts: count what a call of its tenant takes on average."""
        if call in self._reserved:
            return
        tenant = self.of(call)
        self._virtual = max(self._virtual, tenant.passed - tenant.reserved)
        passed = tenant.mean_tokens / tenant.share
        tenant.reserved += passed
        self._reserved[call] = Reserved(passed, self._work_of(call))
        self._move(tenant, tenant.passed + passed)

    def settle(self, call: Call) -> None:
        """A call leaves the batch: count what it has done instead of the estimate."""
        reserved = self._release(call)
        if reserved is not None:
            tenant = self.of(call)
            self._move(tenant, tenant.passed + (self._work_of(call) - reserved.done_tokens) / tenant.share)

    def _release(self, call: Call) -> Reserved | None:
        reserved = self._reserved.pop(call, None)
        if reserved is not None:
            tenant = self.of(call)
            tenant.reserved -= reserved.passed
            self._move(tenant, tenant.passed - reserved.passed)
        return reserved

    def without(self, call: Call) -> float:
        """The virtual time of a running call's tenant as if the call had not started. What it has done is not known in
        each step."""
        reserved = self._reserved.get(call)
        return self.of(call).passed - (reserved.passed if reserved is not None else 0.0)

    def exit(self, call: Call) -> None:
        """A call leaves the engine."""
        if call not in self.entered:
            return
        self.settle(call)
        tenant = self.entered.pop(call)
        tenant.running.pop(call, None)
        del tenant.calls[call]
        tenant.work_tokens += self._work_of(call)
        tenant.left += 1
        if tenant.left >= _WINDOW:
            tenant.work_tokens, tenant.left = tenant.work_tokens / 2, tenant.left / 2

    def end(self, program: ProgramView) -> None:
        """A program has ended. Calls of it may still be here."""
        tenant = self._of_program.pop(program, None)
        if tenant is not None:
            del tenant.programs[program]

    def forget(self) -> None:
        """Forget tenants that have nothing here and would return with all credit, and of very many the oldest."""
        idle = [each for each in self.tenants.values() if not (each.calls or each.programs)]
        for number, tenant in enumerate(idle):
            if tenant.passed <= self._with_credit(tenant) or len(idle) - number > MOST_IDLE:
                del self.tenants[tenant.name]

    def _move(self, tenant: TenantQueue, passed: float) -> None:
        tenant.passed = passed
        self.changes += 1
        self._ready.update(tenant)

    # -- the queue

    def push(self, member: Call) -> None:
        tenant = self.of(member)
        self._follow_clock(tenant)
        tenant.waiting.push(member)
        self._count += 1
        self.changes += 1
        if tenant not in self._ready:
            self._ready.push(tenant)
        self._release(member)  # if it was taken out and did not start

    def update(self, member: Call) -> None:
        if member in self:
            self.of(member).waiting.update(member)
            self.changes += 1

    def discard(self, member: Call) -> None:
        if member not in self:
            return
        tenant = self.of(member)
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
        """In the order in which the calls would start, if all could."""
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
