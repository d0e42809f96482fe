"""The engine's KV caches as the kernel sees them: a list of pieces, contiguous bytes that every block has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import SwapArgumentError

_MAX_PIECES = 1 << 16  # of one layer; a cache with more is split into single elements


@dataclass(frozen=True)
class CacheLayout:
    """Where the blocks of some KV caches lie in memory.

    A block consists of pieces. Each piece is contiguous, and layers that lie side by side are one piece. A slot holds
    a block's pieces in the order of their caches' memory, which is that of the caches, and then of their addresses.
    So a process that has the same caches at other addresses can read what this one has written into a slot.

    Attributes:
        device: the device of all caches.
        num_blocks: blocks in each cache, as the scheduler numbers them.
        pieces: `(n, 3)`; for each piece its address in block 0, the bytes from block to block, and its size in bytes.
        caches: for each piece the tensor that it lies in. The reference keeps the tensor's memory.
    """

    device: torch.device
    num_blocks: int
    pieces: NDArray[np.int64]
    caches: tuple[torch.Tensor, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block with all its layers."""
        return int(self.pieces[:, 2].sum())


def describe(caches: Mapping[str, torch.Tensor], num_blocks: int, *, block_dim: int = 0) -> CacheLayout:
    """The layout of the caches of one KV cache group, as vLLM's `register_kv_caches` hands them over.

    In every layout of vLLM 0.32 (`KVCacheLayout`: heads or tokens first, heads outside blocks, layers inside blocks,
    MLA) each layer is a strided view `(num_blocks, heads, tokens, content)`. Older layouts are strided views too, such
    as `(2, num_blocks, ...)` with `block_dim=1`. Any dtype and any order of strides can be described.

    Args:
        caches: the caches by layer name. A cache that several layers share is moved once.
        num_blocks: the number of blocks that the scheduler knows. In a cache with k times as many, each of the
            scheduler's blocks consists of k kernel blocks.
        block_dim: the dimension that counts blocks.

    Raises:
        SwapArgumentError: there are no caches, they are on different or unknown devices, the length of the block
            dimension is not a multiple of `num_blocks`, or elements share memory.
    """
    if not caches or num_blocks < 1:
        raise SwapArgumentError(f"{len(caches)} caches of {num_blocks} blocks hold nothing. Pass what vLLM registered.")
    devices = {cache.device for cache in caches.values()}
    if len(devices) > 1 or (device := devices.pop()).type not in ("cpu", "cuda"):
        raise SwapArgumentError(
            f"the caches are on {', '.join(sorted({str(cache.device) for cache in caches.values()}))}. Describe the "
            "caches of one CPU or one GPU at a time."
        )
    pieces: dict[tuple[int, int, int], torch.Tensor] = {}
    for name, cache in caches.items():
        pieces.update(dict.fromkeys(_pieces(name, cache, num_blocks, block_dim), cache))
    joined: list[list[int]] = []
    owners: list[torch.Tensor] = []
    memory = {each: number for number, each in enumerate(dict.fromkeys(map(_memory_of, caches.values())))}
    for (address, stride, size), cache in sorted(
        pieces.items(), key=lambda item: (memory[_memory_of(item[1])], item[0])
    ):
        if (
            joined
            and joined[-1][1] == stride
            and joined[-1][0] + joined[-1][2] == address
            and _memory_of(owners[-1]) == _memory_of(cache)
        ):
            joined[-1][2] += size
        else:
            joined.append([address, stride, size])
            owners.append(cache)
    return CacheLayout(device, num_blocks, np.array(joined, np.int64), tuple(owners))


def _pieces(name: str, cache: torch.Tensor, num_blocks: int, block_dim: int) -> list[tuple[int, int, int]]:
    """Address in block 0, block stride and bytes of each contiguous piece of one cache."""
    if cache.layout is not torch.strided or not -cache.ndim <= block_dim < cache.ndim or not cache.numel():
        raise SwapArgumentError(
            f"cache {name!r} is {cache.layout} of shape {tuple(cache.shape)}, which has no blocks in dimension "
            f"{block_dim}. Pass a dense tensor and the dimension that counts blocks."
        )
    size = cache.element_size()
    dims = [(step * size, count) for step, count in zip(cache.stride(), cache.shape, strict=True)]
    step, count = dims.pop(block_dim)
    if count % num_blocks:
        raise SwapArgumentError(
            f"cache {name!r} has {count} blocks in dimension {block_dim}, which is no multiple of {num_blocks}. Pass "
            "the number of blocks of this cache's group."
        )
    kernel_blocks = count // num_blocks
    dims = sorted(dim for dim in [*dims, (step, kernel_blocks)] if dim[1] > 1)
    piece_bytes = size
    while dims and dims[0][0] == piece_bytes:
        piece_bytes *= dims.pop(0)[1]
    if any(stride < piece_bytes for stride, _ in dims) or math.prod(count for _, count in dims) > _MAX_PIECES:
        raise SwapArgumentError(
            f"cache {name!r} of shape {tuple(cache.shape)} and strides {cache.stride()} has elements that share "
            "memory, or too few that lie side by side. Pass the cache itself, not an expanded or sliced view."
        )
    offsets = np.zeros(1, np.int64)
    for stride, count in dims:
        offsets = np.add.outer(np.arange(count) * stride, offsets).ravel()
    return [(cache.data_ptr() + offset, step * kernel_blocks, piece_bytes) for offset in offsets.tolist()]


def _memory_of(cache: torch.Tensor) -> int:
    return int(cache.untyped_storage().data_ptr())
