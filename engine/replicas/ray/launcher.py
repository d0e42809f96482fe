"""The launcher of replicas in Ray actors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from weft.core.ids import EngineId
from weft.engine.models.embedded import embedded_model_path
from weft.engine.replicas.ray.cluster import connection, default_resources

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.replicas.ray.replica import RayReplica
    from weft.engine.vllm.accounting import OnAccount
    from weft.engine.vllm_compat.names import AsyncEngineArgs

_RESOURCE_OPTIONS: Final = ("num_cpus", "num_gpus", "resources")
# More methods of an actor than ever run at the same time, so none waits for another one. The outputs of all calls come
# through one stream, `updates`, and the other methods return soon.
_MAX_CONCURRENCY: Final = 10_000


class RayLauncher:
    """Makes the replicas of one engine. Each is an actor on a node with free resources; Ray spreads the actors.

    Args:
        address: the cluster's address, as `ray.init` takes it. If this process is connected to a cluster already, that
            connection is used.
        actor_options: for `.options()` of the actors; they replace Weft's options. Actors with the lifetime "detached"
            have the name that is given, and a number. If there are such already, an engine that died has left them, and
            this one goes on with them.

    Raises:
        ClusterError: Ray is not installed, or the cluster does not answer.
    """

    keep_logs = False  # Ray keeps the logs

    def __init__(
        self,
        engine_id: EngineId,
        address: str | None,
        actor_options: Mapping[str, Any],
        replicas: int,
        on_account: OnAccount,
        *,
        hang_timeout_s: float | None,
    ) -> None:
        self._engine_id = engine_id
        self._actor_options = dict(actor_options)
        self._replicas = replicas
        self._hang_timeout_s = hang_timeout_s
        self._on_account = on_account
        self._numbers = itertools.count()
        connection.open(address)

    def make(self, model: str, arguments: AsyncEngineArgs) -> RayReplica:
        """A replica with a new name. It is not started yet."""
        import ray

        from weft.engine.replicas.ray.actor import ReplicaHost
        from weft.engine.replicas.ray.replica import RayReplica

        number = next(self._numbers)
        engine_id = EngineId(f"{self._engine_id}/{number}")
        options = {
            **default_resources(arguments, self._replicas),
            "scheduling_strategy": "SPREAD",
            **self._actor_options,
        }
        outlives_host = options.get("lifetime") == "detached"
        if outlives_host:
            options |= {"name": f"{options['name']}-{number}", "get_if_exists": True}
        # Weft starts a dead replica again, not Ray, because Weft knows which calls ran on it.
        options |= {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": _MAX_CONCURRENCY}
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
                hang_timeout_s=self._hang_timeout_s,
                outlives_host=outlives_host,
            ),
            needs=", ".join(f"{name} {options[name]}" for name in _RESOURCE_OPTIONS if name in options),
            hang_timeout_s=self._hang_timeout_s,
            on_account=self._on_account,
            shares_memory=arguments.kv_transfer_config is not None,
        )

    def release(self, engine_id: EngineId) -> None:
        """Do nothing: Ray knows when an actor has ended."""

    def close(self) -> None:
        """Leave the cluster, unless this process had connected to it before or another engine uses it."""
        connection.close()
