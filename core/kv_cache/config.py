"""The swap's configuration: how much host memory it has, and which calls it keeps there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weft.core.errors import SwapArgumentError


@dataclass(frozen=True)
class SwapConfig:
    """Host memory for the KV cache of preempted calls (Autellix §4.2.2).

    Args:
        space_gib: GiB of host memory for each worker process. On a GPU the memory is page-locked.
        min_tokens: a preempted call with fewer tokens is computed again instead of swapped. With "auto" the engine
            measures this number when it starts, and again as it runs.

    Raises:
        SwapArgumentError: `space_gib` is not positive and finite, or `min_tokens` is negative.
    """

    space_gib: float = 4.0
    min_tokens: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.space_gib, bool) or not isinstance(self.space_gib, int | float):
            raise SwapArgumentError(f"space_gib is {self.space_gib!r}. Give a number of GiB.")
        if not 0 < self.space_gib < math.inf:
            raise SwapArgumentError(f"space_gib is {self.space_gib}. Give more than 0, or swap=None to recompute.")
        if self.min_tokens != "auto" and (self.min_tokens < 0):
            raise SwapArgumentError(f'min_tokens is {self.min_tokens!r}. Give "auto" or a number of tokens, 0 or more.')

    @property
    def space_bytes(self) -> int:
        """The memory in bytes."""
        return int(self.space_gib * 2**30)


def check_swap(swap: object) -> SwapConfig | None:
    """Check the `swap` argument of an engine.

    Raises:
        SwapArgumentError: It is neither a SwapConfig nor None.
    """
    if swap is None or isinstance(swap, SwapConfig):
        return swap
    example = f"weft.SwapConfig(space_gib={swap!r})" if isinstance(swap, int | float) else "weft.SwapConfig()"
    raise SwapArgumentError(f"swap is {swap!r}. Give a SwapConfig, such as {example}, or None to recompute.")
