"""The host memory that swapped-out KV blocks lie in: one arena of fixed size, cut into slots."""

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

_ALIGN = 64  # bytes: a cache line, and what every copy kernel likes


class HostPool:
    """`slots` slots of `slot_bytes` bytes; one slot takes one block with all its layers (Autellix §5).

    The arena is reserved once and its size never changes. The system gives it memory as slots are first written, or at
    once where it is page-locked. Nothing here waits: a full pool says so, and whoever asked recomputes instead.

    Attributes:
        table: which slot is whose.
        lock: held while a swap is done or handed to a GPU, and by `close`.
        slot_bytes: bytes of a block with all its layers.
        slot_stride: bytes from one slot to the next, `slot_bytes` rounded up to 64.
    """

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool = False) -> None:
        """Reserve the arena.

        Args:
            slots: how many.
            slot_bytes: of one slot; `CacheLayout.slot_bytes`.
            pinned: page-lock the arena, as a GPU's copy engine needs it to work beside the engine.

        Raises:
            SwapArgumentError: a size that is not positive.
            SwapDeviceError: `pinned` without a GPU, or CUDA refused (often: too little memory).
            SwapError: the address space is not to be had.
        """
        self.table = SlotTable(slots)
        if slot_bytes < 1:
            raise SwapArgumentError(f"slots of {slot_bytes} bytes. Pass the layout's slot_bytes.")
        self.slot_bytes = slot_bytes
        self.slot_stride = -(-slot_bytes // _ALIGN) * _ALIGN
        self.lock = threading.Lock()
        self._before_close: list[Callable[[], None]] = []
        arena = _reserve(slots, self.slot_stride)
        if pinned:
            _pin(arena)
        self._arena: torch.Tensor | None = arena
        # Also for a pool that nobody closes: memory must not go back to the system while a GPU has it mapped.
        self._release = weakref.finalize(self, _release, self._before_close, arena if pinned else None)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.table.slots

    @property
    def arena(self) -> torch.Tensor:
        """`(slots, slot_stride)` bytes. Its memory stays as long as somebody holds this.

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
        """Give `count` slots to `owner`: their numbers `(count,)`, or None if fewer are free.

        Raises:
            SwapArgumentError: `count` is not positive.
            PoolClosedError: the pool was closed.
        """
        _ = self.arena
        return self.table.allocate(owner, count)

    def free(self, owner: Hashable) -> int:
        """Take back all slots of `owner`; how many that were. Swaps are in order, so one under way is no hindrance."""
        return self.table.free(owner)

    def owned(self, owner: Hashable) -> NDArray[np.int64]:
        """The slots of `owner`, `(n,)`, in the order in which it got them."""
        return self.table.owned(owner)

    def usage(self) -> SlotUsage:
        """How full the pool is, in slots of `slot_stride` bytes."""
        return self.table.usage()

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or owned exactly once."""
        self.table.check_integrity()

    def before_close(self, call: Callable[[], None]) -> None:
        """Have `call` made before the arena goes, by those who copy after they have returned."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish the swaps under way, give the memory back and forget all owners. Closing twice is no fault.

        Raises:
            SwapDeviceError: CUDA reported an error. The pool is closed all the same.
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
    # Not torch's pin_memory(): its allocator rounds up to a power of two.
    if not torch.cuda.is_available():
        raise SwapDeviceError("there is no GPU to page-lock memory for")
    status = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
    if int(status) != 0:
        raise SwapDeviceError(f"page-locking {arena.numel() / 2**30:.2f} GiB: {status}")


def _release(before_close: list[Callable[[], None]], pinned: torch.Tensor | None) -> None:
    try:
        while before_close:
            before_close.pop()()
    finally:
        if pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())


def _reserve(slots: int, stride: int) -> torch.Tensor:
    """Zeroed memory in pages of 2 MiB where the system has them: a swap touches much of it at once."""
    size = slots * stride
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SwapError(f"{size / 2**30:.2f} GiB cannot be reserved ({error}). Give the pool fewer slots.") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
