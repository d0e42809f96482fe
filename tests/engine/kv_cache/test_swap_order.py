"""The CUDA kernel's order: the engine finds the right bytes before and after a swap, whatever operations overlap."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_kernels import Kernel
from swap_reference import ORDERS, strided

from weft.engine.kv_cache import HostPool, Swapper, Transfer, describe
from weft.engine.kv_cache.slot_plans import Executed, SwapBatch, SwapPlan
from weft.engine.kv_cache.worker import SwapWorker

SHAPE = strided("LBHNC", torch.uint8, [12, 6, 1, 1, 48], ORDERS["LBHNC"])  # so many pieces that both ways are chosen
SLOTS = 8


class Engine:
    """An engine that never waits: its reads and writes are in its stream, between the swaps.

    Attributes:
        expected: the caches' memory as it would be if every operation were done at once.
        slots: the contents of each slot as they would be; empty if the slot was never written.
    """

    def __init__(self, fake: ctypes.CDLL, swapper: Swapper, memory: torch.Tensor) -> None:
        self.fake, self.swapper, self.memory = fake, swapper, memory
        self.expected = memory.clone()
        self.slots = {slot: torch.empty(0, dtype=torch.uint8) for slot in range(SLOTS)}
        self.reads: list[tuple[torch.Tensor, torch.Tensor]] = []  # the memory as read, and as expected
        self.written: list[torch.Tensor] = []  # kept alive until the stream has copied it
        self.beside: list[Transfer] = []  # swaps whose blocks must be left alone

    def write(self, seed: int) -> None:
        self._wait()
        self.written.append(SHAPE.memory(seed))
        self._copy(self.memory, self.written[-1])
        self.expected = self.written[-1].clone()

    def read(self) -> None:
        self._wait()
        self.reads.append((torch.empty_like(self.memory), self.expected.clone()))
        self._copy(self.reads[-1][0], self.memory)

    def swap_out(self, blocks: list[int], slots: list[int], beside: bool) -> None:
        self._begun(self.swapper.swap_out(blocks, slots, beside_compute=beside), beside)
        for block, slot in zip(blocks, slots, strict=True):
            self.slots[slot] = torch.cat([cache[block].flatten() for cache in SHAPE.caches(self.expected).values()])

    def swap_in(self, blocks: list[int], slots: list[int], beside: bool) -> None:
        self._begun(self.swapper.swap_in(blocks, slots, beside_compute=beside), beside)
        for block, slot in zip(blocks, slots, strict=True):
            for cache, page in zip(SHAPE.caches(self.expected).values(), self.slots[slot].split(48), strict=True):
                cache[block] = page.view(1, 1, 48)

    def finish(self) -> None:
        self._wait()
        self.fake.engine_synchronize()

    def _begun(self, transfer: Transfer, beside: bool) -> None:
        if beside:
            self.beside.append(transfer)

    def _wait(self) -> None:
        while self.beside:
            self.beside.pop().wait()

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source))
        self.fake.engine_copy(*addresses, ctypes.c_int64(to.numel()))


@given(data=st.data())
@settings(max_examples=300)
def test_on_a_fake_gpu(fake_cuda: ctypes.CDLL, data: st.DataObject) -> None:
    """In whatever order the streams make progress, reads and slots hold the bytes of a sequential execution."""
    fake_cuda.fake_seed(data.draw(st.integers(0, 2**32 - 1)))
    memory = SHAPE.memory(seed=0)
    layout = describe(SHAPE.caches(memory), SHAPE.blocks)
    with HostPool(SLOTS, layout.slot_bytes) as pool:
        kernel = Kernel(
            data.draw(st.sampled_from(["fake cuda", "fake cuda, kernels", "fake cuda, copy engines"])),
            lambda: fake_cuda,
        )
        engine = Engine(fake_cuda, kernel.swapper(layout, pool, data.draw(st.sampled_from([100, 300, 5000]))), memory)
        try:
            for number in range(data.draw(st.integers(1, 8))):
                blocks = data.draw(st.permutations(range(SHAPE.blocks)))[: data.draw(st.integers(1, SHAPE.blocks))]
                beside = data.draw(st.booleans())
                match data.draw(st.sampled_from(["write", "read", "out", "in"])):
                    case "write":
                        engine.write(seed=1 + number)
                    case "read":
                        engine.read()
                    case "out":
                        engine.swap_out(blocks, data.draw(st.permutations(range(SLOTS)))[: len(blocks)], beside)
                    case "in":
                        written = [slot for slot, content in engine.slots.items() if len(content)]
                        slots = data.draw(st.permutations(written))[: len(blocks)]
                        engine.swap_in(blocks[: len(slots)], slots, beside)
        finally:
            engine.finish()
        assert all(torch.equal(seen, expected) for seen, expected in engine.reads)
        assert torch.equal(memory, engine.expected)
        engine.swapper._backend.synchronize()
        for slot, content in engine.slots.items():
            assert torch.equal(pool.arena[slot, : len(content)], content)


@pytest.mark.parametrize("way", ["kernels", "copy engines"])
def test_the_engine_waits_only_for_its_own_swaps(fake_cuda: ctypes.CDLL, way: str) -> None:
    """Its stream waits until a swap has written the cache, and does not wait for a swap that is beside compute."""
    memory = SHAPE.memory(seed=0)
    before = memory.clone()
    layout = describe(SHAPE.caches(memory), SHAPE.blocks)
    blocks = list(range(SHAPE.blocks))
    with HostPool(SLOTS, layout.slot_bytes) as pool:
        swapper = Kernel(f"fake cuda, {way}", lambda: fake_cuda).swapper(layout, pool, 100)
        swapper.swap_out(blocks, blocks).wait()
        waited = {True: 0, False: 0}
        for seed in range(20):
            for beside in waited:
                memory[:-16] = 0  # all bytes except those after the last layer
                fake_cuda.fake_seed(seed)
                transfer = swapper.swap_in(blocks, blocks, beside_compute=beside)
                fake_cuda.engine_synchronize()
                waited[beside] += torch.equal(memory, before)
                transfer.wait()
                assert torch.equal(memory, before)
    assert waited[False] == 20
    assert waited[True] < 20


def test_one_way_waits_for_the_other(fake_cuda: ctypes.CDLL) -> None:
    """Blocks that kernels write beside compute can be copied out by copy engines at once."""
    shape = strided("LBHNC", torch.uint8, [100, 6, 1, 1, 16], ORDERS["LBHNC"])  # in by kernels, out by copy engines
    memory = shape.memory(seed=0)
    layout = describe(shape.caches(memory), shape.blocks)
    blocks, others = [*range(6)], [*range(6, 12)]
    counts = (ctypes.c_int * 2)()
    with HostPool(12, layout.slot_bytes) as pool:
        swapper = Kernel("fake cuda", lambda: fake_cuda).swapper(layout, pool)
        for seed in range(20):
            fake_cuda.fake_seed(seed)
            pool.arena[:6] = seed
            fake_cuda.fake_counts(counts)
            swapper.swap_in(blocks, blocks, beside_compute=True)
            fake_cuda.fake_counts(counts)
            assert list(counts) == [1, 1]
            swapper.swap_out(blocks, others, beside_compute=True).wait()
            fake_cuda.fake_counts(counts)
            assert list(counts) == [0, 600]
            assert torch.equal(pool.arena[6:], pool.arena[:6])


@pytest.mark.parametrize(
    ("pinned", "driver", "launches", "copies"), [(True, 13000, 0, 4), (True, 12040, 0, 4), (False, 13000, 1, 1)]
)
def test_few_pieces_go_by_copy_engines(
    fake_cuda: ctypes.CDLL, pinned: bool, driver: int, launches: int, copies: int
) -> None:
    """Blocks that lie side by side in the cache and in the pool are one copy; pageable memory needs large copies."""
    memory = torch.arange(64 * 16, dtype=torch.uint8).view(16, 64).clone()
    layout = describe({"cache": memory}, 16)
    fake_cuda.fake_pinned(pinned)
    fake_cuda.fake_driver(driver)
    counts = (ctypes.c_int * 2)()
    try:
        with HostPool(SLOTS, layout.slot_bytes) as pool:
            swapper = Kernel("fake cuda", lambda: fake_cuda).swapper(layout, pool)
            fake_cuda.fake_counts(counts)
            blocks, slots = [9, 2, 3, 4, 14, 13], [3, 0, 1, 2, 4, 5]
            swapper.swap_out(blocks, slots).wait()
            assert torch.equal(pool.arena[slots, :64], memory[blocks])
    finally:
        fake_cuda.fake_pinned(1)
        fake_cuda.fake_driver(13000)
    fake_cuda.fake_counts(counts)
    assert list(counts) == [launches, copies]


KIB = 1 << 10


@pytest.mark.parametrize(
    ("wins", "pieces", "extents", "kib", "out", "beside"),
    [
        (True, 1, 1, 16, True, False),
        (False, 1, 1, 2048, True, False),  # the engine goes on while the bytes cross the bus
        (True, 1, 1, 2048, False, False),
        (True, 16, 1, 64, False, False),
        (False, 256, 1, 16, False, False),
        (True, 256, 256, 16, False, False),  # scattered slots leave nothing to gain
        (False, 1024, 1, 256, True, False),
        (True, 256, 1, 2048, False, False),
        (True, 256, 1, 2048, True, True),
        (True, 1024, 1, 16, True, True),
        (True, 256, 1, 16, False, True),
        (False, 1024, 1, 16, False, True),
    ],
)
def test_the_rule(
    fake_cuda: ctypes.CDLL, *, wins: bool, pieces: int, extents: int, kib: int, out: bool, beside: bool
) -> None:
    """Copy engines win with few or large pieces, and beside compute with nearly all, as on the H100."""
    total = ctypes.c_int64(pieces * kib * KIB)
    sizes = ctypes.c_int64(pieces), ctypes.c_int64(extents), total
    assert fake_cuda.copy_engines_win(*sizes, int(out), int(beside)) == wins


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["torch on gpu", "cuda", "cuda, kernels", "cuda, copy engines"])
def test_on_a_gpu(name: str) -> None:
    """Blocks may be overwritten and read right after the call, because the swap keeps its position in the stream."""
    kernel = Kernel(name, lambda: pytest.skip("not the fake GPU"))
    shape = strided("LBHNC", torch.bfloat16, [8, 256, 8, 16, 256], ORDERS["LBHNC"])
    memory = shape.memory(seed=0, device="cuda")
    before = memory.clone()
    layout = describe(shape.caches(memory), shape.blocks)
    blocks = list(range(shape.blocks))
    with kernel.pool(shape.blocks, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        for _ in range(10):
            swapper.swap_out(blocks, blocks[::-1])
            memory[:-32] = 0  # all bytes except those after the last layer
            swapper.swap_in(blocks, blocks[::-1])
            assert torch.equal(memory, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["torch on gpu", "cuda", "cuda, kernels", "cuda, copy engines"])
def test_beside_compute_on_a_gpu(name: str) -> None:
    """A swap beside compute comes after earlier work on the stream, and its bytes have arrived when it is done."""
    kernel = Kernel(name, lambda: pytest.skip("not the fake GPU"))
    shape = strided("LBHNC", torch.bfloat16, [8, 256, 8, 16, 256], ORDERS["LBHNC"])
    before = shape.memory(seed=0, device="cuda")
    memory = torch.zeros_like(before)
    layout = describe(shape.caches(memory), shape.blocks)
    blocks = list(range(shape.blocks))
    matrix = torch.rand(4096, 4096, device="cuda")
    with kernel.pool(shape.blocks, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        for turn in range(10):
            memory.copy_(before + turn)
            transfer = swapper.swap_out(blocks, blocks[::-1], beside_compute=True)
            matrix @ matrix
            transfer.wait()
            memory[:-32] = 0  # all bytes except those after the last layer
            transfer = swapper.swap_in(blocks, blocks[::-1], beside_compute=True)
            matrix @ matrix
            transfer.wait()
            assert torch.equal(memory, before + turn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_worker_copies_beside_steps_on_a_gpu() -> None:
    """What goes out and comes back beside matrix products is right, and a step that waits for a copy finds it done."""
    cache = torch.randn(64, 2, 16, 8, 64, device="cuda")
    before, matrix = cache.clone(), torch.randn(4096, 4096, device="cuda")
    worker = SwapWorker({"layer": cache}, 64, 64)
    try:
        assert worker.copies_beside
        out = SwapBatch(list(range(32)), list(range(32)))
        worker.swap_out(SwapPlan(spill=out, number=1))
        matrix = matrix @ matrix
        assert worker.take_done(wait=True) == (Executed(1),)
        cache[:32] = 0
        worker.swap_out(SwapPlan(fetch=SwapBatch(out.blocks[::-1], out.slots), number=2))
        matrix = matrix @ matrix
        worker.swap_out(SwapPlan(waits_for=2, number=3))
        assert torch.equal(cache[:32], before[:32].flip(0))
        assert worker.take_done() == (Executed(2),)
        assert torch.equal(cache[32:], before[32:])
    finally:
        worker.close()
