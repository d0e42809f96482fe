"""The compiled extension (csrc/bindings.cpp). Use `weft.engine.kv_cache`, which takes tensors and raises Weft's errors.

Arrays are C-contiguous and of int64; addresses and sizes are in bytes. Arguments that fail validation raise ValueError,
and errors of CUDA raise RuntimeError.
"""

import enum

import numpy as np
from numpy.typing import NDArray

version: str
compiler: str
has_cuda: bool  # whether the CUDA part was built

class SwapLayout:
    """The layout of the cache and of the pool; its constructor validates it.

    Each of the `pieces`, `(n, 3)`, is an address in block 0, the bytes from block to block, and a size in bytes.
    """

    def __init__(
        self, pieces: NDArray[np.int64], num_blocks: int, pool: int, slot_stride: int, num_slots: int
    ) -> None: ...
    def check(self, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None: ...

class HostSwap:
    def __init__(self, layout: SwapLayout, threads: int, cpus: list[int]) -> None: ...
    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None: ...

# The next three classes exist if has_cuda.
class CudaTransfer:
    def done(self) -> bool: ...
    def wait(self) -> None: ...

class GpuWay(enum.Enum):
    """How the GPU's copies are made; `auto` chooses for each call."""

    auto = ...
    kernels = ...
    copy_engines = ...

class CudaSwap:
    def __init__(self, layout: SwapLayout, device: int, staging_bytes: int, way: GpuWay) -> None: ...
    def swap(
        self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], stream: int, beside_compute: bool
    ) -> CudaTransfer: ...
    def synchronize(self) -> None: ...

def cuda_available() -> bool: ...
