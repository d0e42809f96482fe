"""Launchers by name: replicas run as processes of this host, or in a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.core.errors import ReplicaError
from weft.core.ids import EngineId
from weft.core.routing.placement import share_cores
from weft.core.testing.script import Script
from weft.engine.replicas.launcher import CORES_VARIABLE, LocalLauncher, ScriptedLauncher
from weft.engine.replicas.ray.launcher import RayLauncher

if TYPE_CHECKING:  # the module imports vLLM, which takes seconds
    from weft.engine.vllm.accounting import OnAccount

Launcher = LocalLauncher | RayLauncher | ScriptedLauncher


def make_launcher(
    backend: str | Script,
    engine_id: EngineId,
    *,
    replicas: int,
    devices: Sequence[str],
    ray_address: str | None,
    ray_actor_options: Mapping[str, Any] | None,
    hang_timeout_s: float | None,
    on_account: OnAccount,
) -> Launcher:
    """Make the launcher for `backend`. The arguments are those of `AsyncMultiLLMEngine`.

    Args:
        on_account: Called with the account of each call.

    Raises:
        ReplicaError: The backend is unknown, or an argument belongs to the other backend.
        ClusterError: Ray is not installed, or its cluster does not answer.
    """
    if isinstance(backend, Script):
        return ScriptedLauncher(engine_id, backend, on_account)
    if backend == "ray":
        if devices:
            raise ReplicaError(
                "Ray assigns GPUs to replicas; pass ray_actor_options={'num_gpus': 1} instead of devices."
            )
        return RayLauncher(
            engine_id, ray_address, ray_actor_options or {}, replicas, on_account, hang_timeout_s=hang_timeout_s
        )
    if backend != "mp":
        raise ReplicaError(f"unknown backend {backend!r}; choose 'mp' for processes of this host, or 'ray'.")
    if ray_address is not None or ray_actor_options is not None:
        raise ReplicaError("ray_address and ray_actor_options go with backend='ray'; pass it, or leave them out.")
    cores = share_cores(os.sched_getaffinity(0), replicas) if CORES_VARIABLE not in os.environ else []
    return LocalLauncher(engine_id, cores, devices, on_account, hang_timeout_s=hang_timeout_s)
