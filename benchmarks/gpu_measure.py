"""The swap kernel on a GPU against what CUDA offers: one part of `make gpu-check`, which builds what this needs.

For each case of `gpu_cases.plan`, random blocks are copied to host memory or back, by each of these methods in turn:
Weft, to consecutive and to scattered slots (as a store by block hash leaves them); Weft always by kernels, until all
bytes have arrived and until the engine's stream goes on; `cudaMemcpyBatchAsync`; one `cudaMemcpyAsync` a block;
`index_select` and one copy; and one large copy of as many bytes, which is the bus's limit.

A copy is timed from before its call until every byte has arrived. The lists that the baselines need are made before.
Three blocks of each case are compared byte by byte before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from common import machine
from gpu_cases import PASSED, Budget, Case, describe_times, plan, speedups

if "WEFT_CSRC" in os.environ:  # then Weft is not installed, and its compiled part lies there
    import built_csrc  # noqa: F401

from weft.core.errors import SwapError
from weft.engine.kv_cache import CacheLayout, HostPool, Swapper, describe

Copy = Callable[[], object]  # returns when every byte has arrived
MATRIX = 8192  # rows of the matrices that are multiplied during a copy
OVER = "the time was over"  # why a case was not measured
MOST_PRODUCTS = 600  # a stream takes about a thousand launches, then the next one would wait


class CopyError(Exception):
    """CUDA refused a baseline's copy."""


