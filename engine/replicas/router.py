"""The replicas of one model behind what looks like one `AsyncLLM`: calls are placed, and moved when a replica dies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from weft.core.errors import ReplicaLostError, WeftError
from weft.core.ids import CallId, EngineId, ProgramId, SessionId
from weft.core.routing.balancer import Arrival
from weft.engine.replicas.base import Replica, ReplicaGoneError
from weft.engine.replicas.dispatch_queue import DispatchQueue
from weft.engine.vllm_compat.names import (
    EngineDeadError,
    InputProcessor,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    VllmConfig,
    renderer_from_config,
)

# A call that kills every engine it runs on must not go through all of them for ever.
MAX_ATTEMPTS: Final = 3


class Router:
    """Sends calls to replicas, and again when one dies.

    Args:
        line: places the calls.
        replica: the replica of a name.
        on_placed: told which replica each call goes to.
        on_death: told when a call finds its replica gone.

    Attributes:
        failures: typed errors of calls, for `ChatEndpoint`.
    """

    def __init__(
        self,
        line: DispatchQueue,
        replica: Callable[[EngineId], Replica],
        on_placed: Callable[[CallId, EngineId], None],
        on_death: Callable[[EngineId], None],
    ) -> None:
        self.failures: dict[CallId, WeftError] = {}
        self._queue = line
        self._replica = replica
        self._on_placed = on_placed
        self._on_death = on_death

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`, on whichever replica. A call whose replica dies before anything of its answer was
        given out begins again on another one.

        Raises:
            ReplicaLostError: something had been given out, or it has begun often enough.
            NoReplicaError: no replica became ready.
        """
        ids: Mapping[str, Any] = sampling_params.extra_args or {}
        call_id = CallId(ids.get("call_id", request_id))
        arrival = Arrival(
            ProgramId(ids.get("program_id", request_id)),
            SessionId(kwargs.get("session_id") or request_id),
            len(prompt.get("prompt_token_ids") or ()),
        )
        is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        delivered, delivered_tokens = False, 0
        tried: list[EngineId] = []
        try:
            while True:
                engine_id = await self._queue.place(arrival, tried)
                tried.append(engine_id)
                try:
                    self._on_placed(call_id, engine_id)
                    running = self._replica(engine_id).generate(prompt, sampling_params, request_id, **kwargs)
                    async with aclosing(running) as outputs:
                        async for output in outputs:
                            delivered = True
                            produced = sum(len(choice.token_ids) for choice in output.outputs)
                            delivered_tokens = delivered_tokens + produced if is_delta else produced
                            yield output
                    return
                except ReplicaGoneError:
                    self._on_death(engine_id)
                    if delivered or len(tried) == MAX_ATTEMPTS:
                        raise ReplicaLostError(engine_id, delivered_tokens, len(tried)) from None
                finally:
                    self._queue.leave(engine_id)
        except WeftError as error:
            self.failures[call_id] = error
            raise


class RoutedLLM(Router):
    """What vLLM's chat serving layer takes for an engine client, with a model's replicas behind it.

    It has a renderer and an input processor of its own, since a replica's go when it dies.

    Args:
        config: vLLM's, of a replica.
        line, replica, on_placed, on_death: as for `Router`.
    """

    # What dies is a replica, which is started again; calls wait for it or go elsewhere.
    errored = False
    dead_error = EngineDeadError()

    def __init__(
        self,
        config: VllmConfig,
        line: DispatchQueue,
        replica: Callable[[EngineId], Replica],
        on_placed: Callable[[CallId, EngineId], None],
        on_death: Callable[[EngineId], None],
    ) -> None:
        super().__init__(line, replica, on_placed, on_death)
        self.vllm_config = config
        self.model_config = config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Nothing: calls were admitted before they were rendered."""
        del n, request_id

    async def is_tracing_enabled(self) -> bool:
        return False

    async def stop(self) -> None:
        """End the renderer's threads."""
        self.renderer.shutdown()
