"""The pool of host memory, and who has its slots."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import PoolClosedError, SwapArgumentError, SwapDeviceError, SwapError


class SlotUsage(NamedTuple):
    """How full a table of slots is."""

    slots: int
    used: int
    peak: int  # most slots that were ever in use at once
    owners: int
    free_extents: int  # ranges of consecutive free slots; more than 1 means fragmentation


class SlotTable:
    """Slots 0 to `slots` - 1, each of them free or with one owner.

    Free slots are kept as extents, in bins by the power of two of their length. An extent that is freed is joined with
    its free neighbours. `allocate` and `free` take time in the number of extents that they touch, mostly one, whatever
    the size of the table. Consecutive slots matter because they cross the bus in one copy (Autellix §4.2.2).
    """

    def __init__(self, slots: int) -> None:
        """Raises SwapArgumentError if `slots` is not positive."""
        if slots < 1:
            raise SwapArgumentError(f"a table of {slots} slots holds nothing. Give it at least 1.")
        self.slots = slots
        self.used = 0
        self.peak = 0
        self._owned: dict[Hashable, list[range]] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(slots.bit_length())]  # starts of free extents
        self._filled = 0  # bit i is set if bin i has extents
        self._starts: dict[int, range] = {}  # every free extent by its start
        self._ends: dict[int, range] = {}  # every free extent by its stop
        self._add(range(slots))

    def allocate(self, owner: Hashable, count: int) -> NDArray[np.int64] | None:
        """Give `count` slots to `owner`, in addition to those that it has. Never waits.

        Returns:
            The slots' numbers, `(count,)`, or None if fewer are free. They are consecutive if there is a free extent in
            a bin all of whose extents are long enough.

        Raises:
            SwapArgumentError: `count` is not positive.
        """
        taken = self._take(owner, count)
        if taken is None:
            return None
        self._owned.setdefault(owner, []).extend(taken)
        return _numbers(taken)

    def allocate_each(self, count: int) -> list[int] | None:
        """As `allocate`, but each slot has itself as its owner, so that it can be freed alone."""
        taken = self._take("allocate_each", count)
        if taken is None:
            return None
        slots = [slot for extent in taken for slot in extent]
        self._owned.update({slot: [range(slot, slot + 1)] for slot in slots})
        return slots

    def _take(self, owner: Hashable, count: int) -> list[range] | None:
        if count < 1:
            raise SwapArgumentError(f"{owner!r} asks for {count} slots. Ask for at least 1.")
        if count > self.slots - self.used:
            return None
        taken = []
        left = count
        while left:
            # Every extent in bin i has at least 2**i slots. Take the first bin all of whose extents are long enough. If
            # there is none, take the last bin, which has the longest extents.
            fitting = self._filled & -1 << (left - 1).bit_length()
            index = (fitting & -fitting if fitting else self._filled).bit_length() - 1
            extent = self._remove(self._starts[next(reversed(self._bins[index]))])
            part, rest = extent[:left], extent[left:]
            if rest:
                self._add(rest)
            taken.append(part)
            left -= len(part)
        self.used += count
        self.peak = max(self.peak, self.used)
        return taken

    def free(self, owner: Hashable) -> int:
        """Free all slots of `owner` and return their number, 0 if it has none."""
        extents = self._owned.pop(owner, [])
        for extent in extents:
            before, after = self._ends.get(extent.start), self._starts.get(extent.stop)
            start = self._remove(before).start if before else extent.start
            stop = self._remove(after).stop if after else extent.stop
            self._add(range(start, stop))
        count = sum(map(len, extents))
        self.used -= count
        return count

    def owned(self, owner: Hashable) -> NDArray[np.int64]:
        """The slots of `owner`, `(n,)`, in the order in which they were allocated."""
        return _numbers(self._owned.get(owner, []))

    def usage(self) -> SlotUsage:
        """How full the table is."""
        return SlotUsage(self.slots, self.used, self.peak, len(self._owned), len(self._ends))

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is free or owned exactly once, and all indices agree. For tests."""
        free = list(self._starts.values())
        owned = [extent for extents in self._owned.values() for extent in extents]
        stop = 0
        for extent in sorted(free + owned, key=lambda extent: extent.start):
            if extent.start != stop or not extent:
                low, high = sorted((stop, extent.start))
                raise SwapError(f"slots {low} to {high} are lost or owned twice")
            stop = extent.stop
        if stop != self.slots or sum(map(len, owned)) != self.used or self.used > self.peak:
            raise SwapError(f"the count of {self.used} slots of {self.slots} (peak {self.peak}) is wrong: {owned}")
        if {extent.start for extent in free} & {extent.stop for extent in free}:
            raise SwapError(f"free neighbours were not joined: {free}")
        if self._ends != {extent.stop: extent for extent in free} or not all(self._owned.values()):
            raise SwapError("the index of free extents is wrong, or an owner has no slots")
        for index, starts in enumerate(self._bins):
            if bool(starts) != bool(self._filled >> index & 1) or set(starts) != {
                extent.start for extent in free if _bin(extent) == index
            }:
                raise SwapError(f"bin {index} is wrong: {starts}")

    def _add(self, extent: range) -> None:
        index = _bin(extent)
        self._bins[index][extent.start] = None
        self._filled |= 1 << index
        self._starts[extent.start] = self._ends[extent.stop] = extent

    def _remove(self, extent: range) -> range:
        index = _bin(extent)
        del self._bins[index][extent.start], self._starts[extent.start], self._ends[extent.stop]
        if not self._bins[index]:
            self._filled &= ~(1 << index)
        return extent


