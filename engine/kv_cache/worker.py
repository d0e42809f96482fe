"""The worker's side of the swap: it owns the host memory and makes the copies that the scheduler has planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from weft.core.errors import SwapArgumentError, SwapError
from weft.core.kv_cache.config import CopySpeed
from weft.core.log import get_logger
from weft.engine.kv_cache.kernel import Swapper, Transfer
from weft.engine.kv_cache.layout import describe
from weft.engine.kv_cache.pool import HostPool
from weft.engine.kv_cache.shared import SharedPools, layout_digest
from weft.engine.kv_cache.slot_plans import Executed, SwapBatch, SwapPlan

_PROBE_ROUNDS: Final = 5
_PROBE_BYTES: Final = 32 << 20  # at most so much is copied each way to measure the speed


class SwapWorker:
    """Carries out plans on the KV caches of one worker.

    A copy that fails does not end the engine. The tokens that could not be loaded are computed again.

    Args:
        caches: the worker's KV caches by layer, as vLLM registers them.
        slots: KV blocks that the host memory holds, the same number on every worker.
        shared: The memory that it shares with other replicas; None if it shares no memory.

    Raises:
        SwapError: these caches cannot be swapped, or the memory cannot be reserved.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor], num_blocks: int, slots: int, shared: SharedPools | None = None
    ) -> None:
        layout = describe(caches, num_blocks)
        self._shared = shared
        if shared is not None:
            self.pool = shared.own_pool(layout, layout_digest(caches))
        else:
            self.pool = HostPool(slots, layout.slot_bytes, pinned=layout.device.type == "cuda")
        self._swapper = self._beside_out = self._beside_in = Swapper(layout, self.pool)
        self.copies_beside = layout.device.type == "cuda"  # a CPU computes steps with the cores that copy
        if self.copies_beside:  # what a step waits for is not queued behind what none waits for, nor in behind out
            self._beside_out, self._beside_in = Swapper(layout, self.pool), Swapper(layout, self.pool)
        self._running: deque[tuple[Executed, list[Transfer]]] = deque()  # copies beside steps, by plan
        self._lost: set[int] = set()  # slots whose copy out failed
        self._log = get_logger()
        self._warned: set[str] = set()

    def swap_out(self, plan: SwapPlan) -> set[int]:
        """Copy blocks to their slots, once the copies beside earlier steps for which the plan waits are done. Then
        begin the copies beside this step. Returns the slots that hold nothing valid, because their copy failed; of
        those beside the step, `take_done` tells."""
        for executed, transfers in self._running:
            if executed.number <= plan.waits_for:
                for transfer in transfers:
                    transfer.wait()
        lost, _ = self._out(self._swapper, plan.out)
        if plan.spill.slots or plan.fetch.slots:
            not_spilled, out = self._out(self._beside_out, plan.spill, beside_compute=True)
            _, unread, refused, into = self._in(self._beside_in, [plan.fetch], beside_compute=True)
            executed = Executed(plan.number, tuple(not_spilled), tuple(unread), tuple(refused))
            self._running.append((executed, out + into))
        return lost

    def take_done(self, *, wait: bool = False) -> tuple[Executed, ...]:
        """Of which plans the copies beside steps have ended since the last call, and how they went.

        Args:
            wait: Whether to return when all have ended.
        """
        done = []
        while self._running:
            executed, transfers = self._running[0]
            for transfer in transfers if wait else ():
                transfer.wait()
            if not all(transfer.done() for transfer in transfers):
                break
            self._running.popleft()
            done.append(executed)
        return tuple(done)

    def swap_in(self, plan: SwapPlan) -> tuple[set[int], set[int], set[int]]:
        """Copy slots to the blocks of calls that start. Returns the blocks that hold no valid KV, because a copy failed
        on the way out or in, the slots that could not be read, and those that were not read because the kernel refused
        the call."""
        batches = plan.batches_in
        if self._shared is None or not plan.generations:
            failed, unread, refused, _ = self._in(self._swapper, batches)
            return failed, unread, refused
        own, others = zip(*(batch.split(self.pool.slots) for batch in batches), strict=True)
        failed, unread, refused, _ = self._in(self._swapper, own)
        for batch in others:
            missing = self._read_shared(self._shared, batch, plan.generations)
            failed.update(missing.blocks)
            refused.update(missing.slots)
        return failed, unread, refused

    def _read_shared(self, shared: SharedPools, batch: SwapBatch, generations: Mapping[int, int]) -> SwapBatch:
        """What could not be read of this."""
        try:
            return shared.read(batch, generations)
        except SwapError as error:
            self._warn("KV of other replicas could not be read and will be computed again", error)
            return batch

    def _out(
        self, swapper: Swapper, batch: SwapBatch, *, beside_compute: bool = False
    ) -> tuple[set[int], list[Transfer]]:
        if not batch.slots:
            return set(), []
        slots = set(batch.slots)
        try:
            transfer = swapper.swap_out(batch.blocks, batch.slots, beside_compute=beside_compute)
        except SwapError as error:
            self._lost |= slots
            self._warn("KV could not be swapped out and will be computed again", error)
            return slots, []
        self._lost -= slots
        return set(), [transfer]

    def _in(
        self, swapper: Swapper, batches: Sequence[SwapBatch], *, beside_compute: bool = False
    ) -> tuple[set[int], set[int], set[int], list[Transfer]]:
        transfers: list[Transfer] = []
        failed: set[int] = set()
        unread: set[int] = set()
        refused: set[int] = set()
        for batch in batches:
            if not batch.slots:
                continue
            try:
                transfers.append(swapper.swap_in(batch.blocks, batch.slots, beside_compute=beside_compute))
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
        return failed, unread, refused - unread, transfers

    def _warn(self, what: str, error: SwapError) -> None:
        """Log a failure, one line for each kind, because all later copies may fail too."""
        if what not in self._warned:
            self._warned.add(what)
            self._log.warning(what + ". This is logged once", reason=str(error))

    def measure(self, clock: Callable[[], float] = time.perf_counter) -> CopySpeed:
        """Measure how fast blocks move: copy some out and back unchanged, before the engine's first step."""
        # What an earlier process of this replica has left in shared memory stays as it is.
        swapper = self._swapper if self._shared is None else self._shared.swapper
        many = min(swapper.layout.num_blocks, swapper.pool.slots, max(2, _PROBE_BYTES // self.pool.slot_bytes))
        seconds: dict[tuple[bool, int], float] = {}
        for _ in range(_PROBE_ROUNDS):
            for count in (1, many):
                ids = range(count)
                for out, copy in ((True, swapper.swap_out), (False, swapper.swap_in)):
                    start = clock()
                    copy(ids, ids).wait()
                    taken_s = clock() - start
                    seconds[out, count] = min(taken_s, seconds.get((out, count), taken_s))
        size = many * self.pool.slot_bytes
        call_s = max(seconds[True, 1], seconds[False, 1])
        return CopySpeed(call_s, size / max(seconds[True, many], 1e-9), size / max(seconds[False, many], 1e-9))

    def close(self) -> None:
        """Return the host memory to the system."""
        if self._shared is not None:
            self._shared.close()
        self.pool.close()
