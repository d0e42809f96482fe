"""The plain reference: KV caches as PyTorch sees them, and a swap as one `copy_` for each block of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]

# The layouts of vLLM 0.32's KVCacheLayout: the order in memory of layers, blocks, heads, tokens (N) and content.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass(frozen=True)
class Shape:
    """KV caches as views of one piece of memory, with more bytes around them. `caches` makes the views."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of one layer's view
    strides: tuple[int, ...]  # in elements
    layer_step: int  # elements from one layer's view to the next's
    layers: int
    block_dim: int
    kernel_blocks: int  # blocks of the view in one of the scheduler's blocks
    before: int  # elements before the first layer
    total: int  # elements

    @property
    def blocks(self) -> int:
        return self.sizes[self.block_dim] // self.kernel_blocks

    def memory(self, seed: int, device: str = "cpu") -> torch.Tensor:
        """Random bytes for all layers and for what is around them."""
        generator = torch.Generator().manual_seed(seed)
        size = self.total * self.dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)

    def caches(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The layers' views of `memory`, as vLLM registers them."""
        flat = memory.view(self.dtype)
        return {
            f"layers.{i}": torch.as_strided(flat, self.sizes, self.strides, self.before + i * self.layer_step)
            for i in range(self.layers)
        }


def copy_blocks(shape: Shape, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks layer by layer: for each pair, block `pair[0]` of `source` to block `pair[1]` of `target`."""
    k = shape.kernel_blocks
    for layer, cache in shape.caches(source).items():
        into = shape.caches(target)[layer]
        for block, other in pairs:
            into.narrow(shape.block_dim, other * k, k).copy_(cache.narrow(shape.block_dim, block * k, k))


def strided(
    name: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    order: Sequence[int],
    *,
    kernel_blocks: int = 1,
    padding: int = 0,
    before: int = 0,
    block_dim: int = 0,
) -> Shape:
    """Views of sizes `[layers, ...]` whose dimensions lie in memory in the given order, the outermost first.

    Each block is followed by `padding` elements. `block_dim` counts the dimensions without the layers, so in `sizes` it
    is dimension `block_dim + 1`.
    """
    strides = [0] * len(sizes)
    step = 1
    for dim in reversed(order):
        if dim == block_dim + 1:
            step += padding
        strides[dim] = step
        step *= sizes[dim]
    return Shape(
        name, dtype, tuple(sizes[1:]), tuple(strides[1:]), strides[0], sizes[0], block_dim, kernel_blocks, before,
        before + step + 16,
    )  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Every layout of vLLM 0.32, the older ones, MLA, GQA head counts, kernel blocks, padded pages and odd sizes."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from([*ORDERS, "MLA", "K and V outside", "K and V inside"]))
    layers, blocks, kernel_blocks = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 1, 2, 3])),
    )
    heads, tokens = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 16]))
    content = draw(st.one_of(st.integers(1, 9), st.sampled_from([64, 512])))
    extra = {"before": draw(st.sampled_from([0, 1, 16])), "padding": draw(st.sampled_from([0, 0, 1, 16]))}
    rows = blocks * kernel_blocks
    if kind == "MLA":
        return strided(kind, dtype, [layers, rows, tokens, content], range(4), kernel_blocks=kernel_blocks, **extra)
    if kind == "K and V outside":  # (2, blocks, tokens, heads, size)
        sizes = [layers, 2, rows, tokens, heads, content]
        return strided(kind, dtype, sizes, range(6), kernel_blocks=kernel_blocks, block_dim=1, **extra)
    if kind == "K and V inside":
        sizes = [layers, rows, 2, tokens, heads, content]
        return strided(kind, dtype, sizes, range(6), kernel_blocks=kernel_blocks, **extra)
    if kind[0] == "B":  # vLLM has no kernel blocks if a block is not one dense page
        rows, kernel_blocks = blocks, 1
    sizes = [layers, rows, heads, tokens, content]
    return strided(kind, dtype, sizes, ORDERS[kind], kernel_blocks=kernel_blocks, **extra)


@st.composite
def batches(draw: st.DrawFn, shape: Shape, slots: int) -> tuple[list[int], list[int], list[int]]:
    """Blocks to swap out, their slots, and other blocks to swap them in to: distinct, in any order."""
    count = draw(st.integers(0, min(shape.blocks, slots)))
    blocks, targets = (draw(st.permutations(range(shape.blocks)))[:count] for _ in range(2))
    return blocks, draw(st.permutations(range(slots)))[:count], targets
