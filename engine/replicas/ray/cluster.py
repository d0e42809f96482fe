"""This process's connection to a Ray cluster, and what the cluster can give to replicas."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from weft.core.errors import ClusterError, pip_install
from weft.core.routing.placement import largest_share

if TYPE_CHECKING:  # it imports vLLM, which takes seconds
    from weft.engine.vllm_compat.names import AsyncEngineArgs

_PROBE_S: Final = 5.0


class _Connection:
    """The connection to Ray. It is closed after its last use, but only if Weft opened it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_ours = False

    def open(self, address: str | None) -> None:
        """Connect to the cluster at `address`, as `ray.init` takes it, unless this process is connected already.
        Raises ClusterError if Ray is not installed, or the cluster does not answer."""
        try:
            import ray
        except ImportError:
            raise ClusterError(
                f"backend='ray' needs Ray, which is not installed. Run `{pip_install('ray')}` on every node of the "
                "cluster."
            ) from None
        with self._lock:
            if not ray.is_initialized():
                _probe(address or os.environ.get("RAY_ADDRESS") or "")
                try:
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
                except (Exception, SystemExit) as error:  # Ray raises SystemExit if the cluster stops answering
                    raise _unreachable(address or "the default", error) from error
                self._is_ours = True
            self._users += 1

    def close(self) -> None:
        """End one use of the connection."""
        import ray

        with self._lock:
            self._users -= 1
            if self._users == 0 and self._is_ours:
                self._is_ours = False
                ray.shutdown()


connection: Final = _Connection()


def default_resources(arguments: AsyncEngineArgs, replicas: int) -> dict[str, Any]:
    """Options of a Ray actor for what a replica asks for unless the user names others: a GPU for each rank, or on CPU
    the most cores that all replicas can have."""
    from weft.engine.vllm_compat.names import current_platform

    if not current_platform.is_cpu():
        return {"num_gpus": arguments.tensor_parallel_size * arguments.pipeline_parallel_size}
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]]
    return {"num_cpus": largest_share(cores, replicas)}


def _probe(address: str) -> None:
    """Raise ClusterError if no process listens at `address`. Ray itself would try for minutes."""
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address} is an address for Ray Client, which cannot carry streams. Run this on a node of the cluster, "
            "with ray_address='auto'."
        )
    found = re.fullmatch(r"\[?(?P<host>[^\[\]]+)\]?:(?P<port>[0-9]+)", address)
    if found is None:  # for "auto", "local" and no address, Ray decides at once
        return
    try:
        socket.create_connection((found["host"], int(found["port"])), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: BaseException) -> ClusterError:
    return ClusterError(
        f"no Ray cluster answers at {address!r}: {error}. `ray status --address {address}` shows its state; `ray start "
        "--head` starts a cluster. One that asks for tokens answers only who has its RAY_AUTH_TOKEN."
    )
