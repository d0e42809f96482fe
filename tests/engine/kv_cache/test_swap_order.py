"""The CUDA kernel's order: the engine finds the right bytes before and after a swap, whatever operations overlap."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_kernels import Kernel
from swap_reference import ORDERS, strided

from weft.engine.kv_cache import HostPool, Swapper, describe

SHAPE = strided("LBHNC", torch.uint8, [2, 6, 1, 1, 48], ORDERS["LBHNC"])
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

    def write(self, seed: int) -> None:
        self.written.append(SHAPE.memory(seed))
        self._copy(self.memory, self.written[-1])
        self.expected = self.written[-1].clone()

    def read(self) -> None:
        self.reads.append((torch.empty_like(self.memory), self.expected.clone()))
        self._copy(self.reads[-1][0], self.memory)

    def swap_out(self, blocks: list[int], slots: list[int]) -> None:
        self.swapper.swap_out(blocks, slots)
        for block, slot in zip(blocks, slots, strict=True):
            self.slots[slot] = torch.cat([cache[block].flatten() for cache in SHAPE.caches(self.expected).values()])

    def swap_in(self, blocks: list[int], slots: list[int]) -> None:
        self.swapper.swap_in(blocks, slots)
        for block, slot in zip(blocks, slots, strict=True):
            for cache, page in zip(SHAPE.caches(self.expected).values(), self.slots[slot].split(48), strict=True):
                cache[block] = page.view(1, 1, 48)

    def finish(self) -> None:
        self.fake.engine_synchronize()

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
        kernel = Kernel("fake cuda", lambda: fake_cuda)
        engine = Engine(fake_cuda, kernel.swapper(layout, pool, data.draw(st.sampled_from([100, 300, 5000]))), memory)
        try:
            for number in range(data.draw(st.integers(1, 8))):
                blocks = data.draw(st.permutations(range(SHAPE.blocks)))[: data.draw(st.integers(1, SHAPE.blocks))]
                match data.draw(st.sampled_from(["write", "read", "out", "in"])):
                    case "write":
                        engine.write(seed=1 + number)
                    case "read":
                        engine.read()
                    case "out":
                        engine.swap_out(blocks, data.draw(st.permutations(range(SLOTS)))[: len(blocks)])
                    case "in":
                        written = [slot for slot, content in engine.slots.items() if len(content)]
                        slots = data.draw(st.permutations(written))[: len(blocks)]
                        engine.swap_in(blocks[: len(slots)], slots)
        finally:
            engine.finish()
        assert all(torch.equal(seen, expected) for seen, expected in engine.reads)
        assert torch.equal(memory, engine.expected)
        engine.swapper._backend.synchronize()
        for slot, content in engine.slots.items():
            assert torch.equal(pool.arena[slot, : len(content)], content)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["torch on gpu", "cuda"])
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
