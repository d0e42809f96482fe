"""Keeps the replicas of one model running: starts them, starts dead ones again, adds and removes replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from weft.core.errors import EngineClosedError, EngineError, ReplicaError
from weft.core.ids import EngineId
from weft.core.log import get_logger
from weft.core.routing.replicas import ReplicaSet, ReplicaState
from weft.engine.processes.loop_thread import settled
from weft.engine.replicas.base import Replica, bring_kv
from weft.engine.replicas.dispatch_queue import DispatchQueue

T = TypeVar("T")

_WATCH_S: Final = 0.2
_MOST_LEAVE_S: Final = 10.0  # that a replica which is removed takes to copy KV


class Supervisor:
    """Starts, watches and ends the replicas of one model. Use it on the engine's event loop.

    Args:
        make: makes a replica with a new name, which is not started yet.
        forget: called with a replica when its KV is gone. The second argument is True if the replica is removed, and
            False if it will be started again.
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
        self._is_stopping = False
        self._last_ready_s = clock()
        self._failures: dict[tuple[str, EngineId | None], str] = {}  # the last error of each action, to log it once
        self._log = get_logger().bind(model=model)

    def replica(self, engine_id: EngineId) -> Replica | None:
        """The replica of a name; None if there is none, or none any more."""
        return self._replicas.get(engine_id)

    def log(self, engine_id: EngineId) -> str | None:
        """Where a replica's processes write. None if there is no such replica, or its host is not known yet."""
        replica = self._replicas.get(engine_id)
        return replica.log if replica is not None else None

    def replicas(self) -> list[Replica]:
        """All replicas, whether they run or not."""
        return list(self._replicas.values())

    # -- starting replicas

    async def begin(self, count: int) -> Replica:
        """Start the first `count` replicas at the same time, and wait until all are ready. Returns one of them.
        Raises EngineError if one did not start."""
        adding = [asyncio.ensure_future(self.add()) for _ in range(count)]
        try:
            return (await asyncio.gather(*adding))[0]
        finally:
            for task in adding:
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)

    async def add(self) -> Replica:
        """Start one more replica and wait until it is ready. One that does not start is removed, and raises
        EngineError. Raises EngineClosedError after `stop`."""
        if self._is_stopping:
            raise EngineClosedError
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
            await replica.stop()  # completes an end that had failed; otherwise there is nothing to end
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
            for engine_id in list(self._replicas):
                self.note_death(engine_id)
            self._try("start dead replicas", None, self._restart_due)
            self._try("fail waiting calls", None, self._give_up_if_none_is_ready)
            await asyncio.sleep(_WATCH_S)

    def _restart_due(self) -> None:
        for engine_id in self._states.due(self._clock()):
            task = asyncio.get_running_loop().create_task(self._restart(self._replicas[engine_id]))
            self._starting[engine_id] = task  # before it runs, so that `remove` waits for it
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _give_up_if_none_is_ready(self) -> None:
        now_s = self._clock()
        if len(self._states.loads):
            self._last_ready_s = now_s
        elif now_s - self._last_ready_s > self._start_timeout_s:
            self._queue.give_up(now_s - self._last_ready_s)

    def note_death(self, engine_id: EngineId) -> None:
        """If a replica has died, stop sending calls to it at once, and start it again after a pause."""
        replica = self._replicas.get(engine_id)
        if replica is None or not self._try("look after it", engine_id, lambda: replica.is_dead, default=False):
            return
        reason = self._try("ask why it died", engine_id, replica.why_dead, default="unknown")
        self._log.warning("replica died", replica=engine_id, reason=reason, log=replica.log or "unknown")
        self._down(engine_id, reason)
        self._try("begin its end", engine_id, replica.detach)

    def _down(self, engine_id: EngineId, reason: str) -> None:
        self._try("mark it as down", engine_id, lambda: self._states.down(engine_id, reason, self._clock()))
        self._try("forget its KV", engine_id, lambda: self._forget(engine_id, False))
        self._queue.dispatch_waiting()

    async def _restart(self, replica: Replica) -> None:
        try:
            await self._start(replica)
        except Exception as error:  # a start that fails in any way is tried again
            reason = str(error) if isinstance(error, EngineError) else _describe(error)
            self._log.warning("replica did not start", replica=replica.engine_id, reason=reason)
            self._down(replica.engine_id, reason)

    def _try(self, action: str, engine_id: EngineId | None, function: Callable[[], T], default: Any = None) -> T:
        """Do one thing of several, so that the others are done although it fails.

        Args:
            action: what is done, for the log. The same error of the same action is logged once.
            engine_id: the replica; None: all of them.
        """
        key = (action, engine_id)
        try:
            result = function()
        except Exception as error:  # supervision goes on
            reason = _describe(error)
            if self._failures.get(key) != reason:
                self._failures[key] = reason
                self._log.error(f"supervision failed to {action}", replica=engine_id, reason=reason)
            return cast("T", default)
        self._failures.pop(key, None)
        return result

    # -- ending replicas

    async def remove(self, engine_id: EngineId, timeout_s: float | None) -> None:
        """Let a replica finish its calls and copy out the KV of its programs, then end it.

        Args:
            timeout_s: seconds to wait for the replica's calls. Calls that are left then are moved to another replica or
                fail. None: wait without limit.

        Raises:
            ReplicaError: there is no such replica, it is the last one, or it is being removed already.
            asyncio.CancelledError: the caller was cancelled. The replica serves on if it was not being ended yet;
                otherwise it is gone.
        """
        self._states.calls(engine_id)  # raises if there is no such replica
        replica = self._replicas[engine_id]
        remaining = [other for other in self._replicas if self._states.state(other) is not ReplicaState.DRAINING]
        if engine_id not in remaining:
            raise ReplicaError(f"replica {engine_id} is being removed already. Wait until it is gone.")
        if len(remaining) == 1:
            raise ReplicaError(f"{engine_id} is the last replica of {self._model!r}. Shut the engine down instead.")
        self._try("drain it", engine_id, lambda: self._states.drain(engine_id))
        self._queue.dispatch_waiting()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self._states.calls(engine_id):  # noqa: ASYNC110  an event for each replica is not simpler
                        await asyncio.sleep(0.05)
            await self._hand_over(replica)
            if engine_id in self._starting:
                await asyncio.wait([self._starting[engine_id]])
        except asyncio.CancelledError:  # the replica has not been ended, so it serves on
            self._states.resume(engine_id, self._clock(), is_starting=engine_id in self._starting)
            self._queue.dispatch_waiting()
            raise
        await settled(asyncio.ensure_future(self._finish_removal(replica)))

    async def _hand_over(self, replica: Replica) -> None:
        """Have the KV of a replica that leaves where the others find it."""
        try:
            if len(self._states.loads):
                await bring_kv(replica, self._replicas[self._states.loads.least_used], None, _MOST_LEAVE_S)
        except Exception as error:  # it is removed nevertheless
            self._log.error("KV of a removed replica is lost", replica=replica.engine_id, reason=_describe(error))

    async def _finish_removal(self, replica: Replica) -> None:
        await self._end(replica)
        self._drop(replica.engine_id)
        self._log.info("replica removed", replica=replica.engine_id)

    async def _end(self, replica: Replica) -> None:
        try:
            await replica.stop()
        except Exception as error:  # the others are ended nevertheless
            self._log.error("replica did not end in order", replica=replica.engine_id, reason=_describe(error))

    def _drop(self, engine_id: EngineId) -> None:
        if self._replicas.pop(engine_id, None) is not None:
            self._try("remove it", engine_id, lambda: self._states.remove(engine_id))
            self._try("forget its KV", engine_id, lambda: self._forget(engine_id, True))
            self._failures = {key: reason for key, reason in self._failures.items() if key[1] != engine_id}

    async def stop(self) -> None:
        """End all replicas at the same time. A caller that is cancelled waits for that, too."""
        await settled(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        self._is_stopping = True
        tasks = {*self._tasks, *self._starting.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(replica) for replica in self._replicas.values()))


def _describe(error: Exception) -> str:
    """An error that Weft does not raise on purpose, in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