class Gpu:
    """The device, a stream for the copies, and matrices to multiply meanwhile."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self._stream, self._compute = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self._stream)  # Weft's kernel follows PyTorch's current stream
        self._a, self._b, self._c = (
            torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=self.device) for _ in range(3)
        )
        self._started, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.finish()
        self._count = 0
        self._product_s = 0.0
        for count in (3, 50):  # the first ones warm up
            self._multiply(count)
            self.finish()
            self._product_s = self._started.elapsed_time(self._ended) / 1e3 / count

    @property
    def stream(self) -> int:
        """The stream of the copies, as CUDA's C interface takes it."""
        return int(self._stream.cuda_stream)

    def swapper(self, layout: CacheLayout, pool: HostPool, way: Literal["auto", "kernels"]) -> Swapper:
        return Swapper(layout, pool, way=way)

    def room_bytes(self) -> int:
        """Bytes that one case may copy. The GPU holds three times as many, and most of the host's memory stays free."""
        return int(min(torch.cuda.mem_get_info(self.device)[0] // 5, psutil.virtual_memory().available // 4))

    def finish_copies(self) -> None:
        """Wait for the stream of the copies, and not for the compute next to them."""
        self._stream.synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Give the memory that PyTorch keeps back to the GPU."""
        torch.cuda.empty_cache()

    def begin_compute(self, for_s: float) -> None:
        """Keep the GPU busy for a time."""
        self._multiply(min(MOST_PRODUCTS, math.ceil(for_s / self._product_s)))

    def end_compute(self) -> tuple[bool, float]:
        """Wait for it. Gives whether it was still busy, and how many times as long it took as it does alone."""
        covered = not self._ended.query()
        self.finish()
        return covered, self._started.elapsed_time(self._ended) / 1e3 / (self._count * self._product_s)

    def _multiply(self, count: int) -> None:
        self._count = count
        with torch.cuda.stream(self._compute):
            self._started.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._c)
            self._ended.record()


class Bench:
    """The memory of a group of cases: a KV cache and host memory for twice as many blocks as are copied."""

    def __init__(self, gpu: Gpu, copies: ctypes.CDLL, group: list[Case], seed: int) -> None:
        self.gpu, self._library = gpu, copies
        self._bytes = group[0].block_kib << 10
        self._most = max(case.blocks for case in group)
        rng = np.random.default_rng(seed)
        self._order = rng.permutation(2 * self._most)
        self._scattered = rng.permutation(2 * self._most)
        random = {"dtype": torch.int64, "device": gpu.device}
        self.cache = torch.randint(-(2**62), 2**62, (2 * self._most, self._bytes // 8), **random)
        self._staging = torch.empty((self._most, self._bytes // 8), **random)
        layout = describe({"cache": self.cache}, 2 * self._most)
        self._pool = HostPool(2 * self._most, layout.slot_bytes, pinned=group[0].pinned and gpu.device.type == "cuda")
        self._pool.arena.zero_()  # so that the system has given it memory
        self.host = self._pool.arena.view(torch.int64)
        self._swappers = gpu.swapper(layout, self._pool, "auto"), gpu.swapper(layout, self._pool, "kernels")

    def close(self) -> None:
        """Give all memory back."""
        self._pool.close()
        del self.cache, self._staging, self._swappers
        self.gpu.forget()

    def blocks(self, case: Case) -> Any:
        """The blocks of the cache that a case copies."""
        return self._order[self._order < 2 * case.blocks][: case.blocks]

    def slots(self, case: Case, method: str) -> Any:
        """The slots of the host memory that a method copies them to."""
        if method != "weft_scattered":
            return np.arange(case.blocks)
        return self._scattered[self._scattered < 2 * case.blocks][: case.blocks]

    def copies(self, case: Case) -> dict[str, Copy]:
        """The copy of all blocks, by method."""
        blocks = self.blocks(case)
        swap, by_kernels = (each.swap_out if case.to_host else each.swap_in for each in self._swappers)
        cache, host = self.cache[: case.blocks], self.host[: case.blocks]
        staging, index = self._staging[: case.blocks], torch.from_numpy(blocks).to(self.gpu.device)
        sizes = (ctypes.c_size_t * case.blocks)(*[self._bytes] * case.blocks)
        sides = (
            _addresses(self.host.data_ptr(), np.arange(case.blocks), self._bytes),
            _addresses(self.cache.data_ptr(), blocks, self._bytes),
        )
        whole = (_addresses(host.data_ptr(), [0], 0), _addresses(cache.data_ptr(), [0], 0))

        def call(name: str, count: int, pair: tuple[Any, Any], size: Any) -> Copy:
            to, source = pair if case.to_host else pair[::-1]
            stream = ctypes.c_void_p(self.gpu.stream)
            function, finish = getattr(self._library, name), self._library.finish

            def copy() -> None:
                status = function(ctypes.c_int64(count), to, source, size, int(case.to_host), stream) or finish(stream)
                if status:
                    raise CopyError(self._library.error_text(status).decode())

            return copy

        def gather() -> None:
            if case.to_host:
                torch.index_select(self.cache, 0, index, out=staging)
                host.copy_(staging, non_blocking=True)
            else:
                staging.copy_(host, non_blocking=True)
                self.cache.index_copy_(0, index, staging)
            self.gpu.finish_copies()

        def passed() -> None:
            by_kernels(blocks, consecutive)
            self.gpu.finish_copies()  # the engine's stream

        consecutive, scattered = self.slots(case, "weft"), self.slots(case, "weft_scattered")
        return {
            "weft": lambda: swap(blocks, consecutive, beside_compute=case.compute).wait(),
            "weft_scattered": lambda: swap(blocks, scattered, beside_compute=case.compute).wait(),
            "kernels": lambda: by_kernels(blocks, consecutive, beside_compute=case.compute).wait(),
            PASSED: passed,
            "batch": call("copy_batch", case.blocks, sides, sizes),
            "each": call("copy_each", case.blocks, sides, ctypes.c_size_t(self._bytes)),
            "index_select": gather,
            "limit": call("copy_each", 1, whole, ctypes.c_size_t(case.total_bytes)),
        }

    def try_out(self, case: Case, method: str, copy: Copy) -> tuple[float, bool]:
        """Copy once.

        Returns:
            The seconds, and whether the first, middle or last block has other bytes than it should. Of the limit, which
            copies no blocks, this is not known, so False.
        """
        chosen = sorted({0, case.blocks // 2, case.blocks - 1})
        blocks = torch.from_numpy(self.blocks(case)[chosen]).to(self.gpu.device)
        slots = torch.from_numpy(self.slots(case, method)[chosen])
        expected = torch.randint(-(2**62), 2**62, (len(chosen), self._bytes // 8), dtype=torch.int64)
        self.host[slots] = 0 if case.to_host else expected
        self.cache[blocks] = expected.to(self.gpu.device) if case.to_host else 0
        self.gpu.finish()
        taken_s = timed(copy)
        self.gpu.finish()
        found = self.host[slots] if case.to_host else self.cache[blocks].cpu()
        return taken_s, method != "limit" and not torch.equal(found, expected)


def _addresses(start: int, numbers: Any, step_bytes: int) -> Any:
    return (ctypes.c_void_p * len(numbers))(*[start + int(number) * step_bytes for number in numbers])


def prepare(bench: Bench, case: Case) -> tuple[dict[str, Copy], dict[str, float], dict[str, Any]]:
    """The copies that work, the seconds of one copy of each, and what is to be reported about the others."""
    copies, warm_s, wrong, errors = bench.copies(case), {}, [], {}
    for name, copy in list(copies.items()):
        try:
            warm_s[name], is_wrong = bench.try_out(case, name, copy)
            if is_wrong:
                wrong.append(name)
        except (CopyError, RuntimeError, SwapError) as error:
            errors[name] = str(error)
            del copies[name]
    return copies, warm_s, {"errors": errors, "wrong": wrong}


def measure(bench: Bench, gpu: Gpu, case: Case, budget: Budget, share: float) -> dict[str, Any]:
    """One case: each method's times, which methods copied wrong bytes, and the errors of those that failed.

    The methods take turns. Each round begins with another one, so that what disturbs the machine disturbs them alike.
    """
    copies, lasts_s, problems = prepare(bench, case)
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    slower: dict[str, list[float]] = {name: [] for name in copies}
    uncovered = dict.fromkeys(copies, 0)
    names = list(copies)
    for number in budget.rounds(share) if "weft" in copies else ():
        first = number % len(names)
        this_round = {}
        for name in names[first:] + names[:first]:
            gpu.finish()
            if case.compute:
                gpu.begin_compute(1.5 * lasts_s[name])
            this_round[name] = timed(copies[name])
            if case.compute:
                lasts_s[name] = max(lasts_s[name], this_round[name])  # compute makes some copies much slower
                covered, ratio = gpu.end_compute()
                uncovered[name] += not covered
                slower[name].append(ratio)
            if budget.left_s() <= 0:
                break
        if len(this_round) == len(names):  # only whole rounds count
            for name, taken_s in this_round.items():
                seconds[name].append(taken_s)
    row: dict[str, Any] = {"case": case.row(), **problems, "methods": {}, "weft_is_faster": {}}
    if seconds.get("weft"):
        row["weft_is_faster"] = speedups(seconds)
        for name, values in seconds.items():
            row["methods"][name] = describe_times(values, case.total_bytes) | {
                "seconds": [round(value, 8) for value in values]
            }
            if case.compute:
                row["methods"][name] |= {
                    "compute_takes_times_as_long": statistics.median(slower[name]),
                    "outlasted_the_compute": uncovered[name],
                }
    return row


def timed(copy: Copy) -> float:
    """Seconds that one copy takes."""
    start_s = time.perf_counter()
    copy()
    return time.perf_counter() - start_s


def run(gpu: Gpu, copies: ctypes.CDLL, groups: list[list[Case]], budget: Budget, out: Path, seed: int) -> int:
    """Measure the groups as far as the time goes, and write the file after each case.

    Returns:
        1 if Weft's kernel failed or copied wrong bytes in a case, or nothing was measured. Otherwise 0.
    """
    result: dict[str, Any] = {
        "machine": machine() | {"gpu": gpu.name, "torch": torch.__version__, "cuda": torch.version.cuda},
        "seed": seed,
        "results": [],
        "left_out": [],
    }
    left, bad = [case for group in groups for case in group], False
    for group in groups:
        bench, reason = begin(gpu, copies, group, seed) if budget.left_s() > 0 else (None, OVER)
        for case in group:
            share = case.weight / sum(other.weight for other in left)
            row = measure(bench, gpu, case, budget, share) if bench and budget.left_s() > 0 else None
            if row and (row["methods"] or row["errors"] or row["wrong"]):
                result["results"].append(row)
                bad = bad or bool(row["wrong"]) or any(name.startswith("weft") for name in row["errors"])
                print(f"{len(left):4} left, {budget.left_s():4.0f} s: {case}: {in_words(row)}", flush=True)
            else:
                result["left_out"].append(case.row() | {"reason": reason})
            left.remove(case)
            write(out, result)
        if bench is not None:
            bench.close()
    for reason, count in Counter(each["reason"] for each in result["left_out"]).items():
        print(f"{count} cases were left out: {reason}.")
    return 1 if bad or not any(row["methods"] for row in result["results"]) else 0


def begin(gpu: Gpu, copies: ctypes.CDLL, group: list[Case], seed: int) -> tuple[Bench | None, str]:
    """The memory of a group, and why a case would be left out. Without the memory, the whole group is."""
    try:
        return Bench(gpu, copies, group, seed), OVER
    except (RuntimeError, SwapError) as error:
        gpu.forget()
        return None, str(error)


def in_words(row: dict[str, Any]) -> str:
    """The speeds of one case in a line."""
    speeds = [f"{name} {each['gb_per_s']:.2f}" for name, each in row["methods"].items() if name != PASSED]
    problems = [f"{name} COPIED WRONG BYTES" for name in row["wrong"]]
    problems += [f"{name} failed: {error}" for name, error in row["errors"].items()]
    return ", ".join((["GB/s: " + ", ".join(speeds)] if speeds else []) + problems)


def write(out: Path, result: dict[str, Any]) -> None:
    """Write the file in one step, so that it is whole whenever this process is ended."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the swap kernel against CUDA's own copies.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--library", type=Path, required=True, help="gpu_copies.cpp, compiled")
    parser.add_argument("--budget-s", type=float, default=480, help="seconds for everything")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of blocks and slots")
    options = parser.parse_args()
    budget = Budget(options.budget_s, time.perf_counter)
    torch.manual_seed(options.seed)
    gpu = Gpu()
    return run(gpu, load(options.library), plan(gpu.room_bytes()), budget, options.out, options.seed)


def load(library: Path) -> ctypes.CDLL:
    """The compiled copies."""
    copies = ctypes.CDLL(str(library))
    copies.error_text.restype = ctypes.c_char_p
    return copies


if __name__ == "__main__":
    sys.exit(main())
