"""The swap in PyTorch alone: for a GPU where Weft was built without nvcc. The same slots, slower."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray

from weft._csrc import SwapLayout
from weft.engine.kv_cache.layout import CacheLayout
from weft.engine.kv_cache.pool import HostPool

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchTransfer:
    """A swap that PyTorch has put on the current stream."""

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
    """Gathers with `index_select`, one launch a piece, and copies each run of consecutive slots at once."""

    def __init__(self, layout: CacheLayout, pool: HostPool, checked: SwapLayout, staging_bytes: int) -> None:
        """`checked` is the same layout as the compiled part has checked it."""
        arena = pool.arena
        self._device = layout.device
        self._checked = checked
        # The widest word that divides every place and length: indexing single bytes is slow on a GPU.
        starts = [
            int(address) - cache.untyped_storage().data_ptr()
            for (address, _, _), cache in zip(layout.pieces, layout.caches, strict=True)
        ]
        self._word = math.gcd(8, pool.slot_stride, *starts, *layout.pieces[:, 1:].ravel().tolist())
        dtype = _WORDS[self._word]
        self._slots = arena.view(dtype)
        self._words = layout.slot_bytes // self._word
        self._at_once = max(1, staging_bytes // layout.slot_bytes)  # blocks
        self._pieces: list[tuple[torch.Tensor, slice]] = []
        at = 0
        for start, (_, stride, size), cache in zip(starts, layout.pieces.tolist(), layout.caches, strict=True):
            words = size // self._word
            view = torch.empty(0, dtype=dtype, device=self._device).set_(
                cache.untyped_storage(), start // self._word, (layout.num_blocks, words), (stride // self._word, 1)
            )
            self._pieces.append((view, slice(at, at + words)))
            at += words

    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], _stream: int = 0) -> TorchTransfer:
        """As `CudaSwap.swap`, on PyTorch's current stream."""
        self._checked.check(blocks, slots)
        order = np.argsort(slots)
        for begin in range(0, len(order), self._at_once):
            part = order[begin : begin + self._at_once]
            self._move(out, blocks[part], slots[part])
        return TorchTransfer(self._device)

    def _move(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        index = torch.from_numpy(blocks).to(self._device)
        staging = torch.empty(len(blocks), self._words, dtype=self._slots.dtype, device=self._device)
        if out:
            for view, place in self._pieces:
                staging[:, place] = view.index_select(0, index)
        for begin, end, slot in _runs(slots):
            host = self._slots[slot : slot + end - begin, : self._words]
            to, source = (host, staging[begin:end]) if out else (staging[begin:end], host)
            to.copy_(source, non_blocking=True)
        if not out:
            for view, place in self._pieces:
                view.index_copy_(0, index, staging[:, place])

    def synchronize(self) -> None:
        """Return when every swap so far is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _runs(slots: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Begin, end and first slot of each run of consecutive numbers in sorted `slots`."""
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return [(begin, end, int(slots[begin])) for begin, end in itertools.pairwise(cuts) if begin < end]
