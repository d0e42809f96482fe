"""The GPU benchmark's plan: which copies are measured, how long each may take, and what is said about the times.

Pure rules, with the clock passed in; `gpu_measure.py` carries them out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final

BLOCK_KIB: Final = (16, 32, 64, 256, 1024, 2048)
BLOCKS: Final = (1, 16, 256, 1024, 4096)
ROUNDS: Final = 101  # the most for one case; p99 needs a hundred
FEWEST_ROUNDS: Final = 3  # a case that was begun gets so many, even if its share of the time is over
PASSED: Final = "kernels_passed"  # ends while bytes are still on their way, so it is no speed
METHODS: Final = {
    "weft": "Weft, consecutive slots",
    "weft_scattered": "Weft, scattered slots",
    "kernels": "Weft, always by kernels",
    PASSED: "the same, until the engine's stream goes on",
    "batch": "cudaMemcpyBatchAsync",
    "each": "one cudaMemcpyAsync a block",
    "index_select": "index_select and one copy",
    "limit": "one large copy (the limit)",
}


@dataclass(frozen=True)
class Case:
    """One copy of many blocks.

    Attributes:
        block_kib: KiB of a block, which is contiguous.
        blocks: how many are copied.
        pinned: the host memory is page-locked.
        to_host: from the GPU to the host; otherwise back.
        compute: while the GPU multiplies matrices on another stream.
    """

    block_kib: int
    blocks: int
    pinned: bool
    to_host: bool
    compute: bool

    @property
    def total_bytes(self) -> int:
        return self.block_kib * self.blocks << 10

    @property
    def telling(self) -> bool:
        """Whether an engine makes such copies. These cases come first and get most of the time."""
        return self.pinned and self.blocks <= 1024

    @property
    def weight(self) -> float:
        """The case's part of the time, relative to those of others: a start, and the copying."""
        return (1 + self.total_bytes / (512 << 20)) * (1 if self.telling else 0.1)

    def __str__(self) -> str:
        memory, way = "pinned" if self.pinned else "pageable", "out" if self.to_host else "in"
        return f"{self.blocks} x {self.block_kib} KiB {way}, {memory}{', during compute' if self.compute else ''}"

    def row(self) -> dict[str, Any]:
        """The case as a row of the JSON file."""
        return asdict(self)


def plan(most_bytes: int, block_kib: Sequence[int] = BLOCK_KIB, blocks: Sequence[int] = BLOCKS) -> list[list[Case]]:
    """All cases that copy at most `most_bytes`, in groups that share memory: the telling ones, pinned, pageable."""
    cases = [
        Case(kib, count, pinned, to_host, compute)
        for kib in block_kib
        for pinned in (True, False)
        for count in blocks
        for to_host in (True, False)
        for compute in (False, True)
    ]
    kept = sorted(
        (case for case in cases if case.total_bytes <= most_bytes), key=lambda case: (not case.telling, not case.pinned)
    )
    return [list(group) for _, group in groupby(kept, lambda case: (case.block_kib, case.pinned, case.telling))]


class Budget:
    """A time limit that the cases share. What one does not need, those after it get.

    Args:
        total_s: for everything, in seconds from now.
        clock: seconds.
    """

    def __init__(self, total_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end_s = clock() + total_s

    def left_s(self) -> float:
        """Seconds until the limit, at least 0."""
        return max(0.0, self._end_s - self._clock())

    def rounds(self, share: float) -> Iterator[int]:
        """Numbers of rounds for the next case, as long as it has not used its share (0 to 1) of the time left."""
        start_s, share_s = self._clock(), self.left_s() * share
        for number in range(ROUNDS):
            spent_s = self._clock() - start_s
            if self.left_s() <= 0 or (number >= FEWEST_ROUNDS and spent_s >= share_s):
                return
            yield number


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def describe_times(seconds: Sequence[float], total_bytes: int) -> dict[str, float]:
    """Median and spread of the times of one method in one case, and its speed at the median."""
    median_s = statistics.median(seconds)
    return {
        "rounds": len(seconds),
        "median_s": median_s,
        "lower_quartile_s": percentile(seconds, 25),
        "upper_quartile_s": percentile(seconds, 75),
        "p95_s": percentile(seconds, 95),
        "p99_s": percentile(seconds, 99),
        "gb_per_s": total_bytes / median_s / 1e9,
    }


def speedups(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times as long each method took as Weft did: the median of the ratios within a round."""
    return {
        name: statistics.median(other / mine for other, mine in zip(values, seconds["weft"], strict=True))
        for name, values in seconds.items()
        if name != "weft"
    }
