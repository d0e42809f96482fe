"""The swap in PyTorch alone, for a GPU where Weft was built without nvcc. Slots hold the same bytes; it is slower."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from weft._csrc import SwapLayout
from weft.engine.kv_cache.layout import CacheLayout
from weft.engine.kv_cache.pool import HostPool

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

    def __init__(self, layout: CacheLayout, pool: HostPool, checked: SwapLayout, staging_bytes: int) -> None:
        """`checked` is the same layout, after the compiled part has checked it."""
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

    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], _stream: int = 0) -> TorchTransfer:
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
