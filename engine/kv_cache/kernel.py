"""Moves KV blocks between the engine's paged cache and a host pool, all layers, blocks and requests in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weft import _csrc
from weft.core.errors import SwapArgumentError, SwapDeviceError
from weft.engine.kv_cache.fallback import TorchSwap
from weft.engine.kv_cache.layout import CacheLayout
from weft.engine.kv_cache.pool import HostPool

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Numbers of blocks or slots, in one dimension."""

_MOST_THREADS = 8  # by then the memory is the limit


class _Copies(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class _Backend(Protocol):
    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], stream: int) -> _Copies | None: ...

    def synchronize(self) -> None: ...


class Transfer:
    """A swap that was handed over. On a CPU it is done when the call returns, on a GPU some time later."""

    def __init__(self, copies: _Copies | None) -> None:
        """Made by a `Swapper`; `copies` are under way, None if they are done."""
        self._copies = copies

    def done(self) -> bool:
        """Whether every byte has arrived. Raises SwapDeviceError if CUDA reports an error."""
        with _typed_errors:
            return self._copies is None or self._copies.done()

    def wait(self) -> None:
        """Return when every byte has arrived. Raises SwapDeviceError if CUDA reports an error."""
        with _typed_errors:
            if self._copies is not None:
                self._copies.wait()


class _HostSwap:
    """The host kernel. Its copies are done when it returns."""

    def __init__(self, checked: _csrc.SwapLayout, threads: int | None) -> None:
        cpus = _free_cpus()
        self._kernel = _csrc.HostSwap(checked, min(len(cpus), _MOST_THREADS) if threads is None else threads, cpus)

    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], _stream: int) -> None:
        self._kernel.swap(out, blocks, slots)

    def synchronize(self) -> None:
        return


class Swapper:
    """The swap kernel for one layout and one pool (Autellix §4.2.2: gather, then one transfer).

    On a GPU both calls return at once. The swap comes after what PyTorch's current stream has been given, and what that
    stream is given later comes after the swap, so the engine's blocks may be reused, or read, straight away. Swaps
    happen in the order of the calls, so the pool's slots may be given to others straight away too; only somebody who
    looks into the pool, or gives a slot to another Swapper, has to `wait`.
    """

    def __init__(
        self, layout: CacheLayout, pool: HostPool, *, threads: int | None = None, staging_bytes: int = 8 << 20
    ) -> None:
        """Check that layout and pool fit each other, and set up.

        Args:
            layout: of the engine's caches.
            pool: with slots of at least `layout.slot_bytes` bytes; pinned if the caches are on a GPU.
            threads: on a CPU, how many copy a batch of 4 MiB or more; as many as this process has cores, up to 8.
            staging_bytes: on a GPU, the bytes of each of the two buffers there.

        Raises:
            SwapArgumentError: the pool's slots are too small, or caches overlap each other or the pool.
            SwapDeviceError: CUDA reported an error.
            PoolClosedError: the pool was closed.
        """
        self.layout = layout
        self.pool = pool
        arena = pool.arena
        if pool.slot_bytes < layout.slot_bytes:
            raise SwapArgumentError(
                f"slots of {pool.slot_bytes} bytes for blocks of {layout.slot_bytes}. Make the pool with "
                "layout.slot_bytes."
            )
        with _typed_errors:
            checked = _csrc.SwapLayout(layout.pieces, layout.num_blocks, arena.data_ptr(), pool.slot_stride, pool.slots)
            self._backend: _Backend
            if layout.device.type == "cpu":
                self._backend = _HostSwap(checked, threads)
            elif _csrc.cuda_available():
                self._backend = _csrc.CudaSwap(checked, layout.device.index or 0, staging_bytes)
            else:
                self._backend = TorchSwap(layout, pool, checked, staging_bytes)
        self._on_gpu = layout.device.type == "cuda"
        pool.before_close(self._backend.synchronize)

    def swap_out(self, blocks: Ids, slots: Ids) -> Transfer:
        """Copy block `blocks[i]`, all layers, to slot `slots[i]` of the pool, for every i.

        Raises:
            SwapArgumentError: ids that are not whole numbers, out of range or given twice, or not one slot a block.
                Nothing was copied.
            PoolClosedError: the pool was closed.
            SwapDeviceError: CUDA reported an error.
        """
        return self._swap(True, blocks, slots)

    def swap_in(self, blocks: Ids, slots: Ids) -> Transfer:
        """Copy slot `slots[i]` of the pool to block `blocks[i]`, all layers, for every i. Raises as `swap_out` does."""
        return self._swap(False, blocks, slots)

    def _swap(self, out: bool, blocks: Ids, slots: Ids) -> Transfer:
        with self.pool.lock, _typed_errors:
            _ = self.pool.arena  # is it open?
            stream = torch.cuda.current_stream(self.layout.device).cuda_stream if self._on_gpu else 0
            return Transfer(self._backend.swap(out, _numbers("blocks", blocks), _numbers("slots", slots), stream))


class _TypedErrors:
    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError):
            raise SwapArgumentError(str(error)) from None
        if isinstance(error, RuntimeError):
            raise SwapDeviceError(str(error)) from error


_typed_errors = _TypedErrors()  # what the compiled part and CUDA raise, as Weft's


def _numbers(what: str, ids: Ids) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise SwapArgumentError(
            f"{what} are {array.dtype} of shape {array.shape}. Pass whole numbers in one dimension, e.g. a list of int."
        )
    return np.array(array, np.int64)  # a copy: nobody changes it between the check and the use


def _free_cpus() -> list[int]:
    """The CPUs for the kernel's threads.

    vLLM's CPU worker pins its threads one to a core, the calling one included, and they rest while blocks are swapped.
    """
    mine = os.sched_getaffinity(0)
    if len(mine) > 1:
        return sorted(mine)
    pinned = set(mine)
    for thread in Path("/proc/self/task").iterdir():
        try:
            cpus = os.sched_getaffinity(int(thread.name))
        except ProcessLookupError:
            continue  # it has ended meanwhile
        if len(cpus) == 1:
            pinned |= cpus
    return sorted(pinned)
