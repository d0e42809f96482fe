"""What the engine asks of a replica, wherever it runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from weft.core.ids import EngineId
from weft.core.kv_cache.stats import SwapStats
from weft.engine.vllm_compat.names import RequestOutput, VllmConfig


class ReplicaGoneError(Exception):
    """Inside the engine room: the replica that ran a call died or was shut down. Callers get a `WeftError` instead."""


class ReplicaLLM(Protocol):
    """What is read off the vLLM engine of a replica."""

    vllm_config: VllmConfig
    swap_stats: SwapStats | None  # as of the call that ended last


class Replica(ABC):
    """A vLLM engine, started again under the same name when it has died. Use it on one event loop.

    Attributes:
        engine_id: its name.
        log: where its processes write, for people; None while that is not known.
        llm: the engine while it runs.
    """

    engine_id: EngineId
    log: str | None = None
    llm: ReplicaLLM | None = None
    _ending: asyncio.Future[None] | None = None

    @abstractmethod
    async def start(self, timeout_s: float) -> None:
        """Start vLLM's processes and wait until they answer. Cancelling it ends them.

        Raises:
            EngineStartError, ModelNotFoundError: it did not start, or not within `timeout_s` seconds; the message names
                the log.
        """

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """Whether an engine that had started has ended by itself."""

    @abstractmethod
    def why_dead(self) -> str:
        """What is known of its end, in a few words."""

    async def stop(self) -> None:
        """End its processes, whether they run or have died; calls still on it fail. It may be started again."""
        self.detach()
        await self._ended()

    async def _ended(self) -> None:
        """Wait for the end that is under way, if one is."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    @abstractmethod
    def detach(self) -> None:
        """`stop`, without waiting for it."""

    @abstractmethod
    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`.

        Raises:
            ReplicaGoneError: the engine died, or was shut down, before the call was done.
        """
