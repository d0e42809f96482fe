"""Sums over calls and programs since the counting began, by name and by tenant. They never fall."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from weft.core.accounts import Account
from weft.core.errors import WeftError
from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.routing.refusals import Refused

MOST_NAMES: Final = 32  # of programs, tenants and tools that are told apart, those that came first
OTHER: Final = "other"  # what comes after them
MOST_LETTERS: Final = 100  # of a name
# Calls take milliseconds to minutes, programs up to days.
BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)


class Histogram:
    """How many times were how long.

    Attributes:
        counts: By bound, how many were at most so long and longer than the bound before. The last one has no bound.
        sum_s: All together, in seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, time_s: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS_S, time_s)] += 1
        self.sum_s += time_s


@dataclass(slots=True)
class NameCounts:
    """The sums over the programs of one name."""

    ended: Counter[ProgramState] = field(default_factory=Counter)
    took: Histogram = field(default_factory=Histogram)  # from start to end
    calls: Counter[CallState] = field(default_factory=Counter)  # by how they left
    account: Account = field(default_factory=Account)  # of all of them
    wait: Histogram = field(default_factory=Histogram)  # of those with an answer
    service: Histogram = field(default_factory=Histogram)  # likewise


@dataclass(slots=True)
class TenantCounts:
    """The sums over the calls of one tenant's programs."""

    service_s: float = 0.0
    wait_s: float = 0.0


T = TypeVar("T")


class ByName(dict[str, T], Generic[T]):
    """A value for each of the names that came first, and one for all others, whose number has no bound."""

    def __init__(self, make: type[T]) -> None:
        super().__init__()
        self._make = make

    def of(self, name: str) -> T:
        """The value of a name, or that of all others."""
        key = self.key(name)
        if key not in self:
            self[key] = self._make()
        return self[key]

    def key(self, name: str) -> str:
        """The name by which a name counts."""
        name = name[:MOST_LETTERS]
        return name if name in self or len(self) < MOST_NAMES else OTHER


@dataclass(slots=True)
class _Known:
    """A program that has not ended, or whose calls have not all left."""

    name: NameCounts
    tenant: TenantCounts
    calls: int = 0  # in flight
    has_ended: bool = False


class ProgramCounts(ProgramObserver):
    """Counts. May be used from any thread.

    Attributes:
        names: By program name.
        tenants: By tenant; "" for programs without one.
        tools: How long tools took, by name.
        refusals: Calls that were not admitted, by the error's class.
        requests_refused: Requests that a server refused, by tenant and reason; "" for those without a tenant.
    """

    def __init__(self) -> None:
        self.names = ByName(NameCounts)
        self.tenants = ByName(TenantCounts)
        self.tools = ByName(Histogram)
        self.refusals: Counter[str] = Counter()
        self.requests_refused: ByName[Counter[Refused]] = ByName(Counter)
        self._lock = fork_safe(threading.Lock())
        self._programs: dict[ProgramId, _Known] = {}

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is counted inside the block."""
        with self._lock:
            yield

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        del now_s
        with self._lock:
            known = _Known(self.names.of(info.name), self.tenants.of(info.tenant or ""))
            self._programs.setdefault(info.program_id, known)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        del graph, now_s
        with self._lock:
            known = self._programs.get(identity.program_id)
            if known is not None:
                known.calls += 1

    def call_refused(self, identity: CallIdentity, error: BaseException, now_s: float) -> None:
        del identity, now_s
        with self._lock:
            self.refusals[type(error).__name__ if isinstance(error, WeftError) else OTHER] += 1

    def request_refused(self, reason: Refused, tenant: str | None, now_s: float) -> None:
        del now_s
        with self._lock:
            self.requests_refused.of(tenant or "")[reason] += 1

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        del now_s
        program_id, account = row.identity.program_id, row.account
        with self._lock:
            known = self._programs.get(program_id)
            if known is None:  # the program began before the counting
                return
            known.calls -= 1
            if known.has_ended and known.calls <= 0:
                del self._programs[program_id]
            name, tenant = known.name, known.tenant
            name.calls[outcome] += 1
            name.account += account
            tenant.service_s += account.service_s
            tenant.wait_s += account.wait_s
            if outcome is CallState.FINISHED:
                name.wait.add(account.wait_s)
                name.service.add(account.service_s)

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        del program_id
        with self._lock:
            self.tools.of(tool.name).add(now_s - tool.start_s)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        program_id = row.info.program_id
        with self._lock:
            known = self._programs.get(program_id)
            if known is None:
                return
            known.has_ended = True
            if known.calls <= 0:
                del self._programs[program_id]
            known.name.ended[state] += 1
            known.name.took.add(now_s - row.start_s)
