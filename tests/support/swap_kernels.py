"""A Swapper for each backend, behind one interface for the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from unittest import mock

import swap_fake_cuda

from weft import _csrc
from weft.engine.kv_cache import CacheLayout, HostPool, Swapper, kernel
from weft.engine.kv_cache.kernel import TorchSwap


class Kernel:
    """A backend that moves blocks, by name: "host", "no compiled part", "torch", "torch on gpu", and "fake cuda" or
    "cuda" and a way. Without a way it chooses one for each call.
    """

    def __init__(self, name: str, fake: Callable[[], ctypes.CDLL]) -> None:
        self.name, _, way = name.partition(", ")
        self.way = way.replace(" ", "_") or "auto"
        self.device = "cuda" if self.name in ("cuda", "torch on gpu") else "cpu"
        self._fake = fake

    def pool(self, slots: int, slot_bytes: int) -> HostPool:
        return HostPool(slots, slot_bytes, pinned=self.device == "cuda")

    def swapper(self, layout: CacheLayout, pool: HostPool, staging_bytes: int = 8 << 20) -> Swapper:
        there = None if self.name == "no compiled part" else _csrc
        with mock.patch.object(kernel, "_csrc", there):
            swapper = Swapper(layout, pool, threads=3, staging_bytes=staging_bytes, way=self.way)
        checked = _csrc.SwapLayout(
            layout.pieces, layout.num_blocks, pool.arena.data_ptr(), pool.slot_stride, pool.slots
        )
        if self.name.startswith("torch"):
            swapper._backend = TorchSwap(layout, pool, checked, staging_bytes)
        elif self.name == "fake cuda":
            swapper._backend = swap_fake_cuda.FakeCudaSwap(
                self._fake(), layout, pool, checked, staging_bytes=staging_bytes, way=self.way
            )
            pool.before_close(swapper._backend.synchronize)
        return swapper
