"""The worker's side of the swap: the host memory, and the copies that the scheduler has planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from weft.core.errors import SwapError
from weft.core.kv_cache.swap import CopySpeed
from weft.core.log import get_logger
from weft.engine.kv_cache.kernel import Swapper
from weft.engine.kv_cache.layout import describe
from weft.engine.kv_cache.plan import Copies, SwapPlan
from weft.engine.kv_cache.pool import HostPool

_TRIES: Final = 5
_PROBE_BYTES: Final = 32 << 20


class SwapWorker:
    """Carries out plans on the KV caches of one worker.

    A copy that fails ends no engine: what could not be loaded is computed again.

    Args:
        caches: the worker's KV caches by layer, as vLLM registers them.
        num_blocks: KV blocks in them.
        slots: how many blocks the host memory takes, the same on every worker.

    Raises:
        SwapError: these caches cannot be swapped, or the memory is not to be had.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, slots: int) -> None:
        layout = describe(caches, num_blocks)
        self.pool = HostPool(slots, layout.slot_bytes, pinned=layout.device.type == "cuda")
        self._swapper = Swapper(layout, self.pool)
        self._lost: set[int] = set()  # slots that were to be written and were not
        self._log = get_logger()

    def swap_out(self, plan: SwapPlan) -> None:
        """Copy the blocks of preempted calls to their slots."""
        if not plan.out.slots:
            return
        slots = set(plan.out.slots)
        try:
            self._swapper.swap_out(plan.out.blocks, plan.out.slots)
        except SwapError as error:
            self._lost |= slots
            self._log.warning("KV could not be swapped out and will be computed again", reason=str(error))
        else:
            self._lost -= slots

    def swap_in(self, plan: SwapPlan) -> set[int]:
        """Copy the slots of calls that go on to their new blocks.

        Returns:
            The blocks that hold nothing, since their copy failed on the way out or in.
        """
        failed: set[int] = set()
        for batch in _together(plan.loads):
            try:
                self._swapper.swap_in(batch.blocks, batch.slots)
            except SwapError as error:
                failed.update(batch.blocks)
                self._log.warning("KV could not be swapped in and will be computed again", reason=str(error))
            if self._lost:
                failed.update(b for b, slot in zip(batch.blocks, batch.slots, strict=True) if slot in self._lost)
        return failed

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> CopySpeed:
        """How fast blocks move, by copying some out and back as they are: before the engine's first step.

        Args:
            clock: seconds.
        """
        most = min(self._swapper.layout.num_blocks, self.pool.slots, max(2, _PROBE_BYTES // self.pool.slot_bytes))
        seconds: dict[tuple[bool, int], float] = {}
        for _ in range(_TRIES):
            for count in (1, most):
                ids = range(count)
                for out, copy in ((True, self._swapper.swap_out), (False, self._swapper.swap_in)):
                    start = clock()
                    copy(ids, ids).wait()
                    taken_s = clock() - start
                    seconds[out, count] = min(taken_s, seconds.get((out, count), taken_s))
        size = most * self.pool.slot_bytes
        call_s = max(seconds[True, 1], seconds[False, 1])
        return CopySpeed(call_s, size / max(seconds[True, most], 1e-9), size / max(seconds[False, most], 1e-9))

    def close(self) -> None:
        """Give the memory back."""
        self.pool.close()


def _together(loads: list[Copies]) -> list[Copies]:
    """All copies in one batch, unless two calls load the same slot: the kernel takes each once."""
    slots = [slot for copies in loads for slot in copies.slots]
    if len(set(slots)) < len(slots):
        return loads
    return [Copies([block for copies in loads for block in copies.blocks], slots)] if slots else []
