"""Host memory for KV: how much there is, and which preempted calls it keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from weft.core.errors import SwapArgumentError

AUTO_SHARE: Final = 0.5  # of the memory that the host has free, which all workers of an engine share
AUTO_TIMES: Final = 4  # times the KV cache of a worker, at most: more contexts than that seldom come back
_LEAST_GIB: Final = 1 / 16  # less is not worth the work


@dataclass(frozen=True)
class SwapConfig:
    """Host memory for KV: of preempted calls (Autellix §4.2.2), and of programs between their calls.

    Args:
        space_gib: GiB of host memory for each worker process. On a GPU the memory is page-locked. With "auto" the
            workers of an engine on this host share half of the memory that is free when it starts, and each takes at
            most four times its KV cache. Where that would be less than 64 MiB, there is none. In a Ray cluster "auto"
            is at most 4 GiB for each worker, because the nodes differ.
        min_tokens: a preempted call with fewer tokens is computed again instead of swapped. With "auto" the engine
            measures this number when it starts, and again as it runs.

    Raises:
        SwapArgumentError: `space_gib` is neither "auto" nor positive and finite, or `min_tokens` is negative.
    """

    space_gib: float | Literal["auto"] = "auto"
    min_tokens: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        space_gib = self.space_gib
        if space_gib != "auto" and (isinstance(space_gib, bool) or not isinstance(space_gib, int | float)):
            raise SwapArgumentError(f'space_gib is {space_gib!r}. Give "auto" or a number of GiB.')
        if space_gib != "auto" and not 0 < space_gib < math.inf:
            raise SwapArgumentError(f"space_gib is {self.space_gib}. Give more than 0, or swap=None to recompute.")
        if self.min_tokens != "auto" and (self.min_tokens < 0):
            raise SwapArgumentError(f'min_tokens is {self.min_tokens!r}. Give "auto" or a number of tokens, 0 or more.')


def auto_gib(free_bytes: float, workers: int) -> float:
    """The most host memory that a worker takes with "auto", in GiB; 0: too little is free.

    Args:
        free_bytes: The memory that the host has free.
        workers: The worker processes on the host that share it.
    """
    gib = AUTO_SHARE * free_bytes / workers / 2**30
    return gib if gib >= _LEAST_GIB else 0.0


def space_bytes(space_gib: float | Literal["auto"], most_gib: float, kv_bytes: int) -> int:
    """The host memory of a worker.

    Args:
        space_gib: As in `SwapConfig`.
        most_gib: Of "auto": see `auto_gib`.
        kv_bytes: The KV cache of the worker.
    """
    return int(min(most_gib * 2**30, AUTO_TIMES * kv_bytes) if space_gib == "auto" else space_gib * 2**30)


def check_swap(swap: object) -> SwapConfig | None:
    """Check the `swap` argument of an engine.

    Raises:
        SwapArgumentError: It is neither a SwapConfig nor None.
    """
    if swap is None or isinstance(swap, SwapConfig):
        return swap
    example = f"weft.SwapConfig(space_gib={swap!r})" if isinstance(swap, int | float) else "weft.SwapConfig()"
    raise SwapArgumentError(f"swap is {swap!r}. Give a SwapConfig, such as {example}, or None to recompute.")
