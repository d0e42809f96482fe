"""A replica in a Ray actor, as the host sees it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from weft.core.errors import EngineError, EngineStartError
from weft.core.ids import EngineId
from weft.core.kv_cache.stats import SwapStats
from weft.core.routing.liveness import ProcessUsage
from weft.engine.processes.loop_thread import in_thread
from weft.engine.processes.tree import until_stuck
from weft.engine.replicas.base import MOST_COPY_S, Replica, ReplicaGoneError
from weft.engine.replicas.ray.actor import CallEnded, ReplicaUpdate
from weft.engine.vllm.accounting import OnAccount
from weft.engine.vllm_compat.names import RequestOutput, VllmConfig

_STOP_S: Final = 30.0
_ANSWER_S: Final = 30.0  # for the actor to report that its start took too long


class RayReplica(Replica):
    """A replica in a Ray actor. Use it on one event loop.

    Args:
        needs: The resources that the actor needs on one node, as shown to users.
        hang_timeout_s: Seconds without an answer of the actor, after which the replica counts as dead; None: they do
            not matter. The actor itself treats an engine that hangs.
        shares_memory: Whether it has host memory, from which other replicas can take KV.
    """

    def __init__(
        self,
        engine_id: EngineId,
        *,
        make_actor: Callable[[], Any],
        needs: str,
        hang_timeout_s: float | None,
        on_account: OnAccount,
        shares_memory: bool = False,
    ) -> None:
        self.engine_id = engine_id
        self.shares_memory = shares_memory
        self.llm: _RemoteLLM | None = None
        self._make_actor = make_actor
        self._needs = needs
        self._hang_timeout_s = hang_timeout_s
        self._on_account = on_account
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, timeout_s: float) -> None:
        await self._ended()
        self.log = None
        actor = None
        try:
            actor = self._make_actor()
            self.log = await self._wait_for_node(actor, timeout_s)
            # The actor applies `timeout_s` twice: to the engine's construction and to its first answer.
            async with asyncio.timeout(2 * timeout_s + _ANSWER_S):
                config = await actor.start.remote(timeout_s)
        except BaseException as error:
            answers = self.log is not None
            if actor is not None:
                await asyncio.shield(asyncio.ensure_future(_end(actor, grace_s=_STOP_S if answers else 0)))
            reported = self._start_error(error, timeout_s)
            if reported is error:
                raise
            raise reported from error
        self.llm = _RemoteLLM(actor, config, self._on_account)
        self._tasks = [
            asyncio.create_task(self.llm.listen()),
            asyncio.create_task(self.llm.close_if_stuck(self._hang_timeout_s)),
        ]

    async def _wait_for_node(self, actor: Any, timeout_s: float) -> str:
        """Wait until Ray runs the actor on a node, and return where its log is."""
        try:
            async with asyncio.timeout(timeout_s):
                return str(await actor.log_location.remote())
        except TimeoutError:
            raise EngineStartError(
                f"Ray found no node for replica {self.engine_id} within {timeout_s:g} s: it needs {self._needs} on "
                "one node. `ray status` says what is free; ray_actor_options says what a replica asks for."
            ) from None

    def _start_error(self, error: BaseException, timeout_s: float) -> BaseException:
        if isinstance(error, RayTaskError):
            error = error.cause
        if isinstance(error, EngineError) and self.log is not None:
            error.args = (f"{error} (On {self.log.partition(':')[0]}.)",)
        elif isinstance(error, TimeoutError):
            return EngineStartError(f"replica {self.engine_id} did not answer within {timeout_s:g} s; log: {self.log}.")
        elif isinstance(error, Exception) and not isinstance(error, EngineError):
            return EngineStartError(
                f"replica {self.engine_id} did not start in Ray: {_first_line(error)} Every node needs the same Weft, "
                "vLLM and Python; `ray status` shows the nodes."
            )
        return error

    @property
    def is_dead(self) -> bool:
        return self.llm is not None and self.llm.death is not None

    def why_dead(self) -> str:
        return (self.llm and self.llm.death) or "unknown"

    def detach(self) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        llm.close("it was shut down")
        for task in self._tasks:
            task.cancel()
        self._ending = asyncio.create_task(_end(llm.actor, grace_s=0 if llm.is_stuck else _STOP_S))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        llm = self.llm
        if llm is None or llm.death is not None:
            raise ReplicaGoneError
        run = next(llm.run_numbers)
        items = llm.runs[run] = asyncio.Queue()
        try:
            await llm.actor.submit.remote(run, request_id, prompt, sampling_params, kwargs)
            while not isinstance(item := await items.get(), CallEnded):
                yield item
        except RayError:
            raise ReplicaGoneError from None
        finally:
            if llm.runs.pop(run, None) is not None:  # the actor has not reported its end
                llm.actor.abort.remote(run)
        if item.error is not None:
            raise item.error

    async def take_kv(self, source: Replica, blocks: Sequence[bytes]) -> None:
        there = source.llm
        if self.llm is not None and isinstance(there, _RemoteLLM):
            with suppress(RayError):  # one of the two died
                await self.llm.actor.take_kv.remote(there.actor, list(blocks), MOST_COPY_S)

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> Any:
        llm = self.llm
        if llm is not None and llm.death is None:
            with suppress(RayError):  # it died, and its scheduler with it
                return await llm.actor.send_to_scheduler.remote(dict(message))
        return None


class _RemoteLLM:
    """The vLLM engine in an actor.

    Attributes:
        death: Why the engine died; None while it lives.
        runs: For each run of a call, the queue of its outputs. A request that comes back has another run.
        is_stuck: Whether the actor has not answered for too long.
    """

    def __init__(self, actor: Any, vllm_config: VllmConfig, on_account: OnAccount) -> None:
        self.actor = actor
        self.vllm_config = vllm_config
        self.swap_stats: SwapStats | None = None
        self.death: str | None = None
        self.is_stuck = False
        self.runs: dict[int, asyncio.Queue[Any]] = {}
        self.run_numbers = itertools.count(secrets.randbits(62))  # not those of a host that died before
        self._on_account = on_account

    async def listen(self) -> None:
        """Pass the actor's updates on until the replica dies."""
        try:
            async for update in self.actor.updates.options(num_returns="streaming").remote():
                self._take(await update)
            reason = self.death or "its updates ended"
        except RayError as error:
            reason = f"its Ray actor or node is gone: {_first_line(error)}"
        except Exception as error:  # without updates its calls would wait for ever
            reason = f"its updates cannot be read: {type(error).__name__}: {_first_line(error)}"
        self.close(reason)

    async def close_if_stuck(self, timeout_s: float | None) -> None:
        """Watch the actor, and end all calls if it does not answer for `timeout_s` seconds."""
        if timeout_s is None:
            return
        # The actor computes nothing itself, so its use of the CPU, which is unknown here, does not matter.
        await until_stuck(self.actor.ping.remote, lambda: ProcessUsage(0.0, is_stopped=False), timeout_s)
        self.is_stuck = True
        self.close(f"its Ray actor hung: no answer for {timeout_s:g} s; it was killed")

    def _take(self, update: ReplicaUpdate) -> None:
        for call_id, account in update.accounts.items():
            self._on_account(call_id, account)
        self.swap_stats = update.swap_stats or self.swap_stats
        for run, item in update.items:
            waiting = self.runs.get(run)
            if waiting is not None:
                waiting.put_nowait(item)
                if isinstance(item, CallEnded):
                    del self.runs[run]
        self.death = update.death or self.death

    def close(self, reason: str) -> None:
        """End all calls, because no further update comes."""
        self.death = reason
        while self.runs:
            self.runs.popitem()[1].put_nowait(CallEnded(ReplicaGoneError()))


def _first_line(error: BaseException) -> str:
    """The first line of Ray's message; ids and logs follow it."""
    return str(error).partition("\n")[0].strip() or type(error).__name__


async def _end(actor: Any, grace_s: float = _STOP_S) -> None:
    """End an actor, in an orderly way if it answers within `grace_s` seconds."""
    with suppress(Exception):
        async with asyncio.timeout(grace_s):
            await actor.stop.remote()
    with suppress(Exception):
        await in_thread(lambda: ray.kill(actor))
