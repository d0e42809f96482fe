"""The replicas of one model: which can take calls, how busy each is, and when a dead one is started again.

A state machine without engines: the caller says what happens and passes the time in, in seconds of its monotonic clock.
Not thread-safe: change it from one thread. `health` may be read from any.

::

    add ──▶ starting ──ready──▶ ready ──drain──▶ draining ──remove──▶ gone
               ▲   └────down────┐ │ down            │ down
               └──due── down ◀──┴─┘                 └──▶ gone
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from weft.core.errors import ReplicaError
from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival, Balancer, EngineLoad


class ReplicaState(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"  # its processes start; it takes no calls yet
    READY = "ready"
    DRAINING = "draining"  # it finishes what it has and is then removed
    DOWN = "down"  # it died, or did not start; it is started again after a pause


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a replica that failed is left alone: longer each time it fails in a row.

    Args:
        first_s: after the first failure.
        factor: how much longer after each further one.
        longest_s: at most.
        stable_s: one that was ready for this long has its failures forgiven.
    """

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 60.0
    stable_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, 1 or more."""
        exponent = min(failures - 1, 64)  # enough for any longest_s, and no overflow
        return min(self.first_s * self.factor**exponent, self.longest_s)


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """How a replica is, for people and load balancers outside."""

    engine_id: EngineId
    state: ReplicaState
    calls: int  # in flight on it, those in its queue included
    deaths: int  # how often it died or failed to start
    restart_in_s: float | None = None  # while it is down
    reason: str | None = None  # of the last death
    log: str | None = None  # the file its processes write to


@dataclass(slots=True)
class _Replica:
    engine_id: EngineId
    state: ReplicaState = ReplicaState.STARTING
    calls: int = 0
    deaths: int = 0
    failures: int = 0  # in a row
    ready_at_s: float = math.nan
    restart_at_s: float = math.nan
    reason: str | None = None


class ReplicaSet:
    """The replicas of one model.

    Args:
        balancer: chooses among those that can take a call.
        max_calls: in flight on one replica, its queue included; a replica that has so many is passed over.
        backoff: pauses before restarts.
    """

    def __init__(self, balancer: Balancer, *, max_calls: int, backoff: Backoff | None = None) -> None:
        self.balancer = balancer
        self._max_calls = max_calls
        self._backoff = backoff or Backoff()
        self._replicas: dict[EngineId, _Replica] = {}

    # -- calls

    def place(self, arrival: Arrival, avoid: Collection[EngineId] = ()) -> EngineId | None:
        """Choose a replica for a call and count the call as in flight there; end it with `leave`.

        Args:
            arrival: the call.
            avoid: replicas on which it failed already; taken only if there is no other.

        Returns:
            The replica, or None if none can take a call now.
        """
        able = [r for r in self._replicas.values() if r.state is ReplicaState.READY and r.calls < self._max_calls]
        able = [r for r in able if r.engine_id not in avoid] or able
        if not able:
            return None
        chosen = self.balancer.choose(arrival, [EngineLoad(r.engine_id, r.calls) for r in able])
        self._replicas[chosen].calls += 1
        return chosen

    def leave(self, engine_id: EngineId) -> None:
        """A call that was placed on a replica is over there, however it ended."""
        replica = self._replicas.get(engine_id)
        if replica is not None:
            replica.calls -= 1

    # -- replicas

    def add(self, engine_id: EngineId) -> None:
        """A replica is being started.

        Raises:
            ReplicaError: there is one of this name.
        """
        if engine_id in self._replicas:
            raise ReplicaError(f"there is a replica {engine_id} already; names of replicas are used once.")
        self._replicas[engine_id] = _Replica(engine_id)

    def ready(self, engine_id: EngineId, now_s: float) -> None:
        """A replica has started. One that was drained meanwhile stays so."""
        replica = self._get(engine_id)
        replica.ready_at_s = now_s
        if replica.state is ReplicaState.STARTING:
            replica.state = ReplicaState.READY

    def down(self, engine_id: EngineId, reason: str, now_s: float) -> None:
        """A replica died, or did not start. Its calls are still to leave; its programs are assigned anew."""
        replica = self._get(engine_id)
        if now_s - replica.ready_at_s >= self._backoff.stable_s:
            replica.failures = 0
        replica.failures += 1
        replica.deaths += 1
        replica.ready_at_s = math.nan
        replica.reason = reason
        self.balancer.lose_engine(engine_id)
        if replica.state is not ReplicaState.DRAINING:
            replica.state = ReplicaState.DOWN
            replica.restart_at_s = now_s + self._backoff.pause_s(replica.failures)

    def due(self, now_s: float) -> list[EngineId]:
        """The replicas to start again now; they count as starting from here on."""
        due = [r for r in self._replicas.values() if r.state is ReplicaState.DOWN and r.restart_at_s <= now_s]
        for replica in due:
            replica.state = ReplicaState.STARTING
        return [replica.engine_id for replica in due]

    def drain(self, engine_id: EngineId) -> None:
        """A replica takes no more calls; its programs are assigned anew.

        Raises:
            ReplicaError: there is no such replica.
        """
        self._get(engine_id).state = ReplicaState.DRAINING
        self.balancer.lose_engine(engine_id)

    def remove(self, engine_id: EngineId) -> None:
        """A replica is gone.

        Raises:
            ReplicaError: there is no such replica.
        """
        self._get(engine_id)
        self.balancer.lose_engine(engine_id)
        del self._replicas[engine_id]

    def _get(self, engine_id: EngineId) -> _Replica:
        replica = self._replicas.get(engine_id)
        if replica is None:
            there = ", ".join(self._replicas) or "none"
            raise ReplicaError(f"there is no replica {engine_id!r}; there are: {there}.")
        return replica

    # -- looking on

    def state(self, engine_id: EngineId) -> ReplicaState | None:
        """A replica's state, None if it is gone."""
        replica = self._replicas.get(engine_id)
        return replica.state if replica is not None else None

    def calls(self, engine_id: EngineId) -> int:
        """The calls in flight on a replica."""
        return self._get(engine_id).calls

    @property
    def ready_count(self) -> int:
        """How many replicas take calls."""
        return sum(replica.state is ReplicaState.READY for replica in list(self._replicas.values()))

    @property
    def capacity(self) -> int:
        """How many calls may be in flight on all together; with no replica ready, as many as one would take."""
        return self._max_calls * max(1, self.ready_count)

    @property
    def reason(self) -> str | None:
        """Of the last replica that died and is not back, None if there is none."""
        reasons = [r.reason for r in self._replicas.values() if r.state is not ReplicaState.READY and r.reason]
        return reasons[-1] if reasons else None

    def health(self, now_s: float) -> list[ReplicaHealth]:
        """Every replica, in the order they were added."""
        return [
            ReplicaHealth(
                replica.engine_id,
                replica.state,
                replica.calls,
                replica.deaths,
                max(0.0, replica.restart_at_s - now_s) if replica.state is ReplicaState.DOWN else None,
                replica.reason,
            )
            for replica in list(self._replicas.values())
        ]

    def __len__(self) -> int:
        return len(self._replicas)
