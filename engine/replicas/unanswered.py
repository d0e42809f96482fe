"""Calls without an output so far: those that may still move to another replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from weft.core.ids import EngineId
from weft.core.routing.balancer import Arrival
from weft.engine.vllm_compat.names import RequestOutput
from weft.engine.wire.control import CallKey


class CallMovedError(Exception):
    """A call was taken back from its replica before it had begun. It stays inside the engine.

    Attributes:
        engine_id: the replica that is to run it.
    """

    def __init__(self, engine_id: EngineId) -> None:
        super().__init__(engine_id)
        self.engine_id = engine_id


@dataclass(eq=False, slots=True)
class _Call:
    arrival: Arrival
    scope: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    moves_to: EngineId | None = None


class UnansweredCalls:
    """The calls that wait for their first output. Use it on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[EngineId, dict[CallKey, _Call]] = {}

    async def first_output(
        self, engine_id: EngineId, call: CallKey, arrival: Arrival, outputs: AsyncGenerator[RequestOutput, None]
    ) -> RequestOutput | None:
        """Wait for the first output of a call; None if it ends without one.

        Raises:
            CallMovedError: the replica has given the call back.
        """
        if call in self._calls.get(
            engine_id, {}
        ):  # a client uses an id twice at once, and the scheduler cannot tell its calls apart
            return await anext(outputs, None)
        mine = self._calls.setdefault(engine_id, {})
        mine[call] = waiting = _Call(arrival)
        try:
            async with waiting.scope:
                return await anext(outputs, None)
        except TimeoutError:
            if waiting.moves_to is None:
                raise
            raise CallMovedError(waiting.moves_to) from None
        finally:
            del mine[call]
            if not mine:
                self._calls.pop(engine_id, None)

    def on(self, engine_id: EngineId) -> dict[CallKey, Arrival]:
        """The calls on a replica, the one that was sent first comes first."""
        return {call: waiting.arrival for call, waiting in self._calls.get(engine_id, {}).items()}

    def move(self, engine_id: EngineId, call: CallKey, to: EngineId) -> Arrival | None:
        """The replica has given a call back: `first_output` raises.

        Returns:
            The call; None if nobody waits for it any more.
        """
        waiting = self._calls.get(engine_id, {}).get(call)
        if waiting is None:
            return None
        waiting.moves_to = to
        waiting.scope.reschedule(asyncio.get_running_loop().time())
        return waiting.arrival
