"""The pool of host memory, and which of its slots are free."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable

import torch

from weft.core.errors import PoolClosedError, SwapArgumentError, SwapDeviceError, SwapError


class SlotTable:
    """Slots 0 to `slots` - 1, each of them free or taken.

    Free slots are kept as extents, in bins by the power of two of their length. An extent that is freed is joined with
    its free neighbours. `allocate` and `free` take time in the number of extents that they touch, mostly one, whatever
    the size of the table. Consecutive slots matter because they cross the bus in one copy (Autellix §4.2.2).

    Attributes:
        peak: The most slots that were ever taken at once.
    """

    def __init__(self, slots: int) -> None:
        """Raises SwapArgumentError if `slots` is not positive."""
        if slots < 1:
            raise SwapArgumentError(f"a table of {slots} slots holds nothing. Give it at least 1.")
        self.slots = slots
        self.peak = 0
        self._taken: set[int] = set()
        self._bins: list[dict[int, None]] = [{} for _ in range(slots.bit_length())]  # starts of free extents
        self._filled = 0  # bit i is set if bin i has extents
        self._starts: dict[int, range] = {}  # every free extent by its start
        self._ends: dict[int, range] = {}  # every free extent by its stop
        self._add(range(slots))

    @property
    def used(self) -> int:
        """How many slots are taken."""
        return len(self._taken)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` slots, at least 1 (SwapArgumentError); None if fewer are free. They are consecutive if there is
        a free extent in a bin all of whose extents are long enough."""
        if count < 1:
            raise SwapArgumentError(f"{count} slots are asked for. Ask for at least 1.")
        if count > self.slots - self.used:
            return None
        taken: list[int] = []
        while left := count - len(taken):
            # Every extent in bin i has at least 2**i slots. Take the first bin all of whose extents are long enough. If
            # there is none, take the last bin, which has the longest extents.
            fitting = self._filled & -1 << (left - 1).bit_length()
            index = (fitting & -fitting if fitting else self._filled).bit_length() - 1
            extent = self._remove(self._starts[next(reversed(self._bins[index]))])
            taken += extent[:left]
            if rest := extent[left:]:
                self._add(rest)
        self._taken.update(taken)
        self.peak = max(self.peak, self.used)
        return taken

    def free(self, slot: int) -> None:
        """Free a slot that is taken."""
        self._taken.remove(slot)
        before, after = self._ends.get(slot), self._starts.get(slot + 1)
        start = self._remove(before).start if before else slot
        stop = self._remove(after).stop if after else slot + 1
        self._add(range(start, stop))

    def check_integrity(self) -> None:
        """Raise SwapError unless every slot is either free or taken, and all indices agree. For tests."""
        free = list(self._starts.values())
        if sorted([*self._taken, *itertools.chain.from_iterable(free)]) != list(range(self.slots)):
            raise SwapError(f"slots are lost, or free and taken: {free} of {self.slots} are free, {self._taken} taken")
        if self.used > self.peak:
            raise SwapError(f"{self.used} slots are taken, and at most {self.peak} ever were")
        if {extent.start for extent in free} & {extent.stop for extent in free}:
            raise SwapError(f"free neighbours were not joined: {free}")
        if self._ends != {extent.stop: extent for extent in free}:
            raise SwapError("the index of free extents is wrong")
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


_ALIGN_BYTES = 64  # a cache line, which is also an alignment that every copy kernel handles well


def stride_of(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class HostPool:
    """`slots` slots of `slot_bytes` bytes. One slot holds one block with all its layers (Autellix §5).

    The arena is reserved once and its size never changes. The system gives it memory when slots are first written, or
    at once if the arena is page-locked. A `SlotTable` says which slots are free, in another process than the arena's.

    Attributes:
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
        if slots < 1 or slot_bytes < 1:
            raise SwapArgumentError(f"{slots} slots of {slot_bytes} bytes hold nothing. Pass 1 or more of both.")
        self.slots = slots
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

    def before_close(self, call: Callable[[], None]) -> None:
        """Register `call`, which `close` makes before the arena goes. It must finish the copies that are under way."""
        self._before_close.append(call)

    def close(self) -> None:
        """Finish the swaps under way and return the memory to the system. May be called twice.

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
