"""Bytes per second of swap-out and swap-in on a CPU, compared with one copy per block and layer, and the limit.

    python benchmarks/bench_swap.py --out bench_swap.json

There are four layers with pages of one size. Random blocks are copied to consecutive slots, and back. The baselines:

- *each*: one `copy_` of PyTorch for each block of each layer, as vLLM once did it. Making the views is not measured.
- *limit*: the same number of bytes in one piece, by the faster of PyTorch's copy with as many threads and the C
  library's memcpy on one.

Before each copy, the caches are filled with other data. The baselines alternate (A B C, B C A, ...). The result is the
median over rounds of the ratio in one round. Needs no vLLM. For a GPU, there is `make gpu-check`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from common import machine, pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from weft.engine.kv_cache import HostPool, Swapper, describe

LAYERS = 4
PAGES_KIB = (4, 16, 64, 512)  # of one block in one layer
BLOCKS = (1, 16, 256, 4096)
EVICT_BYTES = 96 << 20

Copy = Callable[[], object]  # returns when every byte has arrived


class Bench:
    """KV caches with twice as many blocks as are swapped, a pool for the swapped blocks, and each baseline's copy."""

    def __init__(self, page_bytes: int, blocks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.total_bytes = LAYERS * blocks * page_bytes
        memory = torch.randint(0, 256, (LAYERS, 2 * blocks, page_bytes), dtype=torch.uint8)
        self.memory = memory.view(torch.bfloat16)
        layout = describe({f"layers.{i}": layer for i, layer in enumerate(self.memory)}, 2 * blocks)
        self.pool = HostPool(blocks, layout.slot_bytes)
        self.swapper = Swapper(layout, self.pool)
        self.blocks, self.slots = rng.permutation(2 * blocks)[:blocks], np.arange(blocks)
        self.arena = self.pool.arena.view(torch.bfloat16)
        page = page_bytes // 2  # elements
        # Pairs of a page in the cache and its part of the pool.
        self.pages = [
            (self.memory[layer, block], self.arena[slot, layer * page : (layer + 1) * page])
            for block, slot in zip(self.blocks.tolist(), self.slots.tolist(), strict=True)
            for layer in range(LAYERS)
        ]
        self.evict = np.zeros(EVICT_BYTES, np.uint8)

    def baselines(self, swap_out: bool) -> dict[str, list[Copy]]:
        """Copies that swap all blocks out or in, by baseline. The fastest copy of a baseline counts."""
        swap = self.swapper.swap_out if swap_out else self.swapper.swap_in
        flat, arena = self.memory.view(-1)[: self.total_bytes // 2], self.arena.view(-1)
        target, source = (arena, flat) if swap_out else (flat, arena)
        pages = [(slot, page) if swap_out else (page, slot) for page, slot in self.pages]

        def each() -> None:
            for to, page in pages:
                to.copy_(page)

        to, memory = target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()
        return {
            "weft": [lambda: swap(self.blocks, self.slots).wait()],
            "each": [each],
            "limit": [lambda: target.copy_(source), lambda: np.copyto(to, memory)],
        }

    def seconds(self, copy: Copy) -> float:
        """Seconds that one copy takes with cold caches."""
        self.evict += 1  # This also takes long enough for OpenMP's threads to stop spinning.
        start = time.perf_counter()
        copy()
        return time.perf_counter() - start


def measure(bench: Bench, swap_out: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Bytes per second of each baseline in each round, and the ratios of Weft's to it."""
    baselines = bench.baselines(swap_out)
    for copies in baselines.values():
        for copy in copies:
            copy()
    rates: dict[str, list[float]] = {name: [] for name in baselines}
    names = list(baselines)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            copy_s = min(bench.seconds(copy) for copy in baselines[name])
            rates[name].append(bench.total_bytes / copy_s)
    return {
        name: {"bytes_per_s": rate, "ratios": [mine / other for mine, other in zip(rates["weft"], rate, strict=True)]}
        for name, rate in rates.items()
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a plot is written next to it.")] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds for each size and direction.")] = 21,
    most_mib: Annotated[int, typer.Option(help="Leave out sizes that swap more than this, in MiB.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the choice of blocks.")] = 0,
) -> None:
    """Measure, print a table, and write JSON and a plot."""
    console = Console()
    torch.set_num_threads(min(len(os.sched_getaffinity(0)), 8))  # the number of threads that Swapper uses
    sizes = [(kib, n) for kib in PAGES_KIB for n in BLOCKS if LAYERS * kib * n <= most_mib << 10]
    results = []
    for kib, blocks in track(sizes, "measuring", console=console, transient=True):
        bench = Bench(kib << 10, blocks, seed)
        for swap_out in (True, False):
            baselines = measure(bench, swap_out, rounds)
            results.append(
                {"page_kib": kib, "blocks": blocks, "swap": "out" if swap_out else "in", "baselines": baselines}
            )
        bench.pool.close()
    console.print(tabulate(results, rounds))
    if out is not None:
        setup = machine() | {"torch": torch.__version__, "threads": torch.get_num_threads()}
        out.write_text(json.dumps({"machine": setup, "layers": LAYERS, "seed": seed, "results": results}, indent=1))
        plot(results, out.with_suffix(".svg"))


def tabulate(results: list[dict[str, Any]], rounds: int) -> Table:
    """A table with a row for each size and direction."""
    table = Table(title=f"{LAYERS} layers; medians of {rounds} rounds (quartiles); GB is 10^9 bytes")
    for heading in ("page KiB", "blocks", "MiB", "swap", "weft GB/s", "x each", "% of limit", "limit GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        baselines = result["baselines"]
        low, rate, high = (each / 1e9 for each in quartiles(baselines["weft"]["bytes_per_s"]))
        part_low, part, part_high = (100 * each for each in quartiles(baselines["limit"]["ratios"]))
        table.add_row(
            str(result["page_kib"]),
            str(result["blocks"]),
            f"{LAYERS * result['page_kib'] * result['blocks'] / 1024:.3g}",
            result["swap"],
            f"{rate:.2f} ({low:.2f}-{high:.2f})",
            f"{quartiles(baselines['each']['ratios'])[1]:.2f}",
            f"{part:.0f} ({part_low:.0f}-{part_high:.0f})",
            f"{quartiles(baselines['limit']['bytes_per_s'])[1] / 1e9:.2f}",
        )
    return table


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bytes per second over the bytes swapped: a panel for each page size, swap-out solid, swap-in dashed."""
    pages = sorted({result["page_kib"] for result in results})
    figure, axes = pyplot().subplots(1, len(pages), figsize=(12, 4), sharey=True, squeeze=False, layout="constrained")
    for panel, kib in zip(axes[0], pages, strict=True):
        for swap, line in (("out", "-"), ("in", "--")):
            chosen = [each for each in results if (each["page_kib"], each["swap"]) == (kib, swap)]
            total_mib = [LAYERS * kib * each["blocks"] / 1024 for each in chosen]
            for colour, name in enumerate(chosen[0]["baselines"]):
                rates = [quartiles(each["baselines"][name]["bytes_per_s"])[1] / 1e9 for each in chosen]
                panel.plot(total_mib, rates, line, marker=".", color=f"C{colour}", label=f"{name}, {swap}")
        panel.set_xscale("log", base=2)
        panel.set_title(f"pages of {kib} KiB")
        panel.set_xlabel("MiB swapped")
    axes[0][0].set_ylabel("GB/s (median)")
    axes[0][0].legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
