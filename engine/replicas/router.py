"""The replicas of one model behind one `AsyncLLM` interface. A call moves to another replica when its replica dies."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from weft.core.errors import ReplicaLostError, WeftError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId
from weft.core.routing.balancer import Arrival
from weft.engine.replicas.base import MOST_COPY_S, Replica, ReplicaGoneError, bring_kv
from weft.engine.replicas.dispatch_queue import DispatchQueue
from weft.engine.replicas.stealer import CallMovedError, UnansweredCalls
from weft.engine.vllm.accounting import Delivered
from weft.engine.vllm_compat.names import (
    EngineDeadError,
    InputProcessor,
    RequestOutput,
    SamplingParams,
    VllmConfig,
    renderer_from_config,
)
from weft.engine.wire.call_header import decode_key, sent_later, wire_id

_AT_ONCE_S: Final = 0.001  # a shorter wait is none


class Router:
    """Sends calls to replicas, and sends a call again when its replica dies.

    Args:
        on_assigned: Called with each call and the replica that it goes to. Returns another replica if that has the
            latest KV of the call's program.

    Attributes:
        failures: Typed errors of calls, for `ChatEndpoint`.
        unanswered: The calls that may move to another replica.
    """

    def __init__(
        self,
        queue: DispatchQueue,
        replica: Callable[[EngineId], Replica | None],
        on_assigned: Callable[[CallId, EngineId], EngineId | None],
        on_death: Callable[[EngineId], None],
    ) -> None:
        self.failures: dict[CallId, WeftError] = {}
        self.unanswered = UnansweredCalls()
        self._queue = queue
        self._replica = replica
        self._on_assigned = on_assigned
        self._on_death = on_death

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, for_chat: bool = True, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, on any replica.

        A call whose replica dies before any part of its answer was delivered begins again on another replica, and one
        whose whole answer was delivered has ended. A call that its replica has given back, because it had not begun
        there, runs on the replica that takes it.

        Args:
            for_chat: Whether vLLM's serving layer calls this for `ChatEndpoint`, which takes the error from `failures`.

        Raises:
            ReplicaLostError: A part was delivered, or the call has been tried `ReplicaLostError.MOST_ATTEMPTS` times.
            NoReplicaError: No replica became ready.
        """
        session_id = kwargs.get("session_id")
        key = program_id, call_id = decode_key(sampling_params.extra_args, request_id, session_id)
        session = SessionId(wire_id(session_id) or request_id)
        arrival = Arrival(program_id, session, len(prompt.get("prompt_token_ids") or ()))
        delivered = Delivered(sampling_params)
        tried: list[EngineId] = []
        now_s = asyncio.get_running_loop().time
        since_s = now_s()
        thief: EngineId | None = None  # the replica to which the call was moved; it is in flight there
        try:
            while True:
                engine_id = thief or await self._queue.dispatch(arrival, tried)
                thief = None
                replica = self._replica(engine_id)
                if replica is None:  # it was removed after the call was dispatched; the call did not run there
                    self._queue.leave(engine_id)
                    continue
                tried.append(engine_id)
                try:
                    await self._bring_kv(program_id, self._on_assigned(call_id, engine_id), replica)
                    params = _sent_later(sampling_params, now_s() - since_s)
                    running = replica.generate(prompt, params, request_id, **kwargs)
                    async with aclosing(running) as outputs:
                        if sampling_params.n > 1:  # vLLM sends the sequences one by one, so a part may be on its way
                            output = await anext(outputs, None)
                        else:
                            output = await self.unanswered.first_output(engine_id, key, arrival, outputs)
                        while output is not None:
                            delivered.add(output)
                            yield output
                            output = await anext(outputs, None)
                    return
                except CallMovedError as moved:
                    tried.pop()
                    thief = moved.engine_id if self._queue.replicas.move(moved.engine_id) else None
                except ReplicaGoneError:
                    self._on_death(engine_id)
                    if delivered.is_whole:
                        return
                    if delivered.has_begun or len(tried) == ReplicaLostError.MOST_ATTEMPTS:
                        raise ReplicaLostError(engine_id, delivered.tokens, len(tried)) from None
                finally:
                    self._queue.leave(engine_id)
        except WeftError as error:
            if for_chat:
                self.failures[call_id] = error
            raise

    async def _bring_kv(self, program_id: ProgramId, engine_id: EngineId | None, to: Replica) -> None:
        """Have the KV of a program brought along from a replica. If that dies or stands still, the call is delayed for
        a moment."""
        replica = self._replica(engine_id) if engine_id is not None else None
        if replica is not None:
            await bring_kv(replica, to, program_id, MOST_COPY_S)


def _sent_later(params: SamplingParams, later_s: float) -> SamplingParams:
    """The parameters of a call that waited for a replica, or on another one, before this one gets it."""
    if later_s < _AT_ONCE_S:
        return params
    params = copy.copy(params)
    params.extra_args = sent_later(params.extra_args or {}, later_s)
    return params


class RoutedLLM(Router):
    """The engine client that vLLM's chat serving layer gets, with a model's replicas behind it.

    It has a renderer and an input processor of its own, because a replica's are gone when the replica dies.
    """

    # Only replicas die. They are started again, and calls wait for them or go elsewhere.
    errored = False
    dead_error = EngineDeadError()

    def __init__(
        self,
        config: VllmConfig,
        queue: DispatchQueue,
        replica: Callable[[EngineId], Replica | None],
        on_assigned: Callable[[CallId, EngineId], EngineId | None],
        on_death: Callable[[EngineId], None],
    ) -> None:
        super().__init__(queue, replica, on_assigned, on_death)
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Does nothing: calls were admitted before they were rendered."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def stop(self) -> None:
        """End the renderer's threads."""
        self.renderer.shutdown()
