"""The swap kernels against the plain reference: equal bit by bit, for any layout and any order of blocks."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from swap_kernels import Kernel
from swap_reference import ORDERS, batches, copy_blocks, shapes, strided

from weft.core.errors import PoolClosedError, SwapArgumentError, SwapDeviceError
from weft.engine.kv_cache import HostPool, Swapper, describe

SLOTS = 12
MODEL = strided("LBHNC", torch.bfloat16, [4, 64, 3, 128, 128], ORDERS["LBHNC"])  # 4 of SmolLM2's 30 layers
SMALL = strided("LBHNC", torch.bfloat16, [2, 64, 3, 16, 16], ORDERS["LBHNC"])  # as many blocks


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_round_trip(kernel: Kernel, data: st.DataObject) -> None:
    """Swapping out and in to other blocks gives what the reference copies there, and changes nothing else."""
    shape = data.draw(shapes())
    blocks, slots, targets = data.draw(batches(shape, SLOTS))
    before = shape.memory(seed=len(blocks), device=kernel.device)
    memory, expected = before.clone(), before.clone()
    copy_blocks(shape, before, expected, list(zip(blocks, targets, strict=True)))
    layout = describe(shape.caches(memory), shape.blocks, block_dim=shape.block_dim)
    with kernel.pool(SLOTS, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool, staging_bytes=data.draw(st.sampled_from([1, 10_000, 1 << 20])))
        swapper.swap_out(blocks, slots).wait()
        assert torch.equal(memory, before)
        untouched = [slot for slot in range(SLOTS) if slot not in slots]
        assert not pool.arena[untouched].any()
        swapper.swap_in(targets, slots).wait()
        assert torch.equal(memory, expected)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_all_kernels_fill_slots_alike(kernel: Kernel, data: st.DataObject) -> None:
    """Every kernel writes the same bytes to a slot: the layout's pieces, in order."""
    shape = data.draw(shapes())
    blocks, slots, _ = data.draw(batches(shape, SLOTS))
    memory = shape.memory(seed=0, device=kernel.device)
    layout = describe(shape.caches(memory), shape.blocks, block_dim=shape.block_dim)
    with kernel.pool(SLOTS, layout.slot_bytes) as pool:
        kernel.swapper(layout, pool).swap_out(blocks, slots).wait()
        for block, slot in zip(blocks, slots, strict=True):
            starts = layout.pieces[:, 0] - memory.data_ptr() + block * layout.pieces[:, 1]
            pieces = [memory[a : a + n] for a, n in zip(starts.tolist(), layout.pieces[:, 2].tolist(), strict=True)]
            assert torch.equal(pool.arena[slot, : layout.slot_bytes], torch.cat(pieces).cpu())


def test_large_batch(kernel: Kernel) -> None:
    """A batch that is divided over several threads or buffers arrives complete, also when it overwrites another one."""
    rng = np.random.default_rng(0)
    before = MODEL.memory(seed=0, device=kernel.device)
    memory, expected = before.clone(), before.clone()
    layout = describe(MODEL.caches(memory), MODEL.blocks)
    with kernel.pool(MODEL.blocks, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool, staging_bytes=1 << 20)
        for _ in range(3):
            blocks, slots, targets = (rng.permutation(MODEL.blocks)[:24] for _ in range(3))
            source = expected.clone()
            copy_blocks(MODEL, source, expected, list(zip(blocks.tolist(), targets.tolist(), strict=True)))
            swapper.swap_out(blocks, slots)
            swapper.swap_in(targets, slots).wait()
            assert torch.equal(memory, expected)


