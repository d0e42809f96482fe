"""The Ray actor of a replica: it runs a `LocalReplica` on the node that Ray has chosen."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from weft.core.accounts import Account
from weft.core.ids import CallId, EngineId
from weft.core.kv_cache.stats import SwapStats
from weft.core.log import get_logger
from weft.engine.kv_cache.shared import VARIABLE as SHARED_KV
from weft.engine.models.embedded import embedded_model
from weft.engine.processes.logs import new_log
from weft.engine.replicas.launcher import CORES_VARIABLE
from weft.engine.replicas.local import LocalReplica
from weft.engine.replicas.ray.node_kv import MovedBlocks, NodeKv
from weft.engine.vllm_compat.names import AsyncEngineArgs, VllmConfig, current_platform

_WATCH_S: Final = 0.2
_PERIOD_S: Final = 5.0
_MOST_QUIET: Final = 60  # periods without a host: five minutes


class CallEnded(NamedTuple):
    """The last item of a call."""

    error: Exception | None  # None: the call gave its whole answer


class ReplicaUpdate(NamedTuple):
    """The events on a replica since the update before."""

    accounts: dict[CallId, Account]  # read them before the items, which may be the answers that they belong to
    items: list[tuple[int, Any]]  # by run, a `RequestOutput` or `CallEnded`
    swap_stats: SwapStats | None
    death: str | None  # why the replica died, if it has; this is then the last update


class ReplicaHost:
    """Runs one replica. Ray makes it, and the host calls its methods remotely.

    Updates of all calls share one stream: a step of the engine costs one message, however many calls are in the step.

    Args:
        is_embedded: Whether the model is the embedded one, which each node prepares for itself.
        cpus: The cores that Ray has reserved for this actor. On CPU the replica runs this many threads, on any cores.
        outlives_host: Whether another host may take the replica over when its host has died. Nobody does: it ends after
            some minutes, if hosts ping.
    """

    def __init__(
        self,
        engine_id: EngineId,
        model: str,
        arguments: AsyncEngineArgs,
        *,
        is_embedded: bool,
        cpus: float,
        hang_timeout_s: float | None,
        outlives_host: bool = False,
    ) -> None:
        self._accounts: dict[CallId, Account] = {}
        self._items: list[tuple[int, Any]] = []
        self._has_items = asyncio.Event()
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._host = 0  # counts those that it had
        self._starting = asyncio.Lock()
        self._quiet = 0  # periods since a host was heard
        self._has_lease = outlives_host and hang_timeout_s is not None
        self._ending: asyncio.Task[None] | None = None
        self._is_embedded = is_embedded
        self._arguments = arguments
        self._log = _log(engine_id.replace("/", "-"))
        self._kv = _node_kv(engine_id) if arguments.kv_transfer_config is not None else None
        self._replica = LocalReplica(
            engine_id,
            model=model,
            arguments=arguments,
            environment=_threads(arguments, cpus) | ({} if self._kv is None else {SHARED_KV: self._kv.link}),
            log=self._log,
            hang_timeout_s=hang_timeout_s,
            on_account=self._accounts.__setitem__,
        )

    async def log_location(self) -> str:
        """The node and the file of the replica's log."""
        return f"{socket.gethostname()}:{self._log}"

    async def ping(self) -> None:
        """Answer. The actor computes nothing itself, so it always answers soon."""
        self._quiet = 0

    async def start(self, timeout_s: float) -> VllmConfig:
        """Start vLLM, with the errors of `Replica.start`. If it runs already, its host has died: it aborts that host's
        calls, and serves the caller."""
        async with self._starting:
            self._host += 1
            for run in self._runs.values():
                run.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)
            self._items.clear()
            self._accounts.clear()
            if self._replica.llm is None or self._replica.is_dead:
                await self._launch(timeout_s)
        self._quiet = 0
        if self._has_lease and self._ending is None:
            self._ending = asyncio.create_task(self._end_without_host())
        assert self._replica.llm is not None  # noqa: S101  it has started
        return self._replica.llm.vllm_config

    async def _launch(self, timeout_s: float) -> None:
        if self._is_embedded:
            self._arguments.model = str(await asyncio.to_thread(embedded_model))
        await self._replica.stop()
        await self._replica.start(timeout_s)
        if self._kv is not None:
            self._kv.open()

    async def _end_without_host(self) -> None:
        """Give the GPU back when no host comes any more. Time in which this process was stopped does not count."""
        import ray

        while self._quiet < _MOST_QUIET:
            await asyncio.sleep(_PERIOD_S)
            self._quiet += 1
        await self.stop()
        ray.kill(ray.get_runtime_context().current_actor)

    async def submit(
        self, run: int, request_id: str, prompt: Any, sampling_params: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Begin a run of a call. Its outputs come as updates.

        A call that was moved away may come back while its first run here is still being cancelled, so the host numbers
        the runs.
        """
        self._runs[run] = asyncio.create_task(self._run(run, request_id, prompt, sampling_params, kwargs))

    async def _run(
        self, run: int, request_id: str, prompt: Any, sampling_params: Any, kwargs: Mapping[str, Any]
    ) -> None:
        error = None
        try:
            running = self._replica.generate(prompt, sampling_params, request_id, **kwargs)
            async with aclosing(running) as outputs:
                async for output in outputs:
                    self._report(run, output)
        except Exception as failed:  # it is raised where the call is awaited
            error = failed
        finally:
            del self._runs[run]
            self._report(run, CallEnded(error))

    def _report(self, run: int, item: Any) -> None:
        self._items.append((run, item))
        self._has_items.set()

    async def abort(self, run: int) -> None:
        """Abort a run, if it has not ended."""
        task = self._runs.get(run)
        if task is not None:
            task.cancel()

    async def updates(self) -> AsyncGenerator[ReplicaUpdate, None]:
        """Yield updates until the replica dies or is stopped, or another host has it."""
        host, death = self._host, None
        while death is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_S):
                    await self._has_items.wait()
            await asyncio.sleep(0)  # the other calls of this step
            if host != self._host:
                return
            self._has_items.clear()
            death = self._replica.why_dead() if self._replica.is_dead else None
            llm = self._replica.llm
            if death is not None:
                self._replica.detach()
            elif not self._items:
                continue
            # New objects, because Ray pickles the yielded ones later.
            items, self._items = self._items, []
            accounts = dict(self._accounts)
            self._accounts.clear()
            yield ReplicaUpdate(accounts, items, llm.swap_stats if llm is not None else None, death)

    async def send_to_scheduler(self, message: Mapping[str, Any]) -> Any:
        return await self._replica.send_to_scheduler(message)

    async def read_kv(self, keys: list[bytes]) -> MovedBlocks | None:
        """Blocks of this replica's host memory, as `NodeKv.read`."""
        return self._kv.read(keys) if self._kv is not None else None

    async def take_kv(self, source: Any, keys: list[bytes], most_s: float) -> None:
        """Fetch those of a replica's blocks that are not here, one batch after the other.

        Args:
            keys: The hashes of the blocks, those that matter most first.
            most_s: Seconds after which the rest is left to be computed.
        """
        if self._kv is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                for batch in self._kv.lacking(keys):
                    found = await source.read_kv.remote(batch)
                    if found is None or not self._kv.add(found):
                        return

    async def stop(self) -> None:
        """End vLLM's processes."""
        await self._replica.stop()
        if self._kv is not None:
            self._kv.close()


def _node_kv(engine_id: EngineId) -> NodeKv | None:
    try:
        return NodeKv(int(engine_id.rpartition("/")[2]))
    except (AttributeError, OSError) as error:  # not Linux, or a sandbox that does not allow it
        get_logger().warning("programs that move take no KV along", reason=str(error))
        return None


def _threads(arguments: AsyncEngineArgs, cpus: float) -> dict[str, str]:
    if not current_platform.is_cpu() or CORES_VARIABLE in os.environ:
        return {}
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    return {CORES_VARIABLE: "nobind", "OMP_NUM_THREADS": str(max(1, int(cpus) // ranks))}


def _log(name: str) -> Path:
    """The replica's log, next to Ray's own of this process, where Ray's tools look and which Ray removes with the
    cluster."""
    with suppress(OSError):
        output = Path("/proc/self/fd/2").readlink()
        if output.is_file():
            return output.parent / f"weft-{name}-{os.getpid()}.log"
    return new_log(name)
