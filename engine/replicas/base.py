"""The contract of a replica, wherever it runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from weft.core.ids import EngineId, ProgramId
from weft.core.kv_cache.stats import SwapStats
from weft.engine.vllm_compat.names import RequestOutput, VllmConfig
from weft.engine.wire.control import SpillProgram, encode_control

MOST_COPY_S: Final = 2.0  # that a call waits for the KV of its program to be copied
_ASK_EVERY_S: Final = 0.005


class ReplicaGoneError(Exception):
    """The replica that ran a call died or was shut down. It stays inside the engine: callers get a `WeftError`."""


class ReplicaLLM(Protocol):
    """What an engine reads of a replica's vLLM engine."""

    vllm_config: VllmConfig
    swap_stats: SwapStats | None  # as of the last call that ended


class Replica(ABC):
    """A vLLM engine that is started again under the same name when it has died. Use it on one event loop.

    Attributes:
        log: Where the replica's processes write, as shown to users; None while that is unknown.
        llm: The vLLM engine while it runs, otherwise None.
        shares_memory: Whether other replicas can have what is in its host memory.
        moves_kv: Whether they read it where it is, so that a program that goes there finds its KV for a copy.
    """

    engine_id: EngineId
    log: str | None = None
    llm: ReplicaLLM | None = None
    shares_memory = moves_kv = False
    _ending: asyncio.Future[None] | None = None

    @abstractmethod
    async def start(self, timeout_s: float) -> None:
        """Start vLLM's processes and wait until they answer. Cancelling the start ends them. Raises EngineStartError
        or ModelNotFoundError if vLLM did not start within `timeout_s` seconds. The message names the log."""

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """Whether an engine that was started has ended by itself."""

    @abstractmethod
    def why_dead(self) -> str:
        """Why the engine ended, in a few words."""

    async def stop(self) -> None:
        """End the replica's processes, whether they run or have died. Its calls fail. It may be started again."""
        self.detach()
        await self._ended()

    async def _ended(self) -> None:
        """Wait until an end that is under way is complete. An end that failed raises its error once."""
        ending = self._ending
        if ending is not None:
            try:
                await asyncio.shield(ending)
            finally:
                if ending.done() and self._ending is ending:
                    self._ending = None

    @abstractmethod
    def detach(self) -> None:
        """Begin `stop` and do not wait for it."""

    @abstractmethod
    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`.

        Raises:
            ReplicaGoneError: The engine died, or was shut down, before the call ended.
        """

    async def take_kv(self, source: Replica, blocks: Sequence[bytes]) -> None:
        """Have blocks of another replica's host memory where this one reads them: nothing to do on one host. Their
        hashes are `blocks`, those that matter most first."""
        del source, blocks

    @abstractmethod
    async def send_to_scheduler(self, message: Mapping[str, Any]) -> Any:
        """Send a control message (`weft.engine.wire.control.encode_control`) to the scheduler. Returns its answer; None
        if the replica does not run, or dies before it answers."""


async def bring_kv(source: Replica, to: Replica, program_id: ProgramId | None, most_s: float) -> None:
    """Have the KV of a program, None: of all that have no call there, copied from a replica's device to its host
    memory, and from there to where another replica reads it. What takes longer than `most_s` seconds is left, as from a
    replica that dies or stands still."""
    if not source.shares_memory:
        return
    message = encode_control(SpillProgram(program_id, begins=True))
    with suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while (answer := await source.send_to_scheduler(message)) and answer["copying"]:
                message = encode_control(SpillProgram(program_id, begins=False))
                await asyncio.sleep(_ASK_EVERY_S)
            if answer and answer["blocks"]:
                await to.take_kv(source, answer["blocks"])
