"""The replicas of one model: which of them take calls, how busy each is, and when a dead one is started again.

This is a state machine without engines. The caller reports events and passes the time, in seconds of its monotonic
clock. It is not thread-safe: change it from one thread only. `health` may be read from any thread.

::

    add ──▶ starting ──ready──▶ ready ──drain──▶ draining ──remove──▶ gone
               ▲   └────down────┐ │ down            │ down
               └──due── down ◀──┴─┘                 └──▶ gone
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from weft.core.errors import ReplicaError
from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival, Balancer, Loads


class ReplicaState(StrEnum):
    STARTING = "starting"  # its processes start; it takes no calls yet
    READY = "ready"  # it takes calls
    DRAINING = "draining"  # it finishes its calls in flight and is then removed
    DOWN = "down"  # it died, or did not start; it is started again after a pause


_LONGEST_PAUSE_S: Final = 60.0
_STABLE_S: Final = 60.0  # a replica that was ready for so long starts again with the first pause


def pause_s(failures: int) -> float:
    """Seconds before a replica is started again after so many failures in a row, 1 or more: 1, 2, 4, … 60."""
    return min(2.0 ** min(failures - 1, 64), _LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """The state of a replica, shown to the user and to load balancers outside."""

    engine_id: EngineId
    state: ReplicaState
    calls: int  # in flight on the replica, running or in its queue
    deaths: int  # how often the replica died or failed to start
    restart_in_s: float | None = None  # seconds until the next start; None unless the replica is down
    reason: str | None = None  # the reason of its last death
    log: str | None = None  # the file that its processes write to
    stolen: int = 0  # calls that it has taken over from busier replicas so far


@dataclass(slots=True)
class _Replica:
    engine_id: EngineId
    number: int  # in the order in which they were added
    state: ReplicaState = ReplicaState.STARTING
    calls: int = 0
    deaths: int = 0
    failures: int = 0  # in a row
    ready_at_s: float = math.nan
    restart_at_s: float = math.nan
    reason: str | None = None
    stolen: int = 0


class ReplicaSet:
    """The replicas of one model.

    What takes the name of a replica raises `ReplicaError` if there is none, but for `leave` and `state`.

    Args:
        max_calls: the most calls in flight on one replica, running or in its queue. A replica with so many calls is not
            offered to the balancer.

    Attributes:
        loads: the replicas that take calls. Its `capacity` is `max_calls` until a replica has started and says so.
    """

    def __init__(self, balancer: Balancer, *, max_calls: int) -> None:
        self.balancer = balancer
        self.loads = Loads(max_calls, max_calls)
        self._max_calls = max_calls
        self._replicas: dict[EngineId, _Replica] = {}
        self._numbers = itertools.count()

    # -- calls

    def dispatch(self, arrival: Arrival, avoid: Collection[EngineId] = ()) -> EngineId | None:
        """Choose a replica for a call, and count the call as in flight there until `leave`; None if no replica can take
        it now. Those in `avoid`, on which it has failed, are chosen only if no other can take it."""
        if not self.loads.can_take_a_call:
            return None
        others = self.loads.without(avoid) if avoid else self.loads
        chosen = self.balancer.choose(arrival, others if others.can_take_a_call else self.loads)
        self.loads.add(chosen, is_choice=True)
        self._replicas[chosen].calls += 1
        return chosen

    def move(self, engine_id: EngineId) -> bool:
        """Count a call that has not begun as in flight on another replica as well, until `leave` is called for each.
        Returns whether that replica takes the call. If not, `dispatch` finds another."""
        if self.loads.calls(engine_id) is None:
            return False
        replica = self._replicas[engine_id]
        self._count(replica, 1)
        replica.stolen += 1
        return True

    def leave(self, engine_id: EngineId) -> None:
        """Note that a dispatched call has ended on its replica, with or without success."""
        if (replica := self._replicas.get(engine_id)) is not None:
            self._count(replica, -1)

    def _count(self, replica: _Replica, calls: int) -> None:
        replica.calls += calls
        if replica.state is ReplicaState.READY:
            self.loads.add(replica.engine_id, calls)

    # -- replicas

    def _enter(self, replica: _Replica, state: ReplicaState) -> None:
        """Change a replica's state. Only those that are ready take calls."""
        was_ready, replica.state = replica.state is ReplicaState.READY, state
        if state is ReplicaState.READY and not was_ready:
            self.loads.open(replica.engine_id, replica.number, replica.calls)
        elif was_ready and state is not ReplicaState.READY:
            self.loads.close(replica.engine_id)

    def add(self, engine_id: EngineId) -> None:
        """Add a replica that is being started. A name that is in use raises ReplicaError."""
        if engine_id in self._replicas:
            raise ReplicaError(f"there is a replica {engine_id} already; give each replica its own name.")
        self._replicas[engine_id] = _Replica(engine_id, next(self._numbers))

    def ready(self, engine_id: EngineId, now_s: float) -> None:
        """Note that a replica has started. A replica that was drained meanwhile stays drained."""
        replica = self._get(engine_id)
        replica.ready_at_s = now_s
        if replica.state is ReplicaState.STARTING:
            self._enter(replica, ReplicaState.READY)

    def down(self, engine_id: EngineId, reason: str, now_s: float) -> None:
        """Note that a replica died, or did not start.

        The caller still reports `leave` for each of its calls. Its programs are assigned again by their next calls.
        """
        replica = self._get(engine_id)
        if now_s - replica.ready_at_s >= _STABLE_S:
            replica.failures = 0
        replica.failures += 1
        replica.deaths += 1
        replica.ready_at_s = math.nan
        replica.reason = reason
        if replica.state is not ReplicaState.DRAINING:
            self._enter(replica, ReplicaState.DOWN)
            replica.restart_at_s = now_s + pause_s(replica.failures)
        self.balancer.lose_engine(engine_id)  # last, because a balancer may come from a user and raise

    def due(self, now_s: float) -> list[EngineId]:
        """Return the replicas to start again now. They count as starting from this call on."""
        due = [r for r in self._replicas.values() if r.state is ReplicaState.DOWN and r.restart_at_s <= now_s]
        for replica in due:
            self._enter(replica, ReplicaState.STARTING)
        return [replica.engine_id for replica in due]

    def drain(self, engine_id: EngineId) -> None:
        """Give a replica no more calls. Its programs are assigned again by their next calls."""
        self._enter(self._get(engine_id), ReplicaState.DRAINING)
        self.balancer.lose_engine(engine_id)

    def resume(self, engine_id: EngineId, now_s: float, *, is_starting: bool) -> None:
        """Take `drain` back, because the replica is not removed after all.

        Args:
            now_s: the time. A replica that has died is started again after its pause.
        """
        replica = self._get(engine_id)
        if not math.isnan(replica.ready_at_s):
            self._enter(replica, ReplicaState.READY)
        elif is_starting:
            self._enter(replica, ReplicaState.STARTING)
        else:
            self._enter(replica, ReplicaState.DOWN)
            replica.restart_at_s = now_s + pause_s(replica.failures)

    def remove(self, engine_id: EngineId) -> None:
        self._enter(self._get(engine_id), ReplicaState.DRAINING)
        del self._replicas[engine_id]
        self.balancer.lose_engine(engine_id)

    def _get(self, engine_id: EngineId) -> _Replica:
        replica = self._replicas.get(engine_id)
        if replica is None:
            known = ", ".join(self._replicas) or "none"
            raise ReplicaError(f"there is no replica {engine_id!r}; there are: {known}.")
        return replica

    # -- reading

    def state(self, engine_id: EngineId) -> ReplicaState | None:
        """A replica's state, None if there is no such replica."""
        replica = self._replicas.get(engine_id)
        return replica.state if replica is not None else None

    def calls(self, engine_id: EngineId) -> int:
        """The number of calls in flight on a replica."""
        return self._get(engine_id).calls

    @property
    def capacity(self) -> int:
        """The most calls in flight on all replicas together; while no replica is ready, that of one replica."""
        return self._max_calls * max(1, len(self.loads))

    @property
    def reason(self) -> str | None:
        """Why the last of the replicas that are not ready died, None if none of them died."""
        reasons = [r.reason for r in self._replicas.values() if r.state is not ReplicaState.READY and r.reason]
        return reasons[-1] if reasons else None

    def health(self, now_s: float) -> list[ReplicaHealth]:
        """The health of every replica, in the order in which they were added."""
        rows = list(self._replicas.values())
        pauses_s = {r.engine_id: max(0.0, r.restart_at_s - now_s) for r in rows if r.state is ReplicaState.DOWN}
        return [
            ReplicaHealth(r.engine_id, r.state, r.calls, r.deaths, pauses_s.get(r.engine_id), r.reason, stolen=r.stolen)
            for r in rows
        ]

    def __len__(self) -> int:
        return len(self._replicas)
