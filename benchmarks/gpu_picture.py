"""Draws the picture of `make gpu-check` from its JSON file, on any machine with matplotlib:

    python benchmarks/gpu_picture.py benchmark.json

The picture lies next to the file. A row for each kind of host memory and direction, a column for each size of block;
lines are medians, bands are quartiles, and broken lines were measured during compute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import pyplot
from gpu_cases import METHODS, PASSED


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the results of one file."""
    rows = [row for row in result["results"] if row["methods"]]
    sizes = sorted({row["case"]["block_kib"] for row in rows})
    kinds = sorted({(row["case"]["pinned"], row["case"]["to_host"]) for row in rows}, reverse=True)
    figure, axes = pyplot().subplots(
        len(kinds), len(sizes), figsize=(3 * len(sizes) + 2, 3 * len(kinds)), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, (pinned, to_host) in zip(axes, kinds, strict=True):
        line[0].set_ylabel(f"{'pinned' if pinned else 'pageable'}, {'out' if to_host else 'in'} (GB/s)")
        for panel, kib in zip(line, sizes, strict=True):
            chosen = {"block_kib": kib, "pinned": pinned, "to_host": to_host}
            _panel(panel, [row for row in rows if chosen.items() <= row["case"].items()])
    for panel, kib in zip(axes[0], sizes, strict=True):
        panel.set_title(f"blocks of {kib} KiB")
    for panel in axes[-1]:
        panel.set_xlabel("blocks")
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{result['machine']['gpu']}, median and quartiles; broken lines: during compute")
    figure.savefig(path)


def _panel(panel: Any, rows: list[dict[str, Any]]) -> None:
    for compute, style in ((False, "-"), (True, "--")):
        chosen = sorted(
            (row for row in rows if row["case"]["compute"] == compute), key=lambda row: row["case"]["blocks"]
        )
        for colour, (name, label) in enumerate(METHODS.items()):
            points = [(row["case"], row["methods"][name]) for row in chosen if name in row["methods"]]
            if not points or name == PASSED:
                continue
            counts = [case["blocks"] for case, _ in points]
            total_gb = [case["blocks"] * case["block_kib"] * 1024 / 1e9 for case, _ in points]
            low, middle, high = (
                [size / times[key] for size, (_, times) in zip(total_gb, points, strict=True)]
                for key in ("upper_quartile_s", "median_s", "lower_quartile_s")
            )
            panel.plot(counts, middle, style, color=f"C{colour}", marker=".", label=None if compute else label)
            if not compute:
                panel.fill_between(counts, low, high, color=f"C{colour}", alpha=0.15, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the picture of make gpu-check.")
    parser.add_argument("data", type=Path, help="benchmark.json")
    options = parser.parse_args(arguments)
    draw(json.loads(options.data.read_text()), options.data.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
