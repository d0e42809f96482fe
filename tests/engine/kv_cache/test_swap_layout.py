"""Descriptions of KV caches: as few pieces as possible, and no byte that belongs to two of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from swap_reference import ORDERS, strided

from weft import _csrc
from weft.core.errors import SwapArgumentError
from weft.engine.kv_cache import HostPool, Swapper, describe

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 4, 10, 3, 16, 32
PAGE = HEADS * TOKENS * CONTENT * 2  # bytes, of float16

# How many pieces a block has in each layout, and how many bytes each piece has.
PIECES = {
    "LBHNC": (LAYERS, PAGE),
    "LBNHC": (LAYERS, PAGE),
    "LHBNC": (LAYERS * HEADS, PAGE // HEADS),
    "BLHNC": (1, LAYERS * PAGE),
    "BLNHC": (1, LAYERS * PAGE),
    "BHLNC": (1, LAYERS * PAGE),
}


@pytest.mark.parametrize("name", ORDERS)
def test_pieces_of_vllms_layouts(name: str) -> None:
    """Each layout has as few pieces as possible: layers and heads that lie side by side are one piece."""
    shape = strided(name, torch.float16, [LAYERS, BLOCKS, HEADS, TOKENS, CONTENT], ORDERS[name])
    layout = describe(shape.caches(shape.memory(seed=0)), BLOCKS)
    count, size = PIECES[name]
    assert layout.pieces[:, 2].tolist() == [size] * count
    assert layout.slot_bytes == LAYERS * PAGE


def test_the_cpu_workers_caches() -> None:
    """vLLM's CPU worker has one contiguous tensor a layer, `(blocks, heads, 128, 2 * head size)`: one piece a layer."""
    caches = {f"layers.{i}": torch.zeros(9, 3, 128, 128, dtype=torch.bfloat16) for i in range(5)}
    layout = describe(caches, 9)
    assert sorted(layout.pieces.tolist()) == sorted([cache.data_ptr(), 98304, 98304] for cache in caches.values())
    assert (layout.device, layout.num_blocks, layout.slot_bytes) == (torch.device("cpu"), 9, 5 * 98304)


def test_older_layouts() -> None:
    """Keys and values outside of blocks are two pieces; inside of blocks they are one; MLA has one piece."""
    flash = describe({"a": torch.zeros(2, 7, 16, 2, 8)}, 7, block_dim=1)
    assert flash.pieces[:, 1:].tolist() == [[1024, 1024], [1024, 1024]]
    assert describe({"a": torch.zeros(2, 7, 16, 2, 8)}, 7, block_dim=-4).slot_bytes == 2048
    assert describe({"a": torch.zeros(7, 2, 16, 2, 8)}, 7).pieces[:, 1:].tolist() == [[2048, 2048]]
    assert describe({"a": torch.zeros(7, 16, 72)}, 7).pieces[:, 1:].tolist() == [[4608, 4608]]


def test_kernel_blocks() -> None:
    """In a cache with four times the scheduler's blocks, a block consists of four kernel blocks."""
    layout = describe({"a": torch.zeros(28, 16, 8)}, 7)
    assert layout.pieces[:, 1:].tolist() == [[4 * 512, 4 * 512]]
    apart = describe({"a": torch.zeros(28, 16, 16)[:, :, :8]}, 7)
    assert len(apart.pieces) == 4 * 16


def test_padded_pages() -> None:
    """The padding between two blocks belongs to no piece."""
    layout = describe({"a": torch.zeros(7, 100)[:, :64]}, 7)
    assert layout.pieces[:, 1:].tolist() == [[400, 256]]


def test_layers_that_share_a_cache_are_moved_once() -> None:
    """Models that reuse an earlier layer's KV register the same tensor under both names."""
    cache = torch.zeros(7, 64)
    assert len(describe({"a": cache, "b": cache, "c": cache.view(7, 8, 8)}, 7).pieces) == 1


def test_neighbours_of_different_tensors_stay_apart() -> None:
    """Only pieces of one tensor's memory are joined, because the memory of another tensor may be freed."""
    memory = np.zeros(256, np.uint8)
    caches = {"a": torch.from_numpy(memory[:128]).view(1, 128), "b": torch.from_numpy(memory[128:]).view(1, 128)}
    assert len(describe(caches, 1).pieces) == 2


