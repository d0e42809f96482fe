"""The worker's side of the swap: it owns the host memory and makes the copies that the scheduler has planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from weft.core.errors import SwapArgumentError, SwapError
from weft.core.kv_cache.config import CopySpeed
from weft.core.log import get_logger
from weft.engine.kv_cache.kernel import Swapper
from weft.engine.kv_cache.layout import describe
from weft.engine.kv_cache.pool import HostPool
from weft.engine.kv_cache.slot_plans import SwapPlan

_PROBE_ROUNDS: Final = 5
_PROBE_BYTES: Final = 32 << 20  # at most so much is copied each way to measure the speed


class SwapWorker:
    """Carries out plans on the KV caches of one worker.

    A copy that fails does not end the engine. The tokens that could not be loaded are computed again.

    Args:
        caches: the worker's KV caches by layer, as vLLM registers them.
        num_blocks: KV blocks in the caches.
        slots: KV blocks that the host memory holds, the same number on every worker.

    Raises:
        SwapError: these caches cannot be swapped, or the memory cannot be reserved.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, slots: int) -> None:
        layout = describe(caches, num_blocks)
        self.pool = HostPool(slots, layout.slot_bytes, pinned=layout.device.type == "cuda")
        self._swapper = Swapper(layout, self.pool)
        self._lost: set[int] = set()  # slots whose copy out failed
        self._log = get_logger()
        self._warned: set[str] = set()

    def swap_out(self, plan: SwapPlan) -> set[int]:
        """Copy blocks to their slots.

        Returns:
            The slots that hold nothing valid, because their copy failed.
        """
        if not plan.out.slots:
            return set()
        slots = set(plan.out.slots)
        try:
            self._swapper.swap_out(plan.out.blocks, plan.out.slots)
        except SwapError as error:
            self._lost |= slots
            self._warn("KV could not be swapped out and will be computed again", error)
            return slots
        self._lost -= slots
        return set()

    def swap_in(self, plan: SwapPlan) -> tuple[set[int], set[int], set[int]]:
        """Copy slots to the blocks of calls that start, and of calls that are expected.

        Returns:
            The blocks of the former that hold no valid KV, because a copy failed on the way out or in, the slots that
            could not be read, and those that were not read because the kernel refused the call.
        """
        failed: set[int] = set()
        unread: set[int] = set()
        refused: set[int] = set()
        for batch in plan.batches_in:
            try:
                self._swapper.swap_in(batch.blocks, batch.slots)
            except SwapArgumentError as error:  # nothing was copied, and nothing is wrong with the slots
                failed.update(batch.blocks)
                refused.update(batch.slots)
                self._warn(
                    "The swap kernel refused a copy, which is an error of Weft's. KV will be computed again", error
                )
            except SwapError as error:
                failed.update(batch.blocks)
                unread.update(batch.slots)
                self._warn("KV could not be swapped in and will be computed again", error)
            if self._lost:
                lost = [(b, slot) for b, slot in zip(batch.blocks, batch.slots, strict=True) if slot in self._lost]
                failed.update(block for block, _ in lost)
                unread.update(slot for _, slot in lost)
        return failed.difference(plan.fetch.blocks), unread, refused - unread

    def _warn(self, what: str, error: SwapError) -> None:
        """Log a failure, one line for each kind, because all later copies may fail too."""
        if what not in self._warned:
            self._warned.add(what)
            self._log.warning(what + ". This is logged once", reason=str(error))

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> CopySpeed:
        """Measure how fast blocks move: copy some out and back unchanged, before the engine's first step.

        Args:
            clock: seconds.
        """
        many = min(self._swapper.layout.num_blocks, self.pool.slots, max(2, _PROBE_BYTES // self.pool.slot_bytes))
        seconds: dict[tuple[bool, int], float] = {}
        for _ in range(_PROBE_ROUNDS):
            for count in (1, many):
                ids = range(count)
                for out, copy in ((True, self._swapper.swap_out), (False, self._swapper.swap_in)):
                    start = clock()
                    copy(ids, ids).wait()
                    taken_s = clock() - start
                    seconds[out, count] = min(taken_s, seconds.get((out, count), taken_s))
        size = many * self.pool.slot_bytes
        call_s = max(seconds[True, 1], seconds[False, 1])
        return CopySpeed(call_s, size / max(seconds[True, many], 1e-9), size / max(seconds[False, many], 1e-9))

    def close(self) -> None:
        """Return the host memory to the system."""
        self.pool.close()
