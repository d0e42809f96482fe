"""Keeps the replicas of one model running: starts them, starts dead ones again, adds and removes replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from weft.core.errors import EngineError, ReplicaError
from weft.core.ids import EngineId
from weft.core.log import get_logger
from weft.core.routing.replicas import ReplicaSet, ReplicaState
from weft.engine.replicas.base import Replica, ReplicaLLM
from weft.engine.replicas.dispatch_queue import DispatchQueue

_WATCH_S: Final = 0.2


class Supervisor:
    """Starts, watches and ends the replicas of one model. Use it on the engine's event loop.

    Args:
        model: the model's name, for errors.
        replicas: the states of the replicas.
        queue: the calls that wait for a replica.
        make: makes a replica with a new name, which is not started yet.
        forget: called with a replica when its KV is gone. The second argument is True if the replica is removed, and
            False if it will be started again.
        start_timeout_s: seconds that a replica may take to start.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        *,
        replicas: ReplicaSet,
        queue: DispatchQueue,
        make: Callable[[], Replica],
        forget: Callable[[EngineId, bool], None],
        start_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._states = replicas
        self._queue = queue
        self._make = make
        self._forget = forget
        self._start_timeout_s = start_timeout_s
        self._clock = clock
        self._replicas: dict[EngineId, Replica] = {}
        self._starting: dict[EngineId, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_ready_s = clock()
        self._log = get_logger().bind(model=model)

    def replica(self, engine_id: EngineId) -> Replica:
        """The replica of a name.

        Raises:
            ReplicaError: there is no such replica.
        """
        if engine_id not in self._replicas:
            known = ", ".join(self._replicas) or "none"
            raise ReplicaError(f"there is no replica {engine_id!r}; there are: {known}.")
        return self._replicas[engine_id]

    def log(self, engine_id: EngineId) -> str | None:
        """Where a replica's processes write. None if there is no such replica, or its host is not known yet."""
        replica = self._replicas.get(engine_id)
        return replica.log if replica is not None else None

    def replicas(self) -> list[Replica]:
        """All replicas, whether they run or not."""
        return list(self._replicas.values())

    def engines(self) -> list[ReplicaLLM]:
        """The vLLM engines of the replicas that run."""
        return [replica.llm for replica in list(self._replicas.values()) if replica.llm is not None]

    # -- starting replicas

    async def begin(self, count: int) -> Replica:
        """Start the first `count` replicas at the same time, and wait until all are ready.

        Returns:
            One of the replicas.

        Raises:
            EngineError: a replica did not start.
        """
        adding = [asyncio.ensure_future(self.add()) for _ in range(count)]
        try:
            return (await asyncio.gather(*adding))[0]
        finally:
            for task in adding:
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)

    async def add(self) -> Replica:
        """Start one more replica and wait until it is ready.

        Raises:
            EngineError: the replica did not start. It is removed.
        """
        replica = self._make()
        self._replicas[replica.engine_id] = replica
        self._states.add(replica.engine_id)
        try:
            await self._start(replica)
        except BaseException:
            self._drop(replica.engine_id)
            raise
        return replica

    async def _start(self, replica: Replica) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._starting[replica.engine_id] = task
        try:
            await replica.start(self._start_timeout_s)
            self._states.ready(replica.engine_id, self._clock())
        finally:
            del self._starting[replica.engine_id]
        self._log.info("replica ready", replica=replica.engine_id)
        self._queue.dispatch_waiting()

    # -- watching replicas

    def watch(self) -> None:
        """Begin to watch the replicas and to start dead ones again, until `stop`."""
        self._tasks.add(asyncio.get_running_loop().create_task(self._watch()))

    async def _watch(self) -> None:
        while True:
            now_s = self._clock()
            for engine_id in list(self._replicas):
                self.note_death(engine_id)
            for engine_id in self._states.due(now_s):
                task = asyncio.get_running_loop().create_task(self._restart(self._replicas[engine_id]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            if self._states.ready_count:
                self._last_ready_s = now_s
            elif now_s - self._last_ready_s > self._start_timeout_s:
                self._queue.give_up(now_s - self._last_ready_s)
            await asyncio.sleep(_WATCH_S)

    def note_death(self, engine_id: EngineId) -> None:
        """If a replica has died, stop sending calls to it at once, and start it again after a pause."""
        replica = self._replicas.get(engine_id)
        if replica is not None and replica.is_dead:
            reason = replica.why_dead()
            self._log.warning("replica died", replica=engine_id, reason=reason)
            replica.detach()
            self._down(engine_id, reason)

    def _down(self, engine_id: EngineId, reason: str) -> None:
        self._states.down(engine_id, reason, self._clock())
        self._forget(engine_id, False)
        self._queue.dispatch_waiting()

    async def _restart(self, replica: Replica) -> None:
        try:
            await self._start(replica)
        except EngineError as error:
            self._log.warning("replica did not start", replica=replica.engine_id, reason=str(error))
            self._down(replica.engine_id, str(error))

    # -- ending replicas

    async def remove(self, engine_id: EngineId, timeout_s: float | None) -> None:
        """Let a replica finish its calls, then end it.

        Args:
            engine_id: the replica's name.
            timeout_s: seconds to wait for the replica's calls. Calls that are left then are moved to another replica or
                fail. None: wait without limit.

        Raises:
            ReplicaError: there is no such replica, it is the last one, or it is being removed already.
        """
        replica = self.replica(engine_id)
        remaining = [other for other in self._replicas if self._states.state(other) is not ReplicaState.DRAINING]
        if engine_id not in remaining:
            raise ReplicaError(f"replica {engine_id} is being removed already. Wait until it is gone.")
        if len(remaining) == 1:
            raise ReplicaError(f"{engine_id} is the last replica of {self._model!r}. Shut the engine down instead.")
        self._states.drain(engine_id)
        self._queue.dispatch_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._states.calls(engine_id):  # noqa: ASYNC110  an event for each replica would not be simpler
                    await asyncio.sleep(0.05)
        if engine_id in self._starting:
            await asyncio.wait([self._starting[engine_id]])
        await replica.stop()
        self._drop(engine_id)
        self._log.info("replica removed", replica=engine_id)

    def _drop(self, engine_id: EngineId) -> None:
        if self._replicas.pop(engine_id, None) is not None:
            self._states.remove(engine_id)
            self._forget(engine_id, True)

    async def stop(self) -> None:
        """End all replicas at the same time."""
        tasks = {*self._tasks, *self._starting.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self._replicas.values()))