GOOD = torch.zeros(7, 64)
BAD_CACHES = [
    ({}, 7, 0, "0 caches of 7 blocks"),
    ({"a": GOOD}, 0, 0, "1 caches of 0 blocks"),
    ({"a": GOOD.to("meta")}, 7, 0, "the caches are on meta"),
    ({"a": GOOD, "b": GOOD.to("meta")}, 7, 0, "the caches are on cpu, meta"),
    ({"a": GOOD.to_sparse()}, 7, 0, "cache 'a' is torch.sparse_coo"),
    ({"a": GOOD}, 7, 2, "no blocks in dimension 2"),
    ({"a": GOOD}, 7, -3, "no blocks in dimension -3"),
    ({"a": torch.zeros(7, 0)}, 7, 0, "of shape (7, 0)"),
    ({"a": torch.zeros(())}, 1, 0, "of shape ()"),
    ({"a": GOOD}, 6, 0, "has 7 blocks in dimension 0, which is no multiple of 6"),
    ({"a": GOOD}, 14, 0, "has 7 blocks in dimension 0"),
    ({"a": GOOD.unsqueeze(1).expand(7, 3, 64)}, 7, 0, "elements that share memory"),
    ({"a": GOOD.as_strided((5, 3, 16), (64, 8, 1))}, 5, 0, "elements that share memory"),
    ({"a": torch.zeros(2, 70_000, 2)[:, :, 0]}, 2, 0, "too few that lie side by side"),
]


@pytest.mark.parametrize(("caches", "blocks", "dim", "message"), BAD_CACHES)
def test_bad_caches(caches: dict[str, torch.Tensor], blocks: int, dim: int, message: str) -> None:
    """A cache that does not have so many blocks is refused. The error names it and says what to pass instead."""
    with pytest.raises(SwapArgumentError) as caught:
        describe(caches, blocks, block_dim=dim)
    assert message in str(caught.value)


@pytest.mark.parametrize("caches", [
    {"a": GOOD[:1].expand(7, 64)},
    {"a": GOOD.as_strided((5, 64), (32, 1))},
    {"a": GOOD.view(-1)[:384].view(6, 64), "b": GOOD.view(-1)[32:416].view(6, 64)},
    {"a": GOOD, "b": GOOD.view(-1)[:-8].as_strided((7, 8), (60, 1))},
])  # fmt: skip
def test_overlapping_blocks_are_refused(caches: dict[str, torch.Tensor]) -> None:
    """Two blocks or two layers that share memory would be written twice, so they are refused."""
    layout = describe(caches, len(caches["a"]))
    with HostPool(4, layout.slot_bytes) as pool, pytest.raises(SwapArgumentError, match="overlap"):
        Swapper(layout, pool)


def test_the_pool_must_not_be_the_cache() -> None:
    """A cache inside the pool's arena is refused."""
    with HostPool(8, 256) as pool:
        layout = describe({"a": pool.arena[2:4, :64]}, 2)
        with pytest.raises(SwapArgumentError, match="pool overlaps the cache"):
            Swapper(layout, pool)


def test_slots_must_hold_a_block() -> None:
    """A pool whose slots are one byte too small is refused, although rounding up has added that byte."""
    layout = describe({"a": torch.zeros(7, 64, dtype=torch.uint8)}, 7)
    with HostPool(4, 63) as pool, pytest.raises(SwapArgumentError, match="slots of 63 bytes for blocks of 64"):
        Swapper(layout, pool)


def check(pieces: list[tuple[int, int, int]], blocks: int, pool: int, slot_stride: int, slots: int) -> str:
    """The compiled part's error for a layout; empty if it accepts the layout."""
    try:
        _csrc.SwapLayout(np.array(pieces, np.int64).reshape(-1, 3), blocks, pool, slot_stride, slots)
    except ValueError as error:
        return str(error)
    return ""


@given(
    pieces=st.lists(
        st.tuples(st.integers(1000, 1100), st.sampled_from([0, 1, 7, 20, 20, 20, 33, 45, 60]), st.integers(1, 12)),
        min_size=1,
        max_size=4,
    ),
    blocks=st.integers(1, 20),
    pool=st.integers(900, 1500),
)
def test_overlap_is_found_exactly(pieces: list[tuple[int, int, int]], blocks: int, pool: int) -> None:
    """A layout is refused if and only if a byte belongs to two pieces, to two blocks, or to a block and the pool."""
    stride = sum(size for _, _, size in pieces) + 1
    owners = Counter(
        byte
        for address, step, size in pieces
        for block in range(blocks)
        for byte in range(address + block * step, address + block * step + size)
    )
    owners.update(range(pool, pool + 2 * stride))
    assert bool(check(pieces, blocks, pool, stride, 2)) == (max(owners.values()) > 1)


