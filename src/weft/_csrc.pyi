"""The compiled extension (csrc/bindings.cpp). Use `weft.engine.swap`, which takes tensors and raises Weft's errors.

Everything here takes C-contiguous int64 arrays; addresses and sizes are in bytes. What does not fit raises ValueError,
what CUDA reports RuntimeError.
"""

import numpy as np
from numpy.typing import NDArray

version: str
compiler: str
has_cuda: bool  # whether the CUDA part was built

class SwapLayout:
    """Pieces `(n, 3)`: address in block 0, bytes from block to block, bytes. Checked when it is made."""

    def __init__(
        self, pieces: NDArray[np.int64], num_blocks: int, pool: int, slot_stride: int, num_slots: int
    ) -> None: ...
    def check(self, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None: ...

class HostSwap:
    def __init__(self, layout: SwapLayout, threads: int, cpus: list[int]) -> None: ...
    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None: ...

# The next two are there if has_cuda.
class CudaTransfer:
    def done(self) -> bool: ...
    def wait(self) -> None: ...

class CudaSwap:
    def __init__(self, layout: SwapLayout, device: int, staging_bytes: int) -> None: ...
    def swap(self, out: bool, blocks: NDArray[np.int64], slots: NDArray[np.int64], stream: int) -> CudaTransfer: ...
    def synchronize(self) -> None: ...

def cuda_available() -> bool: ...
