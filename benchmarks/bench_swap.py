"""Bytes per second of swap-out and swap-in, against a copy for each block and layer, vLLM's own, and the limit.

    python benchmarks/bench_swap.py --out bench_swap.json

Four layers, each with pages of one size; random blocks go to consecutive slots, and back. The baselines:

- *each*: one `copy_` of PyTorch for each block of each layer, as vLLM once did; making the views is not timed.
- *vllm*: `swap_blocks_batch` of vLLM 0.32, on a GPU where vLLM is installed; making its lists is not timed.
- *limit*: the same number of bytes in one piece: on a GPU one copy from or to page-locked memory, else the faster of
  PyTorch's copy with as many threads and the C library's memcpy on one.

A call counts from before its start until every byte has arrived. Before each, a CPU's caches are filled with something
else. The baselines take turns (A B C, B C A, ...), and what counts is the median over rounds of the ratio in one round.
Needs no vLLM; it uses a GPU where there is one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft import _csrc
from weft.engine.kv_cache import HostPool, Swapper, describe

LAYERS = 4
PAGES_KIB = (4, 16, 64, 512)  # of one block in one layer
BLOCKS = (1, 16, 256, 4096)
EVICT_BYTES = 96 << 20

Copy = Callable[[], object]  # returns when every byte has arrived


class Bench:
    """Caches with twice as many blocks as are swapped, a pool for those, and each baseline's way between the two."""

    def __init__(self, device: torch.device, page_bytes: int, blocks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.total_bytes = LAYERS * blocks * page_bytes
        self.device = device
        memory = torch.randint(0, 256, (LAYERS, 2 * blocks, page_bytes), dtype=torch.uint8, device=device)
        self.memory = memory.view(torch.bfloat16)
        layout = describe({f"layers.{i}": layer for i, layer in enumerate(self.memory)}, 2 * blocks)
        self.pool = HostPool(blocks, layout.slot_bytes, pinned=device.type == "cuda")
        self.swapper = Swapper(layout, self.pool)
        self.blocks, self.slots = rng.permutation(2 * blocks)[:blocks], np.arange(blocks)
        self.arena = self.pool.arena.view(torch.bfloat16)
        page = page_bytes // 2  # elements
        # A page in the cache, and its place in the pool.
        self.pages = [
            (self.memory[layer, block], self.arena[slot, layer * page : (layer + 1) * page])
            for block, slot in zip(self.blocks.tolist(), self.slots.tolist(), strict=True)
            for layer in range(LAYERS)
        ]
        self.evict = np.zeros(EVICT_BYTES, np.uint8) if device.type == "cpu" else None

    def baselines(self, out: bool) -> dict[str, list[Copy]]:
        """Ways to swap all blocks out or in, by name; of several the fastest counts."""
        swap = self.swapper.swap_out if out else self.swapper.swap_in
        flat, arena = self.memory.view(-1)[: self.total_bytes // 2], self.arena.view(-1)
        target, source = (arena, flat) if out else (flat, arena)
        pages = [(slot, page) if out else (page, slot) for page, slot in self.pages]

        def each() -> None:
            for to, page in pages:
                to.copy_(page, non_blocking=True)
            self.finish()

        def whole() -> None:
            target.copy_(source, non_blocking=True)
            self.finish()

        baselines: dict[str, list[Copy]] = {"weft": [lambda: swap(self.blocks, self.slots).wait()], "each": [each]}
        if self.device.type == "cpu":
            to, memory = target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()
            return {**baselines, "limit": [whole, lambda: np.copyto(to, memory)]}
        if vllm := vllm_swap(pages, out):
            baselines["vllm"] = [lambda: (vllm(), self.finish())]
        return {**baselines, "limit": [whole]}

    def finish(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, copy: Copy) -> float:
        """That one call takes from cold."""
        if self.evict is not None:
            self.evict += 1  # long enough for OpenMP's threads to stop spinning, too
        self.finish()
        start = time.perf_counter()
        copy()
        return time.perf_counter() - start


def vllm_swap(pages: list[tuple[torch.Tensor, torch.Tensor]], out: bool) -> Copy | None:
    """vLLM's own batched copy of (target, source) pages, if it is here."""
    try:
        import vllm._custom_ops as ops

        getattr(torch.ops, "_C_cache_ops").swap_blocks_batch  # noqa: B009, B018  raises if vLLM has none
    except (ImportError, AttributeError):
        return None
    targets, sources = (torch.tensor([pair[i].data_ptr() for pair in pages], dtype=torch.int64) for i in range(2))
    sizes = torch.tensor([page.nbytes for page, _ in pages], dtype=torch.int64)
    return lambda: ops.swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=not out)


def measure(bench: Bench, out: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Bytes per second of each baseline, and Weft's ratio to it, in each round."""
    baselines = bench.baselines(out)
    for copies in baselines.values():
        for copy in copies:
            copy()
    rates: dict[str, list[float]] = {name: [] for name in baselines}
    names = list(baselines)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken_s = min(bench.seconds(copy) for copy in baselines[name])
            rates[name].append(bench.total_bytes / taken_s)
    return {
        name: {
            "bytes_per_s": rate,
            "ratios": [mine / other for mine, other in zip(rates["weft"], rate, strict=True)],
        }
        for name, rate in rates.items()
    }


def middle(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


def main(
    out: Annotated[Path | None, typer.Option(help="Where to write the figures (JSON) and, beside it, a plot.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds for each size and direction.")] = 21,
    most_mib: Annotated[int, typer.Option(help="Leave out sizes that swap more than this.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of which blocks are swapped.")] = 0,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), 8))  # as many as Swapper takes
    sizes = [(kib, n) for kib in PAGES_KIB for n in BLOCKS if LAYERS * kib * n <= most_mib << 10]
    results = []
    for kib, blocks in track(sizes, "measuring", console=console, transient=True):
        bench = Bench(device, kib << 10, blocks, seed)
        for swap_out in (True, False):
            baselines = measure(bench, swap_out, rounds)
            results.append(
                {"page_kib": kib, "blocks": blocks, "swap": "out" if swap_out else "in", "baselines": baselines}
            )
        bench.pool.close()
    console.print(tabulate(results, rounds))
    if not any("vllm" in result["baselines"] for result in results):
        console.print("vllm did not run: its swap_blocks_batch copies to and from a GPU, and needs vLLM for CUDA.")
    if out is not None:
        machine = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cuda_kernel": _csrc.cuda_available(),
            "threads": torch.get_num_threads(),
        }
        out.write_text(json.dumps({"machine": machine, "layers": LAYERS, "seed": seed, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def tabulate(results: list[dict[str, Any]], rounds: int) -> Table:
    """A line for each size and direction."""
    table = Table(title=f"{LAYERS} layers; medians of {rounds} rounds (quartiles); GB is 10^9 bytes")
    for heading in ("page KiB", "blocks", "MiB", "swap", "weft GB/s", "x each", "x vllm", "% of limit", "limit GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        baselines = result["baselines"]
        low, rate, high = (each / 1e9 for each in middle(baselines["weft"]["bytes_per_s"]))
        part_low, part, part_high = (100 * each for each in middle(baselines["limit"]["ratios"]))
        table.add_row(
            str(result["page_kib"]),
            str(result["blocks"]),
            f"{LAYERS * result['page_kib'] * result['blocks'] / 1024:.3g}",
            result["swap"],
            f"{rate:.2f} ({low:.2f}-{high:.2f})",
            f"{middle(baselines['each']['ratios'])[1]:.2f}",
            f"{middle(baselines['vllm']['ratios'])[1]:.2f}" if "vllm" in baselines else "-",
            f"{part:.0f} ({part_low:.0f}-{part_high:.0f})",
            f"{middle(baselines['limit']['bytes_per_s'])[1] / 1e9:.2f}",
        )
    return table


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bytes per second over the bytes swapped, a panel for each page size, swap-out solid and swap-in dashed."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    pages = sorted({result["page_kib"] for result in results})
    figure, axes = plt.subplots(1, len(pages), figsize=(12, 4), sharey=True, squeeze=False, layout="constrained")
    for panel, kib in zip(axes[0], pages, strict=True):
        for swap, line in (("out", "-"), ("in", "--")):
            chosen = [each for each in results if (each["page_kib"], each["swap"]) == (kib, swap)]
            total_mib = [LAYERS * kib * each["blocks"] / 1024 for each in chosen]
            for colour, name in enumerate(chosen[0]["baselines"]):
                rates = [middle(each["baselines"][name]["bytes_per_s"])[1] / 1e9 for each in chosen]
                panel.plot(total_mib, rates, line, marker=".", color=f"C{colour}", label=f"{name}, {swap}")
        panel.set_xscale("log", base=2)
        panel.set_title(f"pages of {kib} KiB")
        panel.set_xlabel("MiB swapped")
    axes[0][0].set_ylabel("GB/s (median)")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
