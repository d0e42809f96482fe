"""The swap kernel: moves KV blocks between the engine's paged cache and a host pool, all of a step in one call."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import SwapArgumentError, SwapDeviceError
from weft.core.log import get_logger
from weft.engine.kv_cache.layout import CacheLayout
from weft.engine.kv_cache.pool import HostPool

_csrc: Any  # see src/weft/_csrc.pyi
try:
    _csrc = importlib.import_module("weft._csrc")
except ImportError as missing:  # built without it, or for another Python
    get_logger().warning("PyTorch copies KV, which is slower: the compiled part is missing", reason=str(missing))
    _csrc = None

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Numbers of blocks or of slots, in one dimension."""

_MAX_THREADS = 8  # more threads do not help, because the memory is the limit


class _BackendTransfer(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class _Backend(Protocol):
    def swap(
        self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], stream: int, beside_compute: bool
    ) -> _BackendTransfer | None: ...

    def synchronize(self) -> None: ...


class Transfer:
    """A swap that was begun. On a CPU it is done when the call returns, on a GPU some time later."""

    def __init__(self, backend: _BackendTransfer | None) -> None:
        """Only a `Swapper` makes transfers. `backend` is the copy under way, or None if it is done."""
        self._backend = backend

    def done(self) -> bool:
        """Whether every byte has arrived. Raises SwapDeviceError if CUDA reports an error."""
        with _typed_errors:
            return self._backend is None or self._backend.done()

    def wait(self) -> None:
        """Return when every byte has arrived. Raises SwapDeviceError if CUDA reports an error."""
        with _typed_errors:
            if self._backend is not None:
                self._backend.wait()


class _Check(Protocol):
    def check(self, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None: ...


class _PlainCheck(NamedTuple):
    """Refuses the numbers that the compiled part would refuse. It does not look for caches that overlap."""

    num_blocks: int
    num_slots: int

    def check(self, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        if len(blocks) != len(slots):
            raise ValueError(f"there are {len(blocks)} blocks and {len(slots)} slots. Pass one slot for each block.")
        for what, ids, limit in (("block", blocks, self.num_blocks), ("slot", slots, self.num_slots)):
            wrong = ids[(ids < 0) | (ids >= limit)]
            if wrong.size:
                raise ValueError(f"{what} {wrong[0]} is out of range: there are {limit}. Pass numbers from 0 on.")
            found, times = np.unique(ids, return_counts=True)
            if len(found) < len(ids):
                raise ValueError(f"{what} {found[times > 1][0]} appears twice in one call. Pass each at most once.")


class _HostSwap:
    """The host kernel. Its copies are done when `swap` returns."""

    def __init__(self, checked: Any, threads: int | None) -> None:
        cpus = _free_cpus()
        self._kernel = _csrc.HostSwap(checked, min(len(cpus), _MAX_THREADS) if threads is None else threads, cpus)

    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], _stream: int, _beside: bool) -> None:
        self._kernel.swap(out, blocks, slots)

    def synchronize(self) -> None:
        return


class Swapper:
    """The swap kernel for one layout and one pool (Autellix §4.2.2: gather, then one transfer).

    On a GPU `swap_out` and `swap_in` return at once. A swap runs after the work that is on PyTorch's current stream
    already, and before the work that this stream is given later. So the engine's blocks may be reused or read at once.
    With `beside_compute`, later work does not wait: leave the blocks alone until the `Transfer` is done, which then
    takes a way over the bus that needs no multiprocessors if there is a good one. On a CPU this makes no difference.
    Swaps run in the order of the calls, so slots may be given to other blocks at once, too. Call `Transfer.wait` before
    the pool's memory is read directly, and before a slot is given to another Swapper.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pool: HostPool,
        *,
        threads: int | None = None,
        staging_bytes: int = 32 << 20,
        way: Literal["auto", "kernels", "copy_engines"] = "auto",
    ) -> None:
        """Check that layout and pool fit each other, and choose the backend for the layout's device.

        Args:
            layout: of the engine's caches.
            pool: has slots of at least `layout.slot_bytes` bytes; pinned if the caches are on a GPU.
            threads: on a CPU, how many threads copy a batch of 4 MiB or more, 1 to 1024. None: one for each core that
                this process may use, at most 8.
            staging_bytes: on a GPU, the bytes of each of the two staging buffers there.
            way: on a GPU, whether kernels gather the pieces of blocks, or copy engines move each piece. By default each
                call takes the way that is faster for its size.

        Raises:
            SwapArgumentError: the pool's slots are too small, caches overlap each other or the pool, or there cannot be
                so many threads.
            SwapDeviceError: CUDA reported an error.
            PoolClosedError: the pool was closed.
        """
        self.layout = layout
        self.pool = pool
        _ = pool.arena  # raises PoolClosedError if the pool is closed
        if pool.slot_bytes < layout.slot_bytes:
            raise SwapArgumentError(
                f"the pool has slots of {pool.slot_bytes} bytes for blocks of {layout.slot_bytes}. Make the pool with "
                "slot_bytes=layout.slot_bytes."
            )
        with _typed_errors:
            self._backend = self._best_backend(threads, staging_bytes, way)
        self._on_gpu = layout.device.type == "cuda"
        pool.before_close(self._backend.synchronize)

    def _best_backend(self, threads: int | None, staging_bytes: int, way: str) -> _Backend:
        layout, pool = self.layout, self.pool
        if _csrc is None:
            return TorchSwap(layout, pool, _PlainCheck(layout.num_blocks, pool.slots), staging_bytes)
        checked = _csrc.SwapLayout(
            layout.pieces, layout.num_blocks, pool.arena.data_ptr(), pool.slot_stride, pool.slots
        )
        if layout.device.type == "cpu":
            return _HostSwap(checked, threads)
        if _csrc.cuda_available():
            on_gpu: _Backend = _csrc.CudaSwap(checked, layout.device.index or 0, staging_bytes, _csrc.GpuWay[way])
            return on_gpu
        return TorchSwap(layout, pool, checked, staging_bytes)

    def swap_out(self, blocks: Ids, slots: Ids, *, beside_compute: bool = False) -> Transfer:
        """Copy block `blocks[i]`, all layers, to slot `slots[i]` of the pool, for every i.

        Raises:
            SwapArgumentError: an id is not a whole number, is out of range or is given twice, or there are not as many
                slots as blocks. Nothing was copied.
            PoolClosedError: the pool was closed.
            SwapDeviceError: CUDA reported an error.
        """
        return self._swap(True, blocks, slots, beside_compute)

    def swap_in(self, blocks: Ids, slots: Ids, *, beside_compute: bool = False) -> Transfer:
        """Copy slot `slots[i]` of the pool to block `blocks[i]`, all layers, for every i. Raises as `swap_out` does."""
        return self._swap(False, blocks, slots, beside_compute)

    def _swap(self, out: bool, blocks: Ids, slots: Ids, beside_compute: bool) -> Transfer:
        with self.pool.lock, _typed_errors:
            _ = self.pool.arena  # raises PoolClosedError if the pool is closed
            stream = torch.cuda.current_stream(self.layout.device).cuda_stream if self._on_gpu else 0
            ids = _as_array("blocks", blocks), _as_array("slots", slots)
            return Transfer(self._backend.swap(out, *ids, stream, beside_compute))


class _TypedErrors:
    """Turns the errors of the compiled part, of PyTorch and of CUDA into Weft's."""

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError):
            raise SwapArgumentError(str(error)) from None
        if isinstance(error, RuntimeError):
            raise SwapDeviceError(str(error)) from error