@given(
    first=st.tuples(st.integers(0, 300), st.integers(1, 70), st.integers(1, 9)),
    second=st.tuples(st.integers(0, 300), st.integers(1, 70), st.integers(1, 9)),
    blocks=st.integers(2, 60),
)
def test_overlap_of_pieces_with_different_strides(
    first: tuple[int, int, int], second: tuple[int, int, int], blocks: int
) -> None:
    """Two pieces that repeat at different distances are refused if and only if they meet somewhere."""
    pieces = [(1000 + address, max(stride, size), size) for address, stride, size in (first, second)]
    bytes_of = [
        {byte for block in range(blocks) for byte in range(at + block * step, at + block * step + size)}
        for at, step, size in pieces
    ]
    assert bool(check(pieces, blocks, 1 << 20, 64, 1)) == bool(bytes_of[0] & bytes_of[1])


def test_the_check_takes_no_longer_for_more_blocks() -> None:
    """With 2^40 blocks, trying block after block would not end. These pieces meet never, or only in the last blocks."""
    blocks, far = 1 << 40, 1 << 60
    assert check([(96, 6, 1), (97, 9, 1)], blocks, far, 64, 1) == ""  # 6k = 1 + 9j has no solution
    assert "overlap" in check([(96, 6, 1), (99, 9, 1)], blocks, far, 64, 1)
    one_before = (96 + (blocks - 2) * 1_000_003 - (blocks - 2) * 1_000_000, 1_000_000, 1)
    assert "overlap" in check([(96, 1_000_003, 1), one_before], blocks, far * 4, 64, 1)
    layout = _csrc.SwapLayout(np.array([(96, 6, 1), (97, 9, 1)], np.int64), blocks, far, 64, blocks)
    layout.check(np.array([blocks - 1, 0]), np.array([0, blocks - 1]))
    with pytest.raises(ValueError, match="appears twice"):
        layout.check(np.array([5, 0, 5]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="appears twice"):
        layout.check(np.array([5, blocks - 1, 5]), np.array([0, 1, 2]))


@pytest.mark.parametrize("threads", [-1, 0, 1025, 2**31 - 1])
def test_a_number_of_threads_that_makes_no_sense(threads: int) -> None:
    """So many threads are refused before any is started."""
    layout = describe({"a": GOOD}, 7)
    with HostPool(4, layout.slot_bytes) as pool, pytest.raises(SwapArgumentError, match=f"{threads} threads"):
        Swapper(layout, pool, threads=threads)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (([], 1, 4096, 64, 1), "nothing to swap"),
        (([(64, 64, 64)], 0, 4096, 64, 1), "nothing to swap"),
        (([(64, 64, 64)], 1, 4096, 64, 0), "nothing to swap"),
        (([(64, 64, 64)], 1, 4096, 63, 1), "a slot of the pool has 63 bytes"),
        (([(64, 64, 64)], 1, 0, 64, 1), "the pool does not lie in the address space"),
        (([(64, 64, 64)], 1, 2**62, 2**40, 2**40), "the pool does not lie in the address space"),
        (([(0, 64, 64)], 1, 4096, 64, 1), "does not lie in the address space"),
        (([(64, -64, 64)], 1, 4096, 64, 1), "does not lie in the address space"),
        (([(64, 64, 0)], 1, 4096, 64, 1), "does not lie in the address space"),
        (([(64, 2**40, 64)], 2**40, 4096, 64, 1), "does not lie in the address space"),
        (([(-64, 64, 64)], 1, 4096, 64, 1), "does not lie in the address space"),
        (([(64, 64, 2**62)] * 2, 1, 4096, 64, 1), "exceed the address space"),
    ],
)
def test_numbers_that_make_no_sense(
    layout: tuple[list[tuple[int, int, int]], int, int, int, int], message: str
) -> None:
    """The compiled part checks every size and address, and refuses impossible ones before it touches memory."""
    assert message in check(*layout)
