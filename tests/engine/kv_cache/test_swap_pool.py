"""The host pool: memory of a fixed size, which exists until the pool is closed."""

from __future__ import annotations

import gc

import pytest
import torch

from weft.core.errors import PoolClosedError, SwapArgumentError, SwapDeviceError, SwapError
from weft.engine.kv_cache import HostPool

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_arena() -> None:
    """Slots are zeroed, begin on cache lines and have at least the size asked for."""
    with HostPool(5, 100) as pool:
        assert pool.arena.shape == (5, 128)
        assert pool.arena.dtype == torch.uint8
        assert pool.arena.data_ptr() % 64 == 0
        assert not pool.arena.any()
        assert (pool.slots, pool.slot_bytes, pool.slot_stride) == (5, 100, 128)


def test_closing() -> None:
    """The registered calls are made, the newest first. A closed pool gives nothing, and may be closed again."""
    pool = HostPool(5, 64)
    calls = []
    pool.before_close(lambda: calls.append(("first", pool.arena.shape)))
    pool.before_close(lambda: calls.append(("second", pool.arena.shape)))
    assert not pool.is_closed
    pool.close()
    pool.close()
    assert calls == [("second", (5, 64)), ("first", (5, 64))]
    assert pool.is_closed
    with pytest.raises(PoolClosedError):
        _ = pool.arena


def test_a_pool_that_is_never_closed() -> None:
    """The copies under way are finished before the memory of a forgotten pool goes."""
    calls = []
    pool = HostPool(5, 64)
    pool.before_close(lambda: calls.append("finished"))
    del pool
    gc.collect()
    assert calls == ["finished"]


def test_closing_after_an_error_of_cuda() -> None:
    """The pool is closed nevertheless, and CUDA's error is raised as a SwapDeviceError."""
    pool = HostPool(5, 64)

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    pool.before_close(fail)
    with pytest.raises(SwapDeviceError, match="an illegal memory access"):
        pool.close()
    assert pool.is_closed
    pool.close()


def test_the_arena_outlives_the_pool_while_it_is_referenced() -> None:
    """Closing the pool takes no memory from a copy that is under way."""
    pool = HostPool(5, 64)
    arena = pool.arena
    pool.close()
    arena.fill_(7)
    assert arena.sum() == 7 * 5 * 64


@pytest.mark.parametrize(("slots", "size"), [(0, 64), (-1, 64), (4, 0), (4, -1)])
def test_sizes_that_make_no_sense(slots: int, size: int) -> None:
    """A pool without slots, or with slots of no bytes, is refused."""
    with pytest.raises(SwapArgumentError):
        HostPool(slots, size)


@pytest.mark.parametrize("slots", [1 << 40, 1 << 60])
def test_more_memory_than_there_is(slots: int) -> None:
    """An arena that the system does not reserve is a typed error that names its size."""
    with pytest.raises(SwapError, match=r"GiB cannot be reserved .* fewer slots"):
        HostPool(slots, 1 << 12)


@no_gpu
def test_page_locked_without_a_gpu() -> None:
    """Without a GPU, a page-locked pool is refused."""
    with pytest.raises(SwapDeviceError, match="no GPU"):
        HostPool(4, 64, pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_page_locked() -> None:
    """The arena is page-locked while the pool is open, and its size is not rounded up."""
    pool = HostPool(5, 100, pinned=True)
    arena = pool.arena
    assert arena.is_pinned()
    assert arena.shape == (5, 128)
    pool.close()
    assert not arena.is_pinned()