_typed_errors = _TypedErrors()


def _as_array(what: str, ids: Ids) -> NDArray[np.int64]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise SwapArgumentError(
            f"{what} are {array.dtype} of shape {array.shape}. Pass whole numbers in one dimension, e.g. a list of int."
        )
    return np.array(array, np.int64)  # a copy, which the caller cannot change between the check and the use


def _free_cpus() -> list[int]:
    """The CPUs for the kernel's threads.

    They are the calling thread's CPUs, unless that thread is pinned to one. vLLM's CPU worker pins each of its threads
    to a core of its own, the calling thread included. These threads are idle while blocks are swapped, so then the
    cores of all pinned threads are used.
    """
    own = os.sched_getaffinity(0)
    if len(own) > 1:
        return sorted(own)
    pinned = set(own)
    for thread in Path("/proc/self/task").iterdir():
        try:
            cpus = os.sched_getaffinity(int(thread.name))
        except ProcessLookupError:
            continue  # the thread has ended
        if len(cpus) == 1:
            pinned |= cpus
    return sorted(pinned)


_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchTransfer:
    """A swap that was enqueued on PyTorch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class TorchSwap:
    """Gathers blocks with `index_select`, one launch for each piece, and copies each extent of slots at once."""

    def __init__(self, layout: CacheLayout, pool: HostPool, checked: _Check, staging_bytes: int) -> None:
        """`checked` checks the numbers of each call."""
        arena = pool.arena
        self._device = layout.device
        self._checked = checked
        # The widest word that divides every offset and length, because indexing single bytes is slow on a GPU.
        starts = [
            int(address) - cache.untyped_storage().data_ptr()
            for (address, _, _), cache in zip(layout.pieces, layout.caches, strict=True)
        ]
        word = math.gcd(8, pool.slot_stride, *starts, *layout.pieces[:, 1:].ravel().tolist())
        dtype = _DTYPES[word]
        self._slots = arena.view(dtype)
        self._slot_words = layout.slot_bytes // word
        self._staging_blocks = max(1, staging_bytes // layout.slot_bytes)
        self._pieces: list[tuple[torch.Tensor, slice]] = []  # each piece of every block, and its words in a slot
        offset = 0
        for start, (_, stride, size), cache in zip(starts, layout.pieces.tolist(), layout.caches, strict=True):
            words = size // word
            view = torch.empty(0, dtype=dtype, device=self._device).set_(
                cache.untyped_storage(), start // word, (layout.num_blocks, words), (stride // word, 1)
            )
            self._pieces.append((view, slice(offset, offset + words)))
            offset += words

    def swap(
        self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], _stream: int, _beside: bool
    ) -> TorchTransfer:
        """Swap as `CudaSwap.swap` does, but on PyTorch's current stream."""
        self._checked.check(blocks, slots)
        order = np.argsort(slots)
        for begin in range(0, len(order), self._staging_blocks):
            part = order[begin : begin + self._staging_blocks]
            self._move(out, blocks[part], slots[part])
        return TorchTransfer(self._device)

    def _move(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        index = torch.from_numpy(blocks).to(self._device)
        staging = torch.empty(len(blocks), self._slot_words, dtype=self._slots.dtype, device=self._device)
        if out:
            for view, words in self._pieces:
                staging[:, words] = view.index_select(0, index)
        for begin, end, slot in _extents(slots):
            host = self._slots[slot : slot + end - begin, : self._slot_words]
            to, source = (host, staging[begin:end]) if out else (staging[begin:end], host)
            to.copy_(source, non_blocking=True)
        if not out:
            for view, words in self._pieces:
                view.index_copy_(0, index, staging[:, words])

    def synchronize(self) -> None:
        """Return when all swaps so far are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _extents(slots: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Begin, end and first slot of each range of consecutive numbers in sorted `slots`."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(begin, end, int(slots[begin])) for begin, end in itertools.pairwise(cuts) if begin < end]
