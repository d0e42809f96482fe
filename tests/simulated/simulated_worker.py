"""The worker of a simulated replica: it runs the steps, and has host memory that the other replicas read.

It does with tokens what `SwapWorker` does with KV. The parts of shared memory are real, with their generations; only
what a slot holds is in a dictionary, which outlives the process, as the part does.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scheduler_harness import BLOCK_TOKENS, FakeWorker

from weft.core.errors import SwapError
from weft.core.kv_cache.config import CopySpeed
from weft.engine.kv_cache.connector import WorkerReport
from weft.engine.kv_cache.shared import Part
from weft.engine.vllm_compat.names import KVConnectorOutput


class Hosts(dict[int, dict[int, list[int | None]]]):
    """What the slots of each replica hold, by its number.

    Attributes:
        tokens: What belongs into a block, by vLLM's hash of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[bytes, list[int]] = {}


class SimulatedWorker(FakeWorker):
    """The worker of a process that starts.

    Args:
        blocks: KV blocks on the device.
        connector: The scheduler's `SwapConnector`; None: there is no host memory.
        hosts: What the replicas have there.
        seed: Of what is left to chance: how fast copies are, and whether there is memory at all.
    """

    def __init__(self, blocks: int, connector: Any, hosts: Hosts, seed: float) -> None:
        super().__init__(blocks, connector._slots if connector is not None else 0)
        self._connector, self._hosts, self.rng = connector, hosts, random.Random(seed)
        self._link: Path | None = connector._link if connector is not None else None
        if self._link is not None:
            self.host = hosts.setdefault(int(self._link.name), {})
        self._is_new = True
        self.has_memory = connector is not None and self.rng.random() > 0.03
        if connector is not None and not self.has_memory:
            self.fails = lambda: True
        elif self.rng.random() < 0.5:
            self.copies_beside = self.rng

    def run(self, plan: Any) -> Any:
        """Copy what a step's plan says, and compute the step."""
        if self._connector is None:
            return self.execute(plan)
        copied = self.swap(plan.kv_connector_metadata.plan)
        self.run_beside()
        executed = self.execute(plan)
        executed.kv_connector_output = self._measured(copied) if self._is_new else copied
        self.run_beside()
        return executed

    def _measured(self, copied: KVConnectorOutput | None) -> KVConnectorOutput:
        """The first report says how fast copies are, as `SwapConnector.register_kv_caches` does."""
        self._is_new = False
        copied = copied or KVConnectorOutput()
        report = copied.kv_connector_worker_meta or WorkerReport()
        if self.has_memory:
            rate = self.rng.choice([1e12, 1e12, 2e3])
            beside, shares = self.copies_beside is not None, self._link is not None
            report = replace(report, speed=CopySpeed(0.0, rate, rate), copies_beside=beside, shares=shares)
        copied.kv_connector_worker_meta = replace(report, has_memory=self.has_memory)
        return copied

    def _read_shared(self, block: int, slot: int, generation: int) -> bool:
        assert self._link is not None
        number, slot = slot // self.slots - 1, slot % self.slots
        path = self._link.parent / str(number)
        if not path.is_symlink():  # the replica was removed
            self.parts.pop(number, None)
        is_valid = False
        with suppress(OSError, SwapError):
            if number not in self.parts:
                self.parts[number] = Part(path, self._connector._shape)
            is_valid = not self.fails() and int(self.parts[number].generations[slot]) == generation
        self._kv[block] = list(self._hosts[number][slot]) if is_valid else [-1] * BLOCK_TOKENS
        self.failures += not is_valid
        return is_valid