def _bin(extent: range) -> int:
    return len(extent).bit_length() - 1


def _numbers(extents: list[range]) -> NDArray[np.int64]:
    return np.concatenate(
        [np.arange(extent.start, extent.stop, dtype=np.int64) for extent in extents] or [np.empty(0, np.int64)]
    )


_ALIGN_BYTES = 64  # a cache line, which is also an alignment that every copy kernel handles well


def stride_of(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class HostPool:
    """`slots` slots of `slot_bytes` bytes. One slot holds one block with all its layers (Autellix §5).

    The arena is reserved once and its size never changes. The system gives it memory when slots are first written, or
    at once if the arena is page-locked. No method waits for free slots: `allocate` returns None if there are too few,
    and the caller recomputes instead.

    Attributes:
        table: the owner of each slot.
        lock: held while a swap is done or handed to a GPU, and by `close`.
        slot_bytes: bytes of a block with all its layers.
        slot_stride: bytes from one slot to the next: `slot_bytes` rounded up to a multiple of 64, or what `arena` has.
    """

    def __init__(self, slots: int, slot_bytes: int, *, pinned: bool = False, arena: torch.Tensor | None = None) -> None:
        """Reserve the arena.

        Args:
            slots: the number of slots.
            slot_bytes: bytes of a block with all its layers, `CacheLayout.slot_bytes`.
            pinned: page-lock the arena. A GPU's copy engine needs that to copy while the GPU computes.
            arena: memory to use, `(slots, stride)` bytes, whose slots may be larger; None: allocate new memory.

        Raises:
            SwapArgumentError: `slots` or `slot_bytes` is not positive.
            SwapDeviceError: `pinned` without a GPU, or CUDA refused (often for want of memory).
            SwapError: the system does not reserve so much address space.
        """
        self.table = SlotTable(slots)
        if slot_bytes < 1:
            raise SwapArgumentError(f"slot_bytes is {slot_bytes}. Pass the layout's slot_bytes, which is at least 1.")
        self.slot_bytes = slot_bytes
        self.lock = threading.Lock()
        self._before_close: list[Callable[[], None]] = []
        arena = _reserve(slots, stride_of(slot_bytes)) if arena is None else arena
        self.slot_stride = arena.shape[1]
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
