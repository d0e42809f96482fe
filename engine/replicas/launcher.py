"""The launchers of replicas on this host: their names, their cores and GPUs, and their logs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.core.ids import EngineId
from weft.core.log import get_logger
from weft.core.routing.placement import Assignments, share_cores
from weft.core.testing.script import Script
from weft.engine.processes.logs import KEPT, new_log, remove_log

if TYPE_CHECKING:  # they import vLLM, which takes seconds
    from weft.engine.kv_cache.shared import SharedFolder
    from weft.engine.replicas.local import LocalReplica
    from weft.engine.replicas.scripted import ScriptedReplica
    from weft.engine.vllm.accounting import OnAccount
    from weft.engine.vllm_compat.names import AsyncEngineArgs

CORES_VARIABLE: Final = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's variable for the cores of each rank, such as "0-3|4-7"
_DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


class LocalLauncher:
    """Makes the replicas of one engine.

    Args:
        engine_id: the engine's name. A replica's name is this name and a number.
        cores: sets of CPU cores, one for each replica, for vLLM on CPU only. Further replicas run on any core.
        devices: GPUs as in CUDA_VISIBLE_DEVICES, one entry for each replica. Further replicas see all GPUs.
    """

    def __init__(
        self,
        engine_id: EngineId,
        cores: Iterable[tuple[int, ...]],
        devices: Iterable[str],
        on_account: OnAccount,
        *,
        hang_timeout_s: float | None,
    ) -> None:
        self.keep_logs = False
        self._engine_id = engine_id
        self._cores = Assignments(cores)
        self._devices = Assignments(devices)
        self._hang_timeout_s = hang_timeout_s
        self._on_account = on_account
        self._numbers = itertools.count()
        self._logs: dict[EngineId, Path] = {}
        self._old_logs: list[Path] = []  # of replicas that are gone
        self._shared: SharedFolder | None = None  # the host memory of replicas that have some

    def make(self, model: str, arguments: AsyncEngineArgs) -> LocalReplica:
        """A replica with a new name. It is not started yet."""
        from weft.engine.replicas.local import LocalReplica

        number = next(self._numbers)
        engine_id = EngineId(f"{self._engine_id}/{number}")
        return LocalReplica(
            engine_id,
            model=model,
            arguments=arguments,
            environment=self._environment(engine_id, arguments) | self._share(number, arguments),
            log=self._new_log(engine_id),
            hang_timeout_s=self._hang_timeout_s,
            on_account=self._on_account,
        )

    def _environment(self, engine_id: EngineId, arguments: AsyncEngineArgs) -> dict[str, str]:
        from weft.engine.vllm_compat.names import current_platform

        device = self._devices.acquire(engine_id)
        environment = {} if device is None else {_DEVICES_VARIABLE: device}
        if current_platform.is_cpu():
            count = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
            if ranks := share_cores(self._cores.acquire(engine_id) or (), count):
                environment[CORES_VARIABLE] = "|".join(",".join(map(str, cores)) for cores in ranks)
        return environment

    def _share(self, number: int, arguments: AsyncEngineArgs) -> dict[str, str]:
        """Have the replica's host memory where the other replicas can read it, if it has some."""
        from weft.engine.kv_cache.shared import VARIABLE, SharedFolder

        if arguments.kv_transfer_config is None or not hasattr(os, "memfd_create"):
            return {}
        try:
            self._shared = self._shared or SharedFolder()
            return {VARIABLE: self._shared.add(number)}
        except OSError as error:  # a sandbox may not allow it
            get_logger().warning("the replicas do not share their host memory", reason=str(error))
            return {}

    def release(self, engine_id: EngineId) -> None:
        """Free the cores and GPUs of a replica that is gone, and its host memory soon. The logs of the last 20 such
        ones stay."""
        self._old_logs += [self._logs.pop(engine_id)] if engine_id in self._logs else []
        if len(self._old_logs) > KEPT:
            remove_log(self._old_logs.pop(0))
        if self._shared is not None:
            self._shared.retire(int(engine_id.rpartition("/")[2]))
        self._cores.release(engine_id)
        self._devices.release(engine_id)

    def _new_log(self, engine_id: EngineId) -> Path:
        return self._logs.setdefault(engine_id, new_log(engine_id.replace("/", "-")))

    def close(self) -> None:
        """Give back the shared host memory, and remove the logs, unless they are to be kept."""
        if self._shared is not None:
            self._shared.close()
        if not self.keep_logs:
            for log in (*self._logs.values(), *self._old_logs):
                remove_log(log)


class ScriptedLauncher:
    keep_logs = False  # there are none

    def __init__(self, engine_id: EngineId, script: Script, on_account: OnAccount) -> None:
        self._engine_id = engine_id
        self._script = script
        self._on_account = on_account
        self._numbers = itertools.count()

    def make(self, model: str, arguments: AsyncEngineArgs) -> ScriptedReplica:
        """A replica with a new name. It is not started yet."""
        from weft.engine.replicas.scripted import ScriptedReplica

        engine_id = EngineId(f"{self._engine_id}/{next(self._numbers)}")
        return ScriptedReplica(engine_id, arguments, self._script, self._on_account)

    def release(self, engine_id: EngineId) -> None:
        """Does nothing: a scripted replica has neither cores nor GPUs."""

    def close(self) -> None:
        """Does nothing."""