def test_many_small_blocks(kernel: Kernel) -> None:
    """A batch with more blocks than one launch of the CUDA kernel takes arrives complete."""
    shape = strided("MLA", torch.float16, [2, 3000, 1, 24], range(4))
    before = shape.memory(seed=0, device=kernel.device)
    memory = before.clone()
    layout = describe(shape.caches(memory), shape.blocks)
    order = np.random.default_rng(0).permutation(shape.blocks)
    with kernel.pool(shape.blocks, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        swapper.swap_out(order, np.arange(shape.blocks)).wait()
        memory[: 2 * 3000 * 48] = 0
        swapper.swap_in(order, np.arange(shape.blocks)).wait()
    assert torch.equal(memory, before)


def test_layers_apart_and_of_different_kinds(kernel: Kernel) -> None:
    """Layers in separate tensors, with different dtypes and page sizes, make up one block together."""
    generator = torch.Generator().manual_seed(0)
    caches = {
        "a": torch.rand(7, 2, 16, 8, generator=generator).to(kernel.device),
        "b": torch.rand(7, 16, 9, generator=generator).to(kernel.device, torch.bfloat16),
        "c": torch.rand(21, 4, generator=generator).to(kernel.device, torch.float16),  # three kernel blocks each
    }
    before = {name: cache.clone() for name, cache in caches.items()}
    layout = describe(caches, 7)
    assert layout.slot_bytes == 2 * 16 * 8 * 4 + 16 * 9 * 2 + 3 * 4 * 2
    with kernel.pool(3, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        swapper.swap_out([6, 0], [0, 2])
        swapper.swap_in([1, 2], [2, 0]).wait()
    for name, cache in caches.items():
        expected = before[name].unflatten(0, (7, -1)).clone()
        expected[1], expected[2] = expected[0].clone(), expected[6].clone()
        assert torch.equal(cache, expected.view(cache.shape))


BAD_IDS = [
    ([0, 1], [0, 0], "slot 0 appears twice"),
    ([1, 1], [0, 1], "block 1 appears twice"),
    ([64], [0], "block 64 is out of range: there are 64"),
    ([-1], [0], "block -1 is out of range"),
    ([0], [12], "slot 12 is out of range: there are 12"),
    ([0, 1], [0], "2 blocks and 1 slots"),
    ([0.0], [0], "blocks are float64 of shape (1,)"),
    ([0], [True], "slots are bool"),
    ([[0]], [0], "blocks are int64 of shape (1, 1)"),
    ([2**63], [0], "out of range"),
    ([2**70], [0], "blocks are object"),
    (np.array(["a"]), [0], "blocks are <U1"),
]


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(("blocks", "slots", "message"), BAD_IDS)
def test_bad_batches_copy_nothing(kernel: Kernel, out: bool, blocks: list[int], slots: list[int], message: str) -> None:
    """Ids that are out of range, given twice, unpaired or no integers raise a typed error, and no byte has moved."""
    before = SMALL.memory(seed=0, device=kernel.device)
    memory = before.clone()
    layout = describe(SMALL.caches(memory), SMALL.blocks)
    with kernel.pool(SLOTS, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        with pytest.raises(SwapArgumentError) as caught:
            (swapper.swap_out if out else swapper.swap_in)(blocks, slots)
        assert message in str(caught.value)
        assert torch.equal(memory, before)
        assert not pool.arena.any()


def test_nothing_to_move(kernel: Kernel) -> None:
    """An empty batch is allowed, and done at once."""
    layout = describe(SMALL.caches(SMALL.memory(seed=0, device=kernel.device)), SMALL.blocks)
    with kernel.pool(SLOTS, layout.slot_bytes) as pool:
        transfer = kernel.swapper(layout, pool).swap_out([], [])
        transfer.wait()
        assert transfer.done()


def test_closed_pool(kernel: Kernel) -> None:
    """A closed pool refuses swaps in both directions, and a new Swapper."""
    layout = describe(SMALL.caches(SMALL.memory(seed=0, device=kernel.device)), SMALL.blocks)
    pool = kernel.pool(SLOTS, layout.slot_bytes)
    swapper = kernel.swapper(layout, pool)
    swapper.swap_out([3], [4])
    pool.close()
    for swap in (swapper.swap_out, swapper.swap_in):
        with pytest.raises(PoolClosedError):
            swap([3], [4])
    with pytest.raises(PoolClosedError):
        Swapper(layout, pool)


def test_ids_of_any_whole_kind(kernel: Kernel) -> None:
    """Lists, tuples, ranges, arrays of any integer type and stride, and tensors are all accepted as ids."""
    memory = SMALL.memory(seed=0, device=kernel.device)
    layout = describe(SMALL.caches(memory), SMALL.blocks)
    with kernel.pool(SLOTS, layout.slot_bytes) as pool:
        swapper = kernel.swapper(layout, pool)
        swapper.swap_out([1, 2, 3], [0, 1, 2]).wait()
        expected = pool.arena[:3].clone()
        kinds = [
            (1, 2, 3),
            range(1, 4),
            np.array([1, 2, 3], np.uint8),
            np.arange(1, 7)[::2] // 2 + 1,
            torch.tensor([1, 2, 3]),
        ]
        for ids in kinds:
            pool.arena.zero_()
            swapper.swap_out(ids, np.array([0, 1, 2], np.int32)).wait()
            assert torch.equal(pool.arena[:3], expected)


class BrokenDevice:
    """A GPU that reports an error, in `swap` or later, and records the ids that it was given."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.given: list[NDArray[np.int64]] = []

    def swap(self, _out: bool, *ids: NDArray[np.int64] | int) -> BrokenDevice:
        self.given += [each for each in ids if isinstance(each, np.ndarray)]
        if self.at_once:
            self.synchronize()
        return self

    def synchronize(self) -> None:
        raise RuntimeError("misaligned address")

    def done(self) -> bool:
        raise RuntimeError("misaligned address")

    wait = synchronize


def test_errors_of_cuda_are_typed() -> None:
    """An error of CUDA is raised as a SwapDeviceError, by the call or by the transfer."""
    layout = describe({"a": torch.zeros(7, 64)}, 7)
    with HostPool(4, layout.slot_bytes) as pool:
        swapper = Swapper(layout, pool)
        swapper._backend = BrokenDevice(at_once=True)
        with pytest.raises(SwapDeviceError, match="misaligned address"):
            swapper.swap_out([0], [0])
        swapper._backend = BrokenDevice(at_once=False)
        transfer = swapper.swap_in([0], [0])
        for method in (transfer.done, transfer.wait):
            with pytest.raises(SwapDeviceError, match="misaligned address"):
                method()


def test_ids_are_the_kernels_own() -> None:
    """The kernel copies the ids, so a caller who changes an array during a swap cannot change what was checked."""
    layout = describe({"a": torch.zeros(7, 64)}, 7)
    blocks, slots = np.array([0, 1]), np.array([1, 0])
    with HostPool(4, layout.slot_bytes) as pool:
        swapper = Swapper(layout, pool)
        swapper._backend = device = BrokenDevice(at_once=False)
        swapper.swap_out(blocks, slots)
    assert [each.tolist() for each in device.given] == [[0, 1], [1, 0]]
    assert not any(np.shares_memory(own, given) for own in (blocks, slots) for given in device.given)


def test_several_callers_at_once() -> None:
    """Four threads that use one Swapper at the same time each get their own blocks back."""
    before = MODEL.memory(seed=0)
    memory = before.clone()
    layout = describe(MODEL.caches(memory), MODEL.blocks)
    with HostPool(MODEL.blocks, layout.slot_bytes) as pool, ThreadPoolExecutor(4) as callers:
        swapper = Swapper(layout, pool, threads=3)

        def round_trips(caller: int) -> None:
            own = list(range(caller, MODEL.blocks, 4))
            for _ in range(20):
                swapper.swap_out(own, own)
                for cache in MODEL.caches(memory).values():
                    cache[own] = 0
                swapper.swap_in(own, own)

        for done in [callers.submit(round_trips, caller) for caller in range(4)]:
            done.result()
    assert torch.equal(memory, before)


def test_a_forked_process_swaps_too() -> None:
    """The kernel's threads do not exist in a forked process, so the kernel starts new ones there."""
    before = MODEL.memory(seed=0)
    memory = before.clone()
    layout = describe(MODEL.caches(memory), MODEL.blocks)
    pool = HostPool(MODEL.blocks, layout.slot_bytes)
    swapper = Swapper(layout, pool, threads=3)
    everything = list(range(MODEL.blocks))
    swapper.swap_out(everything, everything)  # the threads start
    child = os.fork()
    if child == 0:  # torch is not used here, because its threads hang after a fork
        signal.alarm(60)
        memory.numpy()[:-32] = 0  # all bytes except those after the last layer
        swapper.swap_in(everything, everything)
        has_own_threads = len(list(Path("/proc/self/task").iterdir())) == 3
        os._exit(0 if has_own_threads and np.array_equal(memory.numpy(), before.numpy()) else 1)
    assert os.waitpid(child, 0)[1] == 0
    pool.close()


def test_other_threads_run_meanwhile() -> None:
    """A swap releases the interpreter lock, so another thread runs while the swap is under way."""
    shape = strided("LBHNC", torch.uint8, [1, 64, 1, 1, 1 << 20], ORDERS["LBHNC"])
    layout = describe(shape.caches(shape.memory(seed=0)), shape.blocks)
    everything = list(range(shape.blocks))
    interval = sys.getswitchinterval()
    with HostPool(shape.blocks, layout.slot_bytes) as pool, ThreadPoolExecutor(1) as caller:
        swapper = Swapper(layout, pool, threads=1)
        begun, ended = threading.Event(), []

        def swap() -> None:
            begun.set()
            swapper.swap_out(everything, everything)
            ended.append(True)

        sys.setswitchinterval(1000)  # no thread is forced to release the lock
        try:
            for _ in range(50):
                begun.clear()
                ended.clear()
                done = caller.submit(swap)
                begun.wait()
                seen = bool(ended)
                done.result()
                if not seen:
                    break
        finally:
            sys.setswitchinterval(interval)
        assert not seen


def test_the_pool_may_close_during_a_swap() -> None:
    """A swap that is under way keeps the memory that it writes to."""
    layout = describe(MODEL.caches(MODEL.memory(seed=0)), MODEL.blocks)
    everything = list(range(MODEL.blocks))
    for _ in range(20):
        pool = HostPool(MODEL.blocks, layout.slot_bytes)
        swapper = Swapper(layout, pool, threads=2)
        thread = threading.Thread(target=swapper.swap_out, args=(everything, everything))
        thread.start()
        pool.close()
        thread.join()
