"""Host memory for KV: how much there is, and which preempted calls it keeps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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
    """Raise SwapArgumentError unless the `swap` argument of an engine is a SwapConfig or None."""
    if swap is None or isinstance(swap, SwapConfig):
        return swap
    example = f"weft.SwapConfig(space_gib={swap!r})" if isinstance(swap, int | float) else "weft.SwapConfig()"
    raise SwapArgumentError(f"swap is {swap!r}. Give a SwapConfig, such as {example}, or None to recompute.")


_MIN_PREFILL_TOKENS: Final = 128  # steps of fewer tokens say little about the speed of prefill
_WINDOW_STEPS: Final = 64  # the latest of these steps, of which the median counts


class CopySpeed(NamedTuple):
    """How fast KV blocks move, as measured."""

    call_s: float  # seconds that every swap takes, however little it moves
    out_bytes_per_s: float
    in_bytes_per_s: float

    def slowest(self, other: CopySpeed) -> CopySpeed:
        """The speed of two workers together. Each copies its shard at the same time, so the slower one counts."""
        return CopySpeed(
            max(self.call_s, other.call_s),
            min(self.out_bytes_per_s, other.out_bytes_per_s),
            min(self.in_bytes_per_s, other.in_bytes_per_s),
        )


class SwapChoice:
    """Swaps a call if that takes less of the engine's time than computing its KV again.

    A swap takes `call_s` each way, and time for each byte. Computing again takes time for each token. So a swap pays
    from some number of tokens on. Every call is swapped while one of the two speeds is unknown.

    Args:
        min_tokens: as in `SwapConfig`.
        token_bytes: KV bytes of a token on one worker, all layers.

    Attributes:
        token_bytes: As passed.
        copy_speed: As measured; None before the first measurement.
    """

    def __init__(self, min_tokens: int | Literal["auto"], token_bytes: float) -> None:
        self._fixed = None if min_tokens == "auto" else min_tokens
        self.token_bytes = token_bytes
        self._prefill: deque[float] = deque(maxlen=_WINDOW_STEPS)  # seconds a token
        self.copy_speed: CopySpeed | None = None
        self._min_tokens: float | None = None
        self._prefill_tokens_per_s: float | None = None

    def observe_step(self, tokens: int, step_s: float) -> None:
        """A step that computed `tokens` tokens has taken `step_s` seconds."""
        if tokens >= _MIN_PREFILL_TOKENS and step_s > 0:
            self._prefill.append(step_s / tokens)
            self._min_tokens = self._prefill_tokens_per_s = None

    def observe_copy(self, speed: CopySpeed) -> None:
        """The workers have measured how fast they copy."""
        self.copy_speed = speed
        self._min_tokens = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Median over the latest steps of many tokens; None before the first such step."""
        if self._prefill_tokens_per_s is None and self._prefill:
            self._prefill_tokens_per_s = 1 / statistics.median(self._prefill)
        return self._prefill_tokens_per_s

    @property
    def min_tokens(self) -> float:
        """The number of tokens from which on a call is swapped; infinite if swapping never pays."""
        if self._fixed is not None:
            return self._fixed
        if self._min_tokens is None:
            self._min_tokens = self._break_even()
        return self._min_tokens

    def _break_even(self) -> float:
        prefill_tokens_per_s, speed = self.prefill_tokens_per_s, self.copy_speed
        if prefill_tokens_per_s is None or speed is None:
            return 0.0
        copy_s = self.token_bytes * (1 / speed.out_bytes_per_s + 1 / speed.in_bytes_per_s)
        gain_s = 1 / prefill_tokens_per_s - copy_s
        return 2 * speed.call_s / gain_s if gain_s > 0 else math.inf
