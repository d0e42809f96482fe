"""Calls that wait for a replica, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from weft.core.errors import NoReplicaError
from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival
from weft.core.routing.replicas import ReplicaSet


@dataclass(eq=False, slots=True)
class _WaitingCall:
    arrival: Arrival
    avoid: Collection[EngineId]
    assigned: asyncio.Future[EngineId]


class DispatchQueue:
    """Dispatches calls to the replicas of one model in order of arrival. Most calls do not have to wait."""

    def __init__(self, model: str, replicas: ReplicaSet) -> None:
        self._model = model
        self.replicas = replicas
        self._waiting: deque[_WaitingCall] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def dispatch(self, arrival: Arrival, avoid: Collection[EngineId]) -> EngineId:
        """Wait until a replica takes the call, one of `avoid` only if there is no other. The call is then in flight
        there until `leave`. Raises NoReplicaError if no replica has been ready for too long (`give_up`). What the
        balancer raises passes through."""
        call = _WaitingCall(arrival, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self.dispatch_waiting()
        try:
            return await call.assigned
        except asyncio.CancelledError:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call.assigned.done() and not call.assigned.cancelled() and call.assigned.exception() is None:
                self.leave(call.assigned.result())
            raise

    def leave(self, engine_id: EngineId) -> None:
        """A call has left a replica. The first waiting call may go there."""
        self.replicas.leave(engine_id)
        self.dispatch_waiting()

    def dispatch_waiting(self) -> None:
        """Dispatch calls from the front of the queue until one finds no replica.

        Call it after a call has left a replica, and after a replica has become ready.
        """
        while self._waiting:
            call = self._waiting[0]
            if not call.assigned.done():
                try:
                    engine_id = self.replicas.dispatch(call.arrival, call.avoid)
                except Exception as error:  # of a balancer; it concerns this call, not the one that has left
                    call.assigned.set_exception(error)
                else:
                    if engine_id is None:
                        return
                    call.assigned.set_result(engine_id)
            self._waiting.popleft()

    def give_up(self, waited_s: float) -> None:
        """Fail every waiting call, because no replica has been ready for `waited_s` seconds."""
        while self._waiting:
            call = self._waiting.popleft()
            if not call.assigned.done():
                call.assigned.set_exception(NoReplicaError(self._model, waited_s, self.replicas.reason))
