"""What a program's graph is made of: calls with their parents, and what lies between and above them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId, ThreadId


class CallState(StrEnum):
    """The state of a call."""

    NAMED = "named"  # it has ids, but has not reached an engine
    RUNNING = "running"  # it waits or runs on an engine
    FINISHED = "finished"  # it has a result
    FAILED = "failed"  # the engine refused it, or failed on it
    CANCELLED = "cancelled"  # its caller or its program aborted it


class Edge(NamedTuple):
    """An edge of the DAG, from a parent to the call that holds the edge."""

    parent: CallId
    exact: bool  # False: a guess. The parent had ended, but the call may not depend on it


@dataclass(frozen=True, slots=True)
class CallNode:
    """A call. The graph replaces a node when the call changes, so a node that was read stays as it was."""

    call_id: CallId
    thread_id: ThreadId
    parents: tuple[Edge, ...] = ()  # the oldest first
    label: str = ""  # the name of the run or agent that made the call
    tools: tuple[str, ...] = ()  # the tools known to have run between the parents and the call
    state: CallState = CallState.NAMED
    arrival_s: float | None = None
    completion_s: float | None = None
    account: Account = field(default_factory=Account)
    folded_s: float = 0.0  # service of the longest chain of folded calls before the call
    engine_id: EngineId | None = None  # the engine that it was on when it left
    earlier_engine_ids: tuple[EngineId, ...] = ()  # those that it was on before: it was stolen, or they died

    @property
    def service_s(self) -> float:
        """Seconds on the model executor."""
        return self.account.service_s

    @property
    def caption(self) -> tuple[str, ...]:
        """The lines that a picture shows for the call: label, service, and the state unless it is finished."""
        lines = (self.label or "call", f"{self.service_s:.3f} s")
        return lines if self.state is CallState.FINISHED else (*lines, str(self.state))


class Interception(NamedTuple):
    """The time between calls: from the end of the last of a call's parents to the call's arrival."""

    after: CallId  # the parent that ended last
    before: CallId  # the call
    start_s: float
    end_s: float
    tools: tuple[str, ...]  # the tools that a framework has reported for this time; "human" for a human's answer

    @property
    def duration_s(self) -> float:
        """Seconds from `start_s` to `end_s`."""
        return self.end_s - self.start_s


class CriticalPath(NamedTuple):
    """The longest chain of calls by service."""

    service_s: float  # the sum over the calls
    calls: tuple[CallId, ...]  # from first to last, without folded calls


class FoldedCalls(NamedTuple):
    """The sums over the calls of a long program that are no longer in its graph."""

    calls: int = 0
    path_s: float = 0.0  # service of the longest chain of them
    account: Account = Account()
