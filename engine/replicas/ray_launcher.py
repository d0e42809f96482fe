"""Replicas in Ray actors: the cluster, and what each actor asks of it."""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from weft.core.errors import ClusterError
from weft.core.ids import EngineId
from weft.core.routing.placement import largest_share
from weft.engine.models.embedded import embedded_model_path

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.frontend.accounting import OnAccount
    from weft.engine.replicas.ray_replica import RayReplica
    from weft.engine.vllm_compat.names import AsyncEngineArgs

_PROBE_S: Final = 5.0


class RayLauncher:
    """Makes the replicas of one engine, each an actor on whichever node has room; Ray spreads them.

    Args:
        engine_id: the engine's; a replica's is this and a number.
        address: of the cluster, as `ray.init` takes it. A connection that this process has already is used as it is.
        actor_options: for `.options()` of the actors, before ours.
        replicas: how many there will be at first.
        on_account: told of each call's account.

    Raises:
        ClusterError: Ray is not installed, or the cluster does not answer.
    """

    keep_logs = False  # Ray keeps them

    def __init__(
        self,
        engine_id: EngineId,
        address: str | None,
        actor_options: Mapping[str, Any],
        replicas: int,
        on_account: OnAccount,
    ) -> None:
        self._engine_id = engine_id
        self._actor_options = dict(actor_options)
        self._replicas = replicas
        self._on_account = on_account
        self._numbers = itertools.count()
        _connection.open(address)

    def make(self, model: str, arguments: AsyncEngineArgs) -> RayReplica:
        """A replica with a new name, yet to start."""
        import ray

        from weft.engine.replicas.ray_actor import ReplicaHost
        from weft.engine.replicas.ray_replica import RayReplica

        engine_id = EngineId(f"{self._engine_id}/{next(self._numbers)}")
        options = {**room(arguments, self._replicas), "scheduling_strategy": "SPREAD", **self._actor_options}
        # One that died is made anew by us, which knows what was on it.
        options |= {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CONCURRENCY}
        actor_class: Any = ray.remote(ReplicaHost)
        return RayReplica(
            engine_id,
            make_actor=partial(
                actor_class.options(**options).remote,
                engine_id,
                model,
                arguments,
                is_embedded=arguments.model == str(embedded_model_path()),
                cpus=float(options.get("num_cpus") or 1),
            ),
            needs=", ".join(f"{name} {options[name]}" for name in _ROOM if name in options),
            on_account=self._on_account,
        )

    def release(self, engine_id: EngineId) -> None:
        """Nothing: Ray knows when an actor is gone."""

    def close(self) -> None:
        """Leave the cluster, unless it was the process's before or another engine uses it."""
        _connection.close()


def room(arguments: AsyncEngineArgs, replicas: int) -> dict[str, Any]:
    """What a replica asks Ray for unless the user says: a GPU for each rank, or on CPU cores, as many for all.

    Args:
        arguments: vLLM's.
        replicas: how many there are to be.
    """
    from weft.engine.vllm_compat.names import current_platform

    if not current_platform.is_cpu():
        return {"num_gpus": arguments.tensor_parallel_size * arguments.pipeline_parallel_size}
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return {"num_cpus": largest_share(cores, replicas)}


_ROOM: Final = ("num_cpus", "num_gpus", "resources")
_CONCURRENCY: Final = 10_000  # calls are news, and a task at most a moment


class _Connection:
    """This process's connection to Ray, as far as Weft has made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_ours = False

    def open(self, address: str | None) -> None:
        try:
            import ray
        except ImportError:
            raise ClusterError(
                "backend='ray' needs Ray: pip install 'weft[ray]', on every node of the cluster."
            ) from None
        with self._lock:
            if not ray.is_initialized():
                _probe(address or os.environ.get("RAY_ADDRESS") or "")
                try:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                except (Exception, SystemExit) as error:  # Ray asks the process to end if the cluster falls silent
                    raise _unreachable(address or "the default", error) from error
                self._is_ours = True
            self._users += 1

    def close(self) -> None:
        import ray

        with self._lock:
            self._users -= 1
            if self._users == 0 and self._is_ours:
                self._is_ours = False
                ray.shutdown()


_connection: Final = _Connection()


def _probe(address: str) -> None:
    """Ray takes minutes to find out that nobody listens."""
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address} is for Ray Client, which cannot carry streams. Run this on a node of the cluster, with "
            "ray_address='auto'."
        )
    found = re.fullmatch(r"\[?(?P<host>[^\[\]]+)\]?:(?P<port>[0-9]+)", address)
    if found is None:  # "auto", "local", or nothing, which Ray decides at once
        return
    try:
        socket.create_connection((found["host"], int(found["port"])), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"no Ray cluster answers at {address!r}: {error}. `ray status --address {address}` asks it; `ray start --head` "
        "starts one."
    )
