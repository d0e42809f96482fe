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
class _Waiter:
    """A call's place in the line."""

    arrival: Arrival
    avoid: Collection[EngineId]
    placed: asyncio.Future[EngineId]


class DispatchQueue:
    """Calls that wait for a replica, first come, first served. Most find one at once.

    Args:
        model: as errors name it.
        replicas: of the model.
    """

    def __init__(self, model: str, replicas: ReplicaSet) -> None:
        self._model = model
        self._replicas = replicas
        self._waiters: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    async def place(self, arrival: Arrival, avoid: Collection[EngineId]) -> EngineId:
        """Wait until a replica takes the call, which then counts as in flight there; end it with `leave`.

        Raises:
            NoReplicaError: none has been ready for too long (`give_up`).
        """
        turn = _Waiter(arrival, avoid, asyncio.get_running_loop().create_future())
        self._waiters.append(turn)
        self.move()
        try:
            return await turn.placed
        except asyncio.CancelledError:
            if turn in self._waiters:
                self._waiters.remove(turn)
            elif turn.placed.done() and not turn.placed.cancelled() and turn.placed.exception() is None:
                self.leave(turn.placed.result())
            raise

    def leave(self, engine_id: EngineId) -> None:
        """A call is over on a replica; the next may have its place."""
        self._replicas.leave(engine_id)
        self.move()

    def move(self) -> None:
        """Place calls from the front as long as that works: after a call has left, or a replica has become ready."""
        while self._waiters:
            turn = self._waiters[0]
            if not turn.placed.done():
                engine_id = self._replicas.dispatch(turn.arrival, turn.avoid)
                if engine_id is None:
                    return
                turn.placed.set_result(engine_id)
            self._waiters.popleft()

    def give_up(self, waited_s: float) -> None:
        """Send everybody away: no replica has been ready for `waited_s` seconds."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.placed.done():
                turn.placed.set_exception(NoReplicaError(self._model, waited_s, self._replicas.reason))
