"""The host memory that holds swapped-out KV blocks: one arena of fixed size, divided into slots."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Hashable

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import PoolClosedError, SwapArgumentError, SwapDeviceError, SwapError
from weft.engine.kv_cache.slots import SlotTable, SlotUsage

_ALIGN_BYTES = 64  # a cache line, which is also an alignment that every copy kernel handles well


class HostPool:
    """`slots` slots of `slot_bytes` bytes. One slot holds one block with all its layers (Autellix §5).

    The arena is reserved once and its size never changes. The system gives it memory when slots are first written, or
    at once if the arena is page-locked. No method waits for free slots: `allocate` returns None if there are too few,
    and the caller recomputes instead.

    Attributes:
        table: the owner of each slot.
        lock: held while a swap is done or handed to a GPU, and by `close`.
        slot_bytes: bytes of a block with all its layers.
        slot_stride: bytes from one slot to the next, `slot_bytes` rounded up to a multiple of 64.
    """

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        """Reserve the arena.

        Args:
            slots: the number of slots.
            slot_bytes: bytes of a block with all its layers, `CacheLayout.slot_bytes`.
            pinned: page-lock the arena. A GPU's copy engine needs that to copy while the GPU computes.

        Raises:
            SwapArgumentError: `slots` or `slot_bytes` is not positive.
            SwapDeviceError: `pinned` without a GPU, or CUDA refused (often for want of memory).
            SwapError: the system does not reserve so much address space.
        """
        self.table = SlotTable(slots)
        if slot_bytes < 1:
            raise SwapArgumentError(f"slot_bytes is {slot_bytes}. Pass the layout's slot_bytes, which is at least 1.")
        self.slot_bytes = slot_bytes
        self.slot_stride = -(-slot_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.lock = threading.Lock()
        self._before_close: list[Callable[[], None]] = []
        arena = _reserve(slots, self.slot_stride)
        if pinned:
            _pin(arena)
        self._arena: torch.Tensor | None = arena
        # Runs also for a pool that is never closed, because memory must not return to the system while a GPU maps it.
        self._release = weakref.finalize(self, _release, self._before_close, arena if pinned else None)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.table.slots

    @property
    def arena(self) -> torch.Tensor:
        """The memory, `(slots, slot_stride)` bytes. It stays as long as this tensor is referenced.

        Raises:
            PoolClosedError: the pool was closed.
        """
        if self._arena is None:
            raise PoolClosedError
        return self._arena

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._arena is None

    def allocate(self, owner: Hashable, count: int) -> NDArray[np.int64] | None:
        """Give `count` slots to `owner`.

        Returns:
            The slots' numbers, `(count,)`, or None if fewer are free.

        Raises:
            SwapArgumentError: `count` is not positive.
            PoolClosedError: the pool was closed.
        """
        _ = self.arena
        return self.table.allocate(owner, count)

    def free(self, owner: Hashable) -> int:
        """Free all slots of `owner` and return their number. Swaps are in order, so a swap may still be under way."""
        return self.table.free(owner)

    def owned(self, owner: Hashable) -> NDArray[np.int64]:
        """The slots of `owner`, `(n,)`, in the order in which they were allocated."""
        return self.table.owned(owner)

    def usage(self) -> SlotUsage:
        """How full the pool is, counted in slots."""
        return self.table.usage()

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or owned exactly once."""
        self.table.check_integrity()

    def before_close(self, call: Callable[[], None]) -> None:
        """Register `call`, which `close` makes before the arena goes. It must finish the copies that are under way."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish the swaps under way, return the memory to the system and forget all owners. May be called twice.

        Raises:
            SwapDeviceError: CUDA reported an error. The pool is closed nevertheless.
        """
        with self.lock:
            if self._arena is None:
                return
            try:
                self._release()
            except RuntimeError as error:
                raise SwapDeviceError(str(error)) from error
            finally:
                self._arena = None
                self.table = SlotTable(self.table.slots)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pin(arena: torch.Tensor) -> None:
    # torch's pin_memory() would round the size up to a power of two.
    if not torch.cuda.is_available():
        raise SwapDeviceError("memory is to be page-locked, and there is no GPU")
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
    if int(status) != 0:
        raise SwapDeviceError(f"page-locking {arena.numel() / 2**30:.2f} GiB of host memory: {status}")


def _release(before_close: list[Callable[[], None]], pinned: torch.Tensor | None) -> None:
    try:
        while before_close:
            before_close.pop()()
    finally:
        if pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())


def _reserve(slots: int, stride: int) -> torch.Tensor:
    """Zeroed memory, in pages of 2 MiB where the system has such pages, because a swap touches much memory at once."""
    size = slots * stride
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SwapError(f"{size / 2**30:.2f} GiB cannot be reserved ({error}). Give the pool fewer slots.") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
