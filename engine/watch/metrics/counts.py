"""Sums over calls and programs since the counting began, by name and by tenant.

None of them falls. That of a name that others push out of the metrics ends: see `ByName`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from weft.core.accounts import Account
from weft.core.errors import WeftError
from weft.core.ids import ProgramId
from weft.core.locks import fork_safe
from weft.core.process_rows import CallIdentity, CallRow, ProgramInfo, ProgramRow, ProgramState, RunningTool
from weft.core.program.graph import CallState, ProgramGraph
from weft.core.program.observer import ProgramObserver
from weft.core.routing.admission import Refused
from weft.engine.watch.metrics.names import ALL, OTHER, ByName, Shown

# Calls take milliseconds to minutes, programs up to days.
BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)


class Histogram:
    """Counts how many durations fall between each two bounds.

    Attributes:
        counts: For each bound, the durations up to it that exceed the bound before. The last count has no upper bound.
        sum_s: The sum of all durations, in seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, time_s: float) -> None:
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
    service: Histogram = field(default_factory=Histogram)  # of those with an answer


@dataclass(slots=True)
class TenantCounts:
    """The sums over the calls of one tenant's programs."""

    service_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class _Known:
    """A program that has not ended, or whose calls have not all left."""

    name: str
    tenant: str
    calls: int = 0  # in flight
    has_ended: bool = False


class ProgramCounts(ProgramObserver):
    """Counts what happens to programs. Any thread may use it.

    Attributes:
        tools: How long the runs of each tool took.
        refusals: How many calls were not admitted, by the class of the error.
        requests_refused: How many requests a server refused, by tenant and reason. Those without a tenant are under "".
    """

    def __init__(self, shown: Shown = ALL) -> None:
        names = None if shown.names else ()
        self.names = ByName(NameCounts, names)
        self.tenants = ByName(TenantCounts, shown.tenants)
        self.tools = ByName(Histogram, names)
        self.refusals: Counter[str] = Counter()
        self.requests_refused: ByName[Counter[Refused]] = ByName(Counter, shown.tenants)
        self._lock = fork_safe(threading.Lock())
        self._programs: dict[ProgramId, _Known] = {}

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nothing is counted inside the block."""
        with self._lock:
            yield

    def program_started(self, info: ProgramInfo, now_s: float) -> None:
        with self._lock:
            known = _Known(info.name, info.tenant or "")
            self.names.use(known.name)
            self.tenants.use(known.tenant)
            self._programs.setdefault(info.program_id, known)

    def call_arrived(self, identity: CallIdentity, graph: ProgramGraph, now_s: float) -> None:
        with self._lock:
            known = self._programs.get(identity.program_id)
            if known is not None:
                known.calls += 1

    def call_refused(self, identity: CallIdentity, error: BaseException, now_s: float) -> None:
        with self._lock:
            self.refusals[type(error).__name__ if isinstance(error, WeftError) else OTHER] += 1

    def request_refused(self, reason: Refused, tenant: str | None, now_s: float) -> None:
        with self._lock:
            self.requests_refused.use(tenant or "")[reason] += 1

    def call_left(self, row: CallRow, outcome: CallState, now_s: float) -> None:
        program_id, account = row.identity.program_id, row.account
        with self._lock:
            known = self._programs.get(program_id)
            if known is None:  # the program began before the counting
                return
            known.calls -= 1
            if known.has_ended and known.calls <= 0:
                del self._programs[program_id]
            name, tenant = self.names.of(known.name), self.tenants.of(known.tenant)
            name.calls[outcome] += 1
            name.account += account
            tenant.service_s += account.service_s
            tenant.wait_s += account.wait_s
            if outcome is CallState.FINISHED:
                name.wait.add(account.wait_s)
                name.service.add(account.service_s)

    def tool_ended(self, program_id: ProgramId, tool: RunningTool, now_s: float) -> None:
        with self._lock:
            self.tools.use(tool.name).add(now_s - tool.start_s)

    def program_ended(self, row: ProgramRow, state: ProgramState, now_s: float) -> None:
        program_id = row.info.program_id
        with self._lock:
            known = self._programs.get(program_id)
            if known is None:
                return
            known.has_ended = True
            if known.calls <= 0:
                del self._programs[program_id]
            name = self.names.of(known.name)
            name.ended[state] += 1
            name.took.add(now_s - row.start_s)
