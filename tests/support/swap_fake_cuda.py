"""csrc/swap_cuda.cu on a fake GPU.

The source is compiled as C++ against fake_cuda/cuda_runtime.h. So the order that its streams, events and buffers
enforce is tested on machines without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft._csrc import SwapLayout
from weft.engine.kv_cache import CacheLayout, HostPool

CSRC = Path(__file__).parents[2] / "csrc"
FAKE = Path(__file__).parent / "fake_cuda"
Array = NDArray[np.int64]
WAYS = ("auto", "kernels", "copy_engines")  # in the order of the enum


def compiler() -> str | None:
    """The path of a C++ compiler, or None if this machine has none."""
    return shutil.which("c++") or shutil.which("g++")


def build(folder: Path, *others: Path) -> ctypes.CDLL:
    """Compile the library in `folder`, with other sources and the flags in $CXXFLAGS, and load it."""
    launches = re.compile(r"(\w+<\w+>)<<<(.*?)>>>\(", flags=re.DOTALL)
    source = launches.sub(r"fake::launch(\1, \2, ", (CSRC / "swap_cuda.cu").read_text())
    (folder / "swap_cuda.cpp").write_text(source)
    library = folder / "libfake.so"
    flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    command = [str(compiler()), *flags, f"-I{FAKE}", f"-I{CSRC}", "-o", str(library)]
    sources = (folder / "swap_cuda.cpp", FAKE / "shim.cpp", CSRC / "swap_validate.cpp", *others)
    subprocess.run([*command, *sources], check=True)
    fake = ctypes.CDLL(str(library))
    for name in ("swap_create", "swap_start"):
        getattr(fake, name).restype = ctypes.c_void_p
    return fake


def pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class FakeTransfer:
    """Stands in for `weft._csrc.CudaTransfer`."""

    def __init__(self, fake: ctypes.CDLL, handle: int) -> None:
        self.fake, self.handle = fake, ctypes.c_void_p(handle)

    def done(self) -> bool:
        return bool(self.fake.transfer_done(self.handle))

    def wait(self) -> None:
        self.fake.transfer_wait(self.handle)

    def __del__(self) -> None:
        self.fake.transfer_destroy(self.handle)


class FakeCudaSwap:
    """Stands in for `weft._csrc.CudaSwap`, for caches in host memory."""

    def __init__(
        self,
        fake: ctypes.CDLL,
        layout: CacheLayout,
        pool: HostPool,
        checked: SwapLayout,
        *,
        staging_bytes: int,
        way: str,
    ) -> None:
        self.fake = fake
        self.checked = checked
        sizes = (len(layout.pieces), layout.num_blocks, pool.arena.data_ptr(), pool.slot_stride, pool.slots)
        self.handle = ctypes.c_void_p(
            fake.swap_create(pointer(layout.pieces), *map(ctypes.c_int64, (*sizes, staging_bytes)), WAYS.index(way))
        )

    def swap(self, out: bool, blocks: Array, slots: Array, _stream: int, beside_compute: bool) -> FakeTransfer:
        self.checked.check(blocks, slots)
        ids = pointer(blocks), pointer(slots), ctypes.c_int64(len(blocks))
        return FakeTransfer(self.fake, self.fake.swap_start(self.handle, int(out), *ids, int(beside_compute)))

    def synchronize(self) -> None:
        self.fake.swap_synchronize(self.handle)

    def __del__(self) -> None:
        self.fake.swap_destroy(self.handle)
