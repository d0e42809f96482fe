"""Moves calls that have not begun between the replicas of one model, as `weft.core.routing.stealing` decides.

Waiting calls stay in the queues of the engines and are taken back from there. The front end could hold them instead,
but the policy ranks waiting calls against running ones, and only the scheduler knows which of them its KV cache admits.
The scheduler's answer is exact: it drops a call between two steps and before the first step of the call, or refuses.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.core.ids import CallId, EngineId, ProgramId
from weft.core.log import get_logger
from weft.core.routing.balancer import Arrival
from weft.core.routing.replicas import ReplicaSet
from weft.core.routing.stealing import EngineQueue, Steal, Stealing
from weft.engine.replicas.base import Replica
from weft.engine.vllm_compat.names import RequestOutput
from weft.engine.wire.control import CallKey, TakeBack, encode_control


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
        """Wait for the first output of a call; None if it ends without one. Raises CallMovedError if the replica has
        given it back."""
        mine = self._calls.setdefault(engine_id, {})
        if call in mine:  # a client uses an id twice at once, and the scheduler cannot tell its calls apart
            return await anext(outputs, None)
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
        """The replica has given a call back: `first_output` raises. Returns the call; None if nobody waits for it any
        more."""
        waiting = self._calls.get(engine_id, {}).get(call)
        if waiting is None:
            return None
        waiting.moves_to = to
        waiting.scope.reschedule(asyncio.get_running_loop().time())
        return waiting.arrival


class Watcher(ABC):
    """Looks at replicas every `every_s` seconds. Use it on the engine's event loop."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False

    def watch(self) -> None:
        """Begin, until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Stop. The replicas must be ended before, because a call may be between two of them."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
            except Exception as error:  # calls are served without it, too
                if not self._has_failed:
                    self._has_failed = True
                    reason = f"{type(error).__name__}: {error}"
                    get_logger().error(f"{type(self).__name__} failed", reason=reason)

    @abstractmethod
    async def look(self) -> object:
        """Look once."""


class Stealer(Watcher):
    """Looks at the queues of the replicas from time to time, and moves calls. Use it on the engine's event loop."""

    def __init__(
        self,
        stealing: Stealing,
        states: ReplicaSet,
        replica: Callable[[EngineId], Replica | None],
        calls: UnansweredCalls,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(stealing.config.look_every_s)
        self._stealing = stealing
        self._states = states
        self._replica = replica
        self._calls = calls
        self._clock = clock

    async def look(self) -> int:
        """Ask the replicas for their queues, unless the load is even, and move what the rule says. Returns how many
        calls have moved."""
        if not self._stealing.is_uneven(self._states.loads):
            return 0
        loads = self._states.loads.all()
        answers = await asyncio.gather(*(self._ask(load.engine_id, TakeBack((), 0)) for load in loads))
        lengths = {load.engine_id: answer["waiting"] for load, answer in zip(loads, answers, strict=True) if answer}
        now = self._states.loads.all()
        queues = [EngineQueue(load, lengths[load.engine_id]) for load in now if load.engine_id in lengths]
        steal = self._stealing.decide(queues, self._clock())
        return await self._carry_out(steal) if steal is not None else 0

    async def _ask(self, engine_id: EngineId, message: TakeBack) -> dict[str, Any] | None:
        replica = self._replica(engine_id)
        answer = await replica.send_to_scheduler(encode_control(message)) if replica is not None else None
        return answer if isinstance(answer, dict) else None

    async def _carry_out(self, steal: Steal) -> int:
        now_s = self._clock()
        movable = self._calls.on(steal.victim).items()
        calls = tuple(call for call, arrival in movable if self._stealing.may_move(arrival.program_id, now_s))
        message = TakeBack(calls, steal.most, steal.most_cached)
        answer = await self._ask(steal.victim, message) if calls else None
        moved = 0
        for program_id, call_id in answer["taken"] if answer is not None else ():
            arrival = self._calls.move(steal.victim, (ProgramId(program_id), CallId(call_id)), steal.thief)
            if arrival is not None:
                self._stealing.moved(arrival.program_id, steal.thief, now_s)
                moved += 1
        return moved
